"""The whole cycle on the stand-in device, with 1 and 2 processes: compile, train, kill, resume, evaluate, embed.

Every command runs with compile.on_unknown_graph "error": a graph compiled after warm-up, or at a place that the
compile stage did not meet, ends it. The same workspace is trained on the CPU, by the flat program: losses agree.
"""

import shutil
import signal
from pathlib import Path

import pytest

from tests.native.cycle import TINY, Cycle
from tests.native.standin import needs_compiler

pytestmark = [needs_compiler, pytest.mark.thorough]
STEPS = 24
SETTINGS = TINY.replace("max_steps = 12", f"max_steps = {STEPS}")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared workspace."""
    folder = tmp_path_factory.mktemp("native")
    Cycle(folder, SETTINGS).on_host("prepare")
    return folder


def of(prepared: Path, folder: Path, processes: int) -> Cycle:
    shutil.copytree(prepared, folder, dirs_exist_ok=True)
    return Cycle(folder, SETTINGS, processes=processes)


@pytest.fixture(scope="module")
def on_cpu(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    cycle = of(prepared, tmp_path_factory.mktemp("cpu"), 1)
    cycle.on_host("train")
    losses = cycle.losses()
    assert sorted(losses) == list(range(1, STEPS + 1))
    return losses


@pytest.mark.timeout(1800)  # a dozen processes, each of which traces its programs
@pytest.mark.parametrize(("processes", "how"), [(1, signal.SIGKILL), (2, signal.SIGTERM)])
def test_the_whole_cycle(
    prepared: Path, on_cpu: dict[int, float], tmp_path: Path, processes: int, how: signal.Signals
) -> None:
    cycle = of(prepared, tmp_path, processes)
    compiled = cycle.run("compile")
    assert "programs" in compiled and "embed " in compiled
    cycle.killed(4, how)
    resumed = cycle.run("train")
    assert "resuming from" in resumed and "compiled ahead of time" in resumed
    losses = cycle.losses()
    assert sorted(losses) == sorted(on_cpu)
    assert max(abs(losses[step] - on_cpu[step]) for step in losses) < 1e-5
    checkpoint = f"checkpoints/one/step-{STEPS}"
    cycle.run("evaluate", "--evaluate.force-reason", "test")
    cycle.run("embed", "--embed.checkpoint", checkpoint)
    assert "serving.json" in cycle.run("embed", "verify")
