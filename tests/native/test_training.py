"""Training on the stand-in device: with two processes, whole and spread, the losses of the CPU; and programs outlive
the machine that compiled them: compiled on one, trained on another with an empty cache.

test_cycle.py has the whole cycle.
"""

import shutil
from pathlib import Path

import pytest

from tests.native.cycle import TINY, Cycle
from tests.native.standin import needs_compiler

ONE_SHAPE = (
    TINY.replace('["16x16", "32x32"]', '["16x16"]')
    .replace("max_steps = 12", "max_steps = 4")
    .replace("evaluate_every = 6", "evaluate_every = 0")
)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Cycle:
    cycle = Cycle(tmp_path_factory.mktemp("cpu"), ONE_SHAPE)
    cycle.on_host("prepare")
    cycle.on_host("train")
    return cycle


SHARDS = "parallel.shard_degree = 2\n"
PLANS = {
    "whole": "",
    "shards": SHARDS,
    "recomputed": SHARDS + 'parallel.recompute = "units"\n',
    "state": SHARDS + 'parallel.shard = "state"\n',
    "tensor": "parallel.tensor_degree = 2\n",
}


@needs_compiler
@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_model_spread_over_two_processes_has_the_losses_of_the_cpu(on_cpu: Cycle, tmp_path: Path, plan: str) -> None:
    """Compiled ahead of time: a program that the compile stage did not meet would end the run."""
    cycle = Cycle(tmp_path, ONE_SHAPE.replace("[train]\n", f"[train]\n{plan}"), processes=2)
    shutil.copytree(on_cpu.workspace / "tokens", cycle.workspace / "tokens")
    shutil.copytree(on_cpu.workspace / "cycles" / "one" / "prepare", cycle.workspace / "cycles" / "one" / "prepare")
    missing = "" if plan else "aten::gelu"
    cycle.run("compile", STANDIN_MISSING=missing)
    said = cycle.run("train", STANDIN_MISSING=missing)
    assert "compiled ahead of time" in said and "on 2 x neuron" in said
    losses, expected = cycle.losses(), on_cpu.losses()
    assert sorted(losses) == sorted(expected) == [1, 2, 3, 4]
    assert max(abs(losses[step] - expected[step]) for step in losses) < 1e-5
    warnings = [line for line in said.splitlines() if "ran on the host" in line]
    assert bool(plan) or ["neuron does not support aten::gelu" in line for line in warnings] == [True]


def programs(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.neff")}


@needs_compiler
@pytest.mark.stage
@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.thorough)])  # alone, and below a launcher
def test_what_one_machine_has_compiled_another_one_only_downloads(tmp_path: Path, processes: int) -> None:
    cycle, shared = Cycle(tmp_path, ONE_SHAPE, processes=processes), tmp_path / "shared"
    cycle.on_host("prepare")
    exchange = ("--compile.sync-url", f"file://{shared}")
    first, second = tmp_path / "first", tmp_path / "second"
    assert "compiled programs to file://" in cycle.run("compile", *exchange, "--compile.cache-url", str(first))
    compiled = programs(first)
    assert compiled and programs(shared / "neff") == compiled
    for name in compiled:  # another text: a program that is compiled anew would have its own
        (shared / "neff" / name).write_bytes(b"downloaded")
    said = cycle.run("train", *exchange, "--compile.cache-url", str(second))
    assert f"{len(compiled)} compiled programs from file://" in said and "compiled ahead of time" in said
    assert programs(second) == dict.fromkeys(compiled, b"downloaded"), "0 programs compiled"
