"""The graphs of a training step: where they are cut, and what each of them computes. On CPU, where all is eager."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.backends.cpu import CpuBackend
from pipeline.compile.manifest import GraphPosition, GraphWatch
from pipeline.core.batch_order import RankSlice
from pipeline.core.errors import ConfigError
from pipeline.data.loader import training_batches
from pipeline.data.shards import TokenRows
from pipeline.model.relevance import build_model
from pipeline.train.config import OptimizerConfig, TrainConfig
from pipeline.train.step import TrainProgram, flat_strategy, uses_dropout
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, grouped, make_program, make_rows, plan_of
from tests.train.test_step import batches_of, control, step


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("graphs"), [(80, 80)])


class Phases(GraphWatch):
    """What each graph was cut as, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def after(self, place: GraphPosition) -> None:
        self.seen.append(place.phase)


class GathersOnHost(CpuBackend):
    gathers_in_graph = False


class ReducesInGraph(CpuBackend):
    reduces_in_graph = True


FIRST, NEXT = "first_micro_step", "micro_step"


@pytest.mark.parametrize(
    ("boundary", "accumulation", "weight", "ranks", "backend", "expected"),
    [
        ("split", 1, 0.1, 1, CpuBackend, [FIRST, "update"]),
        ("fused", 1, 0.1, 1, CpuBackend, ["step"]),
        ("fused", 1, 0.1, 2, CpuBackend, [FIRST, "update"]),
        ("split", 1, 0.1, 2, CpuBackend, [FIRST, "update"]),
        ("split", 4, 0.0, 1, CpuBackend, [FIRST, NEXT, NEXT, NEXT, "update"]),
        ("fused", 2, 0.0, 1, CpuBackend, [FIRST, "step"]),
        ("split", 2, 0.1, 1, CpuBackend, ["embed_batch", "embed_batch", "contrast", FIRST, NEXT, "update"]),
        ("fused", 1, 0.1, 2, GathersOnHost, ["embed_batch", "embeddings", "contrast", FIRST, "update"]),
        ("fused", 1, 0.0, 2, GathersOnHost, [FIRST, "update"]),
        ("fused", 2, 0.1, 1, GathersOnHost, ["embed_batch", "embed_batch", "contrast", FIRST, "step"]),
        ("fused", 2, 0.1, 2, ReducesInGraph, ["embed_batch", "embed_batch", "contrast", FIRST, "step"]),
    ],
)
def test_where_a_step_is_cut(
    rows: TokenRows,
    boundary: str,
    accumulation: int,
    weight: float,
    ranks: int,
    backend: type[CpuBackend],
    expected: list[str],
) -> None:
    """Through the host ranks exchange between graphs: what is exchanged ends one, also copies of the masters."""
    loss = TRAIN.loss.model_copy(update={"contrastive_weight": weight})
    changes = {"step_boundary": boundary, "loss": loss}
    config, watch = TRAIN.model_copy(update=changes), Phases()
    share = RankSlice(0, ranks, accumulation)
    strategy = flat_strategy(build_model(MODEL, SPEC, 1), backend(), config)
    program = TrainProgram(strategy, strategy.backend, config, share, metric_rows=1, buckets=BUCKETS, watch=watch)
    groups = grouped(rows)
    micros = [one.tensors for one in training_batches(groups, plan_of(groups), RankSlice(0, 1, accumulation), 0, 1)]
    for _ in range(2):
        watch.seen.clear()
        step(program, micros[:accumulation], control(1))
        assert watch.seen == expected
    strategy.weights = [master.detach().clone().requires_grad_() for master in strategy.masters]
    program = TrainProgram(strategy, strategy.backend, config, share, metric_rows=1, buckets=BUCKETS, watch=watch)
    watch.seen.clear()
    step(program, micros[:accumulation], control(1))
    assert watch.seen == [*expected, *(["publish"] if ranks > 1 and backend is GathersOnHost else [])]


class OnNeuron(CpuBackend):
    is_neuron = True


@pytest.mark.parametrize(
    ("backend", "dropout", "recompute", "accumulation", "is_refused"),
    [
        (OnNeuron, 0.1, "units", 1, True),
        (OnNeuron, 0.1, "none", 2, True),
        (OnNeuron, 0.1, "none", 1, False),
        (OnNeuron, 0.0, "units", 2, False),
        (CpuBackend, 0.1, "units", 2, False),
    ],
)
def test_dropout_that_is_drawn_twice_is_refused_on_neuron(
    backend: type[CpuBackend], dropout: float, recompute: str, accumulation: int, is_refused: bool
) -> None:
    config = TrainConfig.model_validate({**TRAIN.model_dump(), "parallel": {"recompute": recompute, "shard_degree": 1}})
    assert config.loss.contrastive_weight
    model = MODEL.model_copy(update={"dropout": dropout})
    why = "recomputes layers" if recompute == "units" else "has two passes per step"
    with pytest.raises(ConfigError, match=why) if is_refused else nullcontext():
        make_program(backend(), config, model, accumulation)


@pytest.mark.parametrize(("layer", "is_refused"), [(torch.nn.Dropout(0.1), True), (torch.nn.Dropout(0.0), False)])
def test_dropout_of_a_module_of_a_factory_is_seen_on_neuron(layer: torch.nn.Module, is_refused: bool) -> None:
    encoder = build_model(MODEL, SPEC, 1).encoder
    assert not uses_dropout(encoder)
    encoder.add_module("theirs", layer)
    assert uses_dropout(encoder) == is_refused


class Outputs(CpuBackend):
    """Notes the outputs of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: list[list[Tensor]] = []

    def step_boundary(self, tensors: Sequence[Tensor]) -> None:
        self.cuts.append(list(tensors))
        super().step_boundary(tensors)


def test_all_that_an_update_changes_is_an_output_of_it(rows: TokenRows) -> None:
    backend = Outputs()
    program = make_program(backend)
    step(program, batches_of(rows, 1)[0], control(1))
    outputs = {id(one) for one in backend.cuts[-1]}
    for changed in (program.strategy.masters, program.optimizer.exp_avg, program.optimizer.exp_avg_sq):
        assert {id(one) for one in changed} <= outputs
    assert id(program.guard.state) in outputs and len(backend.cuts[-1]) == len(outputs)


class Traced(CpuBackend):
    is_lazy = True


class Operators(TorchDispatchMode):
    """Counts the operators that a device that traces would be handed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("head_rate", "vectors", "of_step", "of_update"), [(1.0, 2, 680, 125), (20.0, 4, 735, 170)])
def test_operators_that_the_host_traces_for_a_step(
    rows: TokenRows, head_rate: float, vectors: int, of_step: int, of_update: int
) -> None:
    """Host time of a step is that of its operators, whatever the machine."""
    config = TRAIN.model_copy(update={"optimizer": OptimizerConfig(head_rate=head_rate)})
    program = make_program(Traced(), config)
    assert len(program.strategy.masters) == vectors
    (micros,) = batches_of(rows, 1)
    with Operators() as accumulating:
        program.accumulate(micros)
    with Operators() as updating:
        program._update(control(1))
    assert updating.count <= of_update
    assert accumulating.count + updating.count <= of_step
