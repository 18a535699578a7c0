"""The training program on CPU: gradients, guard, figures, state."""

import math
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.backends.cpu import CpuBackend
from pipeline.compile.watch import GraphWatch, Place
from pipeline.core.batch_order import RankShare
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.data.loader import to_tensors, training_batches
from pipeline.data.shards import TokenRows
from pipeline.model.config import LossConfig
from pipeline.model.hf_weights import to_hf
from pipeline.model.losses import LOG_SCALE, start_values
from pipeline.model.relevance import build_model
from pipeline.train.build import Saver
from pipeline.train.config import OptimizerConfig, TrainConfig
from pipeline.train.optimizer import AdamW, control_values
from pipeline.train.program import flat_strategy
from pipeline.train.step import FIGURES, TrainProgram, has_dropout
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, grouped, make_program, make_rows, mined_from, plan_of

Batches = list[dict[str, Tensor]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("program"), [(80, 80)])


def batches_of(rows: TokenRows, steps: int, accumulation: int = 1, rank: int = 0, world_size: int = 1) -> list[Batches]:
    groups = grouped(rows)
    stream = training_batches(groups, plan_of(groups), RankShare(rank, world_size, accumulation), 0, steps)
    micro = [batch.tensors for batch in stream]
    return [micro[step * accumulation : (step + 1) * accumulation] for step in range(steps)]


def control(step: int, rate: float = 0.01, config: TrainConfig = TRAIN) -> Tensor:
    return control_values(step, rate, config.optimizer)


def step(program: TrainProgram, micros: Batches, control: Tensor) -> None:
    program.step([{**batch, "control": control} for batch in micros])


def train(program: TrainProgram, steps: list[Batches], rate: float = 0.01) -> list[dict[str, float]]:
    for number, micros in enumerate(steps, start=1):
        step(program, micros, control(number, rate))
    return program.read_figures(len(steps))


def check_alike(program: TrainProgram, other: TrainProgram, steps: list[Batches]) -> None:
    """From the third step on both do the same, to the bit."""
    for number, (batch,) in enumerate(steps, start=3):
        for one in (program, other):
            step(one, [batch], control(number))
    left, right = state_of(program), state_of(other)
    assert all(torch.equal(left[name], right[name]) for name in left)


def state_of(program: TrainProgram) -> dict[str, Tensor]:
    weights, optimizer = program.snapshot()
    return {**weights, **optimizer}


class Ranks:
    """The other ranks of a world in threads of this process, which meet for every exchange."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size)
        self._slots: list[list[Tensor]] = [[] for _ in range(world_size)]

    def meet(self, rank: int, tensors: list[Tensor]) -> list[list[Tensor]]:
        self._slots[rank] = [tensor.clone() for tensor in tensors]
        self._barrier.wait(120)
        everybody = [list(slot) for slot in self._slots]
        self._barrier.wait(120)
        return everybody

    def mean(self, rank: int, tensors: list[Tensor]) -> list[Tensor]:
        for tensor, *parts in zip(tensors, *self.meet(rank, tensors), strict=True):
            tensor.copy_(sum(parts) / self.world_size)
        return tensors

    def gather(self, rank: int, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*self.meet(rank, tensors), strict=True)]


def gradients(rows: TokenRows, config: TrainConfig, world_size: int, accumulation: int, two_passes: bool) -> Tensor:
    """(losses, then the first moments after the last step with beta1 0: the gradient itself) of every rank, [R, ...].

    One step, or with a memory two, at rate 0: what is in it differs from the batch, and the weights stay.
    """
    steps = 1 + bool(config.loss.memory_batches)
    mined = mined_from(rows, config.mined_per_query) if config.mined_per_query else None
    groups, ranks, found = grouped(rows, config, mined), Ranks(world_size), {}

    class Backend(CpuBackend):
        gathers_in_graph = not two_passes

    def run(rank: int) -> None:
        strategy = flat_strategy(
            build_model(MODEL, SPEC, config.seed),
            Backend(),
            config,
            world_size=world_size,
            host_mean=lambda tensors: ranks.mean(rank, tensors),
            host_gather=lambda tensors: ranks.gather(rank, tensors),
        )
        share = RankShare(rank, world_size, accumulation)
        program = TrainProgram(strategy, strategy.backend, config, share, figure_rows=1, buckets=rows.buckets)
        micros = [batch.tensors for batch in training_batches(groups, plan_of(groups, config), share, 0, steps)]
        for number in range(steps):
            these = micros[number * accumulation : (number + 1) * accumulation]
            step(program, these, control_values(number + 1, 0.0, config.optimizer))
        (figures,) = program.read_figures(1)
        moments = [moment.reshape(-1) for moment in program.optimizer.exp_avg]
        found[rank] = torch.cat([torch.tensor([figures["loss"]]), *moments])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return torch.stack([found[rank] for rank in range(world_size)])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 2, 4, 8])
@pytest.mark.parametrize(("two_passes", "mined"), [(False, 0), (False, 3), (True, 0), (True, 3)])
def test_loss_and_gradient_of_a_global_batch_do_not_depend_on_how_it_is_cut(
    rows: TokenRows, world_size: int, accumulation: int, two_passes: bool, mined: int
) -> None:
    config = TRAIN.model_copy(
        update={
            "mined_per_query": mined,
            "global_batch_size": 64,
            "micro_batch_size": 64,
            "loss": LossConfig(
                symmetric_share=0.3,
                listwise_weight=0.2,
                head_gradient=0.5,
                learn_temperature=bool(mined),
                matryoshka_sizes=(4, 8) if mined else (),
                memory_batches=2 if mined else 0,
            ),
            "optimizer": OptimizerConfig(beta1=0.0, max_grad_norm=1e9),
        }
    )
    whole = gradients(rows, config, 1, 1, two_passes=False)[0]
    cut = gradients(rows, config, world_size, accumulation, two_passes)
    assert float(whole[1:].abs().max()) > 1e-2
    assert float(whole[-1].abs()) > 1e-2 or not mined, "the gradient by the temperature, the last parameter"
    for rank in cut:
        torch.testing.assert_close(rank, whole, rtol=1e-5, atol=1e-6)


def test_accumulation_does_not_change_the_result(rows: TokenRows) -> None:
    whole, halves = make_program(CpuBackend()), make_program(CpuBackend(), accumulation=2)
    first, second = train(whole, batches_of(rows, 3)), train(halves, batches_of(rows, 3, accumulation=2))
    for one, two in zip(first, second, strict=True):
        assert one == pytest.approx(two, rel=1e-5)
    left, right = state_of(whole), state_of(halves)
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=2e-6, msg=name)


def test_both_passes_draw_the_same_dropout(rows: TokenRows) -> None:
    """The gradient by finite differences: the loss of the figures is that of the masks the gradient was made with."""
    dropped = MODEL.model_copy(update={"dropout": 0.5})
    config = TRAIN.model_copy(update={"optimizer": OptimizerConfig(beta1=0.0, max_grad_norm=1e9)})
    (micros,) = batches_of(rows, 1, accumulation=2)

    def loss_and_gradient(shift: float) -> tuple[float, Tensor]:
        program = make_program(CpuBackend(), config, dropped, accumulation=2)
        with torch.no_grad():
            program.strategy.masters[0] += shift * direction if shift else 0.0
        program.step([{**batch, "control": control_values(1, 0.0, config.optimizer)} for batch in micros], seeds=[3, 4])
        return program.read_figures(1)[0]["loss"], program.optimizer.exp_avg[0].clone()

    direction = torch.zeros(1)
    _, gradient = loss_and_gradient(0.0)
    direction = gradient / gradient.norm()
    slope = (loss_and_gradient(1e-3)[0] - loss_and_gradient(-1e-3)[0]) / 2e-3
    assert slope == pytest.approx(float(gradient.norm()), rel=0.02)


class Phases(GraphWatch):
    """What each graph was cut as, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def after(self, place: Place) -> None:
        self.seen.append(place.phase)


class GathersOnHost(CpuBackend):
    gathers_in_graph = False


class ReducesInGraph(CpuBackend):
    reduces_in_graph = True


FIRST, NEXT = "first_micro_step", "micro_step"


@pytest.mark.parametrize(
    ("boundary", "accumulation", "together", "weight", "ranks", "backend", "expected"),
    [
        ("split", 1, 1, 0.1, 1, CpuBackend, [FIRST, "update"]),
        ("fused", 1, 1, 0.1, 1, CpuBackend, ["step"]),
        ("fused", 1, 1, 0.1, 2, CpuBackend, [FIRST, "update"]),
        ("split", 4, 1, 0.0, 1, CpuBackend, [FIRST, NEXT, NEXT, NEXT, "update"]),
        ("fused", 4, 2, 0.0, 1, CpuBackend, [FIRST, "step"]),
        ("split", 3, 2, 0.0, 1, CpuBackend, [FIRST, NEXT, "update"]),
        ("split", 2, 1, 0.1, 1, CpuBackend, ["embed_batch", "embed_batch", "contrast", FIRST, NEXT, "update"]),
        ("split", 3, 2, 0.1, 1, CpuBackend, ["embed_batch", "embed_batch", "contrast", FIRST, NEXT, "update"]),
        ("fused", 1, 1, 0.1, 2, GathersOnHost, ["embed_batch", "embeddings", "contrast", FIRST, "update"]),
        ("fused", 1, 1, 0.0, 2, GathersOnHost, [FIRST, "update"]),
        ("fused", 2, 1, 0.1, 1, GathersOnHost, ["embed_batch", "embed_batch", "contrast", FIRST, "step"]),
        ("fused", 2, 1, 0.1, 2, ReducesInGraph, ["embed_batch", "embed_batch", "contrast", FIRST, "step"]),
    ],
)
def test_where_a_step_is_cut(
    rows: TokenRows,
    boundary: str,
    accumulation: int,
    together: int,
    weight: float,
    ranks: int,
    backend: type[CpuBackend],
    expected: list[str],
) -> None:
    """Through the host ranks exchange between graphs: what is exchanged ends one."""
    loss = TRAIN.loss.model_copy(update={"contrastive_weight": weight})
    changes = {"step_boundary": boundary, "batches_per_execution": together, "loss": loss}
    config, watch = TRAIN.model_copy(update=changes), Phases()
    share = RankShare(0, ranks, accumulation)
    strategy = flat_strategy(build_model(MODEL, SPEC, 1), backend(), config)
    program = TrainProgram(strategy, strategy.backend, config, share, figure_rows=1, buckets=BUCKETS, watch=watch)
    groups = grouped(rows)
    micros = [one.tensors for one in training_batches(groups, plan_of(groups), RankShare(0, 1, accumulation), 0, 1)]
    for _ in range(2):
        watch.seen.clear()
        step(program, micros[:accumulation], control(1))
        assert watch.seen == expected


@pytest.mark.parametrize(
    ("ranks", "backend", "has_copies", "expected"),
    [
        (2, GathersOnHost, True, [FIRST, "update", "publish"]),
        (2, GathersOnHost, False, [FIRST, "update"]),
        (2, CpuBackend, True, [FIRST, "update"]),
        (1, GathersOnHost, True, ["step"]),
    ],
)
def test_weights_that_go_through_the_host_are_published_apart(
    rows: TokenRows, ranks: int, backend: type[CpuBackend], has_copies: bool, expected: list[str]
) -> None:
    config, watch = TRAIN.model_copy(update={"step_boundary": "fused"}), Phases()
    strategy = flat_strategy(build_model(MODEL, SPEC, 1), backend(), config)
    if has_copies:
        strategy.weights = [master.detach().clone().requires_grad_() for master in strategy.masters]
    share = RankShare(0, ranks, 1)
    program = TrainProgram(strategy, strategy.backend, config, share, figure_rows=1, buckets=BUCKETS, watch=watch)
    watch.seen.clear()
    step(program, batches_of(rows, 1)[0], control(1))
    assert watch.seen[-len(expected) :] == expected


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
    why = "layers are computed again" if recompute == "units" else "a step has two passes"
    with pytest.raises(ConfigError, match=why) if is_refused else nullcontext():
        make_program(backend(), config, model, accumulation)


@pytest.mark.parametrize(("layer", "is_refused"), [(torch.nn.Dropout(0.1), True), (torch.nn.Dropout(0.0), False)])
def test_dropout_of_a_module_of_a_factory_is_seen_on_neuron(layer: torch.nn.Module, is_refused: bool) -> None:
    encoder = build_model(MODEL, SPEC, 1).encoder
    assert not has_dropout(encoder)
    encoder.add_module("theirs", layer)
    assert has_dropout(encoder) == is_refused


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("compiles_steps", [False, True])
def test_the_update_is_written_out_where_it_becomes_a_graph(
    monkeypatch: pytest.MonkeyPatch, is_lazy: bool, compiles_steps: bool
) -> None:
    class Noted(AdamW):
        def __init__(self, *args: Any, traced: bool, **more: Any) -> None:
            seen.append(traced)
            super().__init__(*args, traced=traced, **more)

    seen: list[bool] = []
    monkeypatch.setattr("pipeline.train.step.AdamW", Noted)
    backend = CpuBackend()
    backend.is_lazy, backend.compiles_steps = is_lazy, compiles_steps
    make_program(backend)
    assert seen == [is_lazy or compiles_steps]


def test_it_learns(rows: TokenRows) -> None:
    config = TRAIN.model_copy(update={"optimizer": OptimizerConfig(weight_decay=0.0)})
    program = make_program(CpuBackend(), config)
    steps = batches_of(rows, 10) * 3
    for number, (batch,) in enumerate(steps, start=1):
        step(program, [batch], control(number, rate=0.01))
        if number == 8:
            first = [row["loss"] for row in program.read_figures(8)]
    last = [row["loss"] for row in program.read_figures(8)]
    assert sum(last) < 0.8 * sum(first)


def test_the_gradient_is_clipped_to_the_norm(rows: TokenRows) -> None:
    """With Adam's moments at zero and beta1 = 0, the first moment is the clipped gradient itself."""
    tight = OptimizerConfig(max_grad_norm=1e-3, beta1=0.0)
    program = make_program(CpuBackend(), TRAIN.model_copy(update={"optimizer": tight}))
    ((batch,),) = batches_of(rows, 1)
    step(program, [batch], control_values(1, 0.0, tight))
    (figures,) = program.read_figures(1)
    norm = sum(float(moment.square().sum()) for moment in program.optimizer.exp_avg) ** 0.5
    assert figures["grad_norm"] > 1e-2
    assert norm == pytest.approx(1e-3, rel=1e-3)


def test_a_nan_step_changes_nothing_but_the_counters(rows: TokenRows) -> None:
    program = make_program(CpuBackend())
    steps = batches_of(rows, 3)
    train(program, steps[:2])
    before = state_of(program)
    poisoned = {**steps[2][0], "numeric": torch.full_like(steps[2][0]["numeric"], float("nan"))}
    step(program, [poisoned], control(3))
    after = state_of(program)
    assert before["guard"].tolist() != after["guard"].tolist()
    assert torch.equal(before.pop("guard")[:3], after["guard"][:3])
    assert all(torch.equal(before[name], after[name]) for name in before)
    (figures,) = program.read_figures(1)
    assert figures["skipped"] == figures["skipped_in_a_row"] == 1
    step(program, steps[2], control(4))
    assert program.read_figures(1)[0]["skipped_in_a_row"] == 0
    assert not torch.equal(before["head.weight"], state_of(program)["head.weight"])


def test_figures_are_the_last_steps_oldest_first(rows: TokenRows) -> None:
    program = make_program(CpuBackend())
    figures = train(program, batches_of(rows, 3))
    assert [row["step"] for row in figures] == [1.0, 2.0, 3.0]
    assert all(set(row) == set(FIGURES) for row in figures)
    assert program.read_figures(0) == []
    assert [row["step"] for row in program.read_figures(2)] == [2.0, 3.0]


def test_restored_state_continues_bit_by_bit(rows: TokenRows) -> None:
    steps = batches_of(rows, 4)
    program = make_program(CpuBackend())
    train(program, steps[:2])
    weights, optimizer = ({name: tensor.clone() for name, tensor in part.items()} for part in program.snapshot())
    other = make_program(CpuBackend(), TRAIN.model_copy(update={"seed": 99}))
    other.restore(weights, optimizer)
    check_alike(program, other, steps[2:])


REMEMBERING = TRAIN.model_copy(update={"loss": LossConfig(memory_batches=3)})


def test_a_memory_changes_the_loss_from_the_second_step_on_and_is_restored_bit_by_bit(rows: TokenRows) -> None:
    steps = batches_of(rows, 4)
    plain, program = make_program(CpuBackend()), make_program(CpuBackend(), REMEMBERING)
    without, found = train(plain, steps[:2]), train(program, steps[:2])
    assert found[0] == pytest.approx(without[0], rel=1e-5) and found[1]["loss"] > without[1]["loss"] + 1e-5
    weights, optimizer = ({name: tensor.clone() for name, tensor in part.items()} for part in program.snapshot())
    there = optimizer["memory.kind"] > 0
    products = TRAIN.global_batch_size
    assert len(there) == 3 * products and int(there[:products].sum()) == 0 < int(there[-products:].sum())
    other = make_program(CpuBackend(), REMEMBERING.model_copy(update={"seed": 99}))
    other.restore(weights, optimizer)
    check_alike(program, other, steps[2:])


def test_a_run_without_a_memory_does_not_go_on_from_one_that_has_it(rows: TokenRows) -> None:
    program = make_program(CpuBackend(), REMEMBERING)
    with pytest.raises(CheckpointError, match=r"memory\.kind"):
        make_program(CpuBackend()).restore(*program.snapshot())


AVERAGED = TRAIN.model_copy(update={"average_decay": 0.9})


def test_the_average_is_what_is_served_and_changes_nothing_of_training(rows: TokenRows) -> None:
    steps = batches_of(rows, 4)
    plain, averaged = make_program(CpuBackend()), make_program(CpuBackend(), AVERAGED)
    expected = {name: tensor.double() for name, tensor in plain.snapshot()[0].items()}
    for number, (batch,) in enumerate(steps, start=1):
        for one in (plain, averaged):
            step(one, [batch], control(number))
        share = 1 - min(0.9, (1 + number) / (10 + number))
        for name, tensor in plain.snapshot()[0].items():
            expected[name] += (tensor.double() - expected[name]) * share
    weights, optimizer = averaged.snapshot()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name].double(), tensor, rtol=1e-6, atol=1e-7)
    masters = torch.cat([optimizer["masters.decayed"], optimizer["masters.plain"]])
    assert torch.equal(masters, torch.cat([master.detach() for master in plain.strategy.masters]))
    served = make_program(CpuBackend())
    served.restore(weights, None)
    assert torch.equal(served.outputs(steps[0][0]).logits, averaged.outputs(steps[0][0]).logits)
    other = make_program(CpuBackend(), AVERAGED.model_copy(update={"seed": 99}))
    other.restore(weights, optimizer)
    for one in (averaged, other):
        step(one, [steps[0][0]], control(5))
    left, right = state_of(averaged), state_of(other)
    assert all(torch.equal(left[name], right[name]) for name in left)
    fresh = make_program(CpuBackend(), AVERAGED)
    fresh.restore(weights, None)  # a run that starts from a promoted model
    assert all(torch.equal(a, m) for a, m in zip(fresh.average, fresh.strategy.masters, strict=True))


LEARNT = TRAIN.model_copy(update={"loss": LossConfig(learn_temperature=True, temperature=0.05)})


def test_a_learnt_temperature_is_one_more_tensor_of_a_checkpoint_and_changes_nothing_but_itself_at_first(
    rows: TokenRows,
) -> None:
    """One step from equal weights: the gradient of the weights has the direction of that at the fixed temperature.

    Its length is clipped with one element more. Not the weights after it: Adam divides by the gradient's own size, and
    what is zero but for rounding becomes a whole step.
    """
    ((batch,),) = batches_of(rows, 1)
    plain, learnt = make_program(CpuBackend()), make_program(CpuBackend(), LEARNT)
    for one in (plain, learnt):
        step(one, [batch], control(1))
    (weights, _), (before, _) = learnt.snapshot(), plain.snapshot()
    assert weights.keys() - before.keys() == {LOG_SCALE}
    found, expected = (torch.cat([part.reshape(-1) for part in one.optimizer.exp_avg]) for one in (learnt, plain))
    assert len(found) == len(expected) + 1
    directions = [torch.nn.functional.normalize(vector[: len(expected)], dim=0) for vector in (found, expected)]
    torch.testing.assert_close(*directions, rtol=1e-4, atol=1e-6)
    (figures,) = learnt.read_figures(1)
    assert figures["temperature"] == pytest.approx(math.exp(-float(weights[LOG_SCALE])))
    assert figures["temperature"] != pytest.approx(0.05, rel=1e-3) and "temperature" not in plain.read_figures(1)[0]


def test_a_learnt_temperature_stays_at_a_hundredth_or_above(rows: TokenRows) -> None:
    program = make_program(CpuBackend(), LEARNT)
    ((batch,),) = batches_of(rows, 1)
    with torch.no_grad():
        program.strategy.masters[-1].fill_(5.0)
    step(program, [batch], control(1))
    assert program.read_figures(1)[0]["temperature"] == pytest.approx(0.01)
    assert float(program.snapshot()[0][LOG_SCALE]) == pytest.approx(math.log(100))


def test_a_run_that_learns_the_temperature_is_restored_bit_by_bit(rows: TokenRows) -> None:
    config = LEARNT.model_copy(update={"average_decay": 0.9})
    steps = batches_of(rows, 3)
    program, other = (make_program(CpuBackend(), one) for one in (config, config.model_copy(update={"seed": 99})))
    train(program, steps[:2])
    other.restore(*program.snapshot())
    for one in (program, other):
        step(one, steps[2], control(3))
    left, right = state_of(program), state_of(other)
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("learns", "knows"), [(True, True), (True, False), (False, True)])
def test_a_parent_gives_the_temperature_it_learnt(rows: TokenRows, learns: bool, knows: bool) -> None:
    """One that did not learn it leaves the start value; a run that does not learn it leaves the parent's out."""
    parent = make_program(CpuBackend(), LEARNT if knows else TRAIN)
    train(parent, batches_of(rows, 1))
    config = TRAIN.model_copy(update={"loss": LossConfig(learn_temperature=learns, temperature=0.03)})
    program, said = make_program(CpuBackend(), config), list[str]()
    weights = to_hf(parent.snapshot()[0])
    template = {name: tensor.to("meta") for name, tensor in program.snapshot()[0].items()}
    saver: Any = Saver(program, None, None, None, None, template, b"", said.append, start_values(config.loss))  # type: ignore[arg-type]
    saver.start_from(SimpleNamespace(weights=lambda: weights, prefix="checkpoints/c/step-1"))
    found = program.snapshot()[0]
    assert torch.equal(found["head.weight"], weights["head.weight"])
    if learns:
        expected = weights[LOG_SCALE] if knows else torch.tensor([-math.log(0.03)])
        torch.testing.assert_close(found[LOG_SCALE], expected)
    assert ["learnt a temperature, which is left out" in message for message in said] == ([] if learns else [True])


DECAYING = TRAIN.model_copy(update={"optimizer": OptimizerConfig(layer_decay=0.5, weight_decay=0.0)})


def test_a_layer_moves_at_its_own_rate(rows: TokenRows) -> None:
    """One step of Adam from nothing moves each parameter by its rate, whatever the gradient."""
    model = MODEL.model_copy(update={"num_layers": 2})
    program = make_program(CpuBackend(), DECAYING, model)
    before = {name: tensor.clone() for name, tensor in program.snapshot()[0].items()}
    train(program, batches_of(rows, 1), rate=0.01)
    after = program.snapshot()[0]
    moved = {name: float((after[name] - before[name]).abs().max()) for name in after}
    assert moved["encoder.word_embeddings.weight"] == pytest.approx(0.0025, rel=1e-2)
    assert moved["encoder.embedding_norm.bias"] == pytest.approx(0.0025, rel=1e-2)
    assert moved["encoder.layers.0.output.weight"] == pytest.approx(0.005, rel=1e-2)
    assert moved["encoder.layers.1.output.weight"] == pytest.approx(0.01, rel=1e-2)
    assert moved["head.weight"] == pytest.approx(0.01, rel=1e-2)


def test_the_norm_behind_the_last_layer_of_a_modernbert_moves_as_that_layer(rows: TokenRows) -> None:
    program = make_program(CpuBackend(), DECAYING, MODEL.model_copy(update={"architecture": "modernbert"}))
    before = {name: tensor.clone() for name, tensor in program.snapshot()[0].items()}
    train(program, batches_of(rows, 1), rate=0.01)
    after = program.snapshot()[0]
    last = MODEL.encoder.num_layers - 1
    for name in ("final_norm.weight", f"layers.{last}.output.weight"):
        moved = float((after[f"encoder.{name}"] - before[f"encoder.{name}"]).abs().max())
        assert moved == pytest.approx(0.01, rel=1e-2), name


def test_layers_apart_have_the_state_of_one_vector_and_the_same_bits_in_any_chunks(rows: TokenRows) -> None:
    steps = batches_of(rows, 3)
    model = MODEL.model_copy(update={"num_layers": 2})
    small = DECAYING.model_copy(update={"chunk_mib": 0.002})
    whole, chunked = (make_program(CpuBackend(), config, model) for config in (DECAYING, small))
    assert len(whole.strategy.masters) == 8 < len(chunked.strategy.masters)
    assert train(whole, steps[:2]) == train(chunked, steps[:2])
    other = make_program(CpuBackend(), small, model)
    other.restore(*whole.snapshot())
    for one in (whole, other):
        step(one, steps[2], control(3))
    found, expected = state_of(other), state_of(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    alike = make_program(CpuBackend(), TRAIN, model)  # all layers at one rate: what it saves has the same form
    assert {n: t.shape for n, t in state_of(alike).items()} == {n: t.shape for n, t in expected.items()}


CHUNKED = TRAIN.model_copy(update={"chunk_mib": 0.002})


def test_chunks_change_no_bit_also_not_of_a_run_that_is_continued_with_others(rows: TokenRows) -> None:
    """Clipping, too: the norm is that of all gradients. `middle` starts whole and goes on in chunks."""
    steps = batches_of(rows, 4, accumulation=2)
    whole, chunked, middle = (make_program(CpuBackend(), config, accumulation=2) for config in (TRAIN, CHUNKED, TRAIN))
    assert len(whole.strategy.masters) == 4 and len(chunked.strategy.masters) > 8
    assert train(whole, steps) == train(chunked, steps)
    train(middle, steps[:2])
    other = make_program(CpuBackend(), CHUNKED, accumulation=2)
    other.restore(*middle.snapshot())
    for number, micros in enumerate(steps[2:], start=3):
        step(other, micros, control(number))
    expected = state_of(whole)
    for program in (chunked, other):
        found = state_of(program)
        assert found.keys() == expected.keys(), "a checkpoint does not show the chunks"
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_snapshot_does_not_change_with_training(rows: TokenRows) -> None:
    program = make_program(CpuBackend())
    weights, optimizer = program.snapshot()
    copies = {name: tensor.clone() for name, tensor in {**weights, **optimizer}.items()}
    train(program, batches_of(rows, 1))
    assert all(torch.equal({**weights, **optimizer}[name], copy) for name, copy in copies.items())
    assert weights["head.weight"].dtype == torch.float32


def test_state_of_another_shape_is_refused_by_name(rows: TokenRows) -> None:
    program = make_program(CpuBackend())
    weights, optimizer = program.snapshot()
    with pytest.raises(CheckpointError, match="optimizer state with"):
        program.restore(weights, {"guard": optimizer["guard"]})
    with pytest.raises(CheckpointError, match=r"exp_avg.plain has \[3\] elements"):
        program.restore(weights, {**optimizer, "exp_avg.plain": torch.zeros(3)})


def test_a_batch_outside_the_buckets_is_a_data_error(rows: TokenRows) -> None:
    ((batch,),) = batches_of(rows, 1)
    wide = {**batch, "tokens": torch.zeros(4, 7, dtype=torch.int32)}
    with pytest.raises(DataError, match=r"a batch of 7 tokens\s+expected: one of 12, 22, 4x6, 6x8"):
        step(make_program(CpuBackend()), [wide], control(1))


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_low_precision_trains_close_to_fp32(rows: TokenRows, precision: str) -> None:
    config = TRAIN.model_copy(update={"precision": precision})
    program = make_program(CpuBackend(), config)
    steps = batches_of(rows, 4)
    low, full = train(program, steps, 0.001), train(make_program(CpuBackend()), steps, 0.001)
    assert [row["loss"] for row in low] == pytest.approx([row["loss"] for row in full], rel=0.02)
    assert low != full
    assert all(master.dtype == torch.float32 for master in program.strategy.masters)
    assert low[-1]["skipped"] == 0
    assert program.outputs(steps[0][0]).logits.dtype == torch.float32


def test_scores_are_without_gradient_and_dropout(rows: TokenRows) -> None:
    program = make_program(CpuBackend(), model=MODEL.model_copy(update={"dropout": 0.5}))
    ((batch,),) = batches_of(rows, 1)
    step(program, [batch], control(1))
    pairs = to_tensors(rows.read(np.zeros(4, dtype=np.int64), np.arange(4), 1))
    first, second = program.outputs(pairs).logits, program.outputs(pairs).logits
    assert torch.equal(first, second) and not first.requires_grad
    assert program.has_dropout and not make_program(CpuBackend()).has_dropout
