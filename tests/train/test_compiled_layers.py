"""Layers that are compiled by torch.compile, on the CPU as they would be on a GPU."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.backends import cpu
from pipeline.backends.cpu import CpuBackend
from pipeline.compile.manifest import GraphWatch
from pipeline.core.errors import ConfigError
from pipeline.model.relevance import build_model
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.train.config import TrainConfig, TrainPlan, needs_two_passes, rank_slice
from pipeline.train.step import compiles_layers, open_program
from tests.train.rows import BUCKETS, MODEL, SPEC, TRAIN, make_program, make_rows
from tests.train.test_step import batches_of, state_of, train

COMPILED = TRAIN.model_copy(update={"compiled": True})


class Compiles(CpuBackend):
    """A CPU whose layers are compiled by default, as on a GPU with a C compiler."""

    compiles_layers = True


class Lazy(CpuBackend):
    is_lazy = True


@pytest.mark.stage
@pytest.mark.skipif(not cpu.has_compiler(), reason="needs a C compiler")
def test_compiled_layers_learn_the_same_with_one_program_per_row_length(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(80, 80)])
    steps = batches_of(rows, 6)
    torch._dynamo.reset()
    counters.clear()
    found = []
    for config in (TRAIN, COMPILED):
        program = make_program(CpuBackend(), config)
        figures = train(program, steps)
        found.append(([each["loss"] for each in figures], state_of(program)))
    lengths = {tuple(micro["tokens"].shape) for micros in steps for micro in micros}
    assert counters["stats"]["unique_graphs"] == len(lengths)
    (eager, weights), (compiled, other) = found
    assert compiled == pytest.approx(eager, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.skipif(not cpu.has_compiler(), reason="needs a C compiler")
def test_more_programs_than_the_default_limit_are_allowed() -> None:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor

    program = CpuBackend().compiled(double)
    assert all(program(torch.ones(length)).sum() == 2 * length for length in range(1, 11))


def test_the_default_is_that_of_the_device() -> None:
    config = TrainConfig()
    assert (compiles_layers(config, Compiles()), compiles_layers(config, CpuBackend())) == (True, False)
    assert not compiles_layers(config.model_copy(update={"compiled": False}), Compiles())
    assert not compiles_layers(config, Compiles(), repeats_dropout=True)
    recomputes = TrainConfig(parallel=TrainPlan(recompute="units"))
    assert not compiles_layers(recomputes, Compiles())


@pytest.mark.parametrize(
    ("config", "backend", "seen"),
    [
        (COMPILED, Lazy, "cpu is not compiled"),
        (COMPILED.model_copy(update={"parallel": TrainPlan(recompute="units")}), CpuBackend, "recomputed layers"),
    ],
)
def test_what_cannot_be_compiled_is_refused(config: TrainConfig, backend: type[CpuBackend], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        compiles_layers(config, backend())


def test_two_passes_with_dropout_are_not_compiled() -> None:
    """Programs of torch.compile have other random numbers than the layers, which run in the first pass."""
    config = COMPILED.model_copy(update={"micro_batch_size": COMPILED.global_batch_size // 2})
    share = rank_slice(config, 1)
    assert needs_two_passes(config, share, gathers_in_graph=True)
    model = build_model(MODEL.model_copy(update={"dropout": 0.1}), SPEC, seed=1)
    process_group = ProcessGroup(World(), timeout_s=60.0)
    with pytest.raises(ConfigError, match="needs the same random numbers in both"):
        open_program(
            model,
            CpuBackend(),
            config,
            share,
            process_group,
            metric_rows=8,
            buckets=BUCKETS,
            watch=GraphWatch(),
        )


def test_without_a_compiler_the_error_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "has_compiler", lambda: False)
    with pytest.raises(ConfigError, match="next: install gcc"):
        make_program(CpuBackend(), COMPILED)
