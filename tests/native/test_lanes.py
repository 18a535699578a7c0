"""One workspace, two versions of torch and Python: what one leaves half-way, the other one continues.

TRNPIPE_OTHER_LANE is the interpreter of the other one, such as .venv-native/bin/python under `make test-thorough`.
Both run on the CPU.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.native.cycle import TINY, Cycle
from tests.native.standin import ROOT

OTHER = os.environ.get("TRNPIPE_OTHER_LANE", "")
pytestmark = [
    pytest.mark.stage,
    pytest.mark.thorough,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not OTHER, reason="TRNPIPE_OTHER_LANE names no interpreter with another torch"),
]
HALF, END = 4, 12


def run(interpreter: str, workspace: Path, config: Path, stage: str) -> str:
    words = ["--config", str(config), "--workspace", str(workspace), "--cycle", "one", "--backend", "cpu"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [interpreter, "-m", "pipeline", stage, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def forget_after(workspace: Path, step: int) -> None:
    """As if the run had been lost there."""
    for folder in (workspace / "checkpoints" / "one").glob("step-*"):
        if int(folder.name.partition("-")[2]) > step:
            shutil.rmtree(folder)
    shutil.rmtree(workspace / "cycles" / "one" / "train")


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_a_checkpoint_of_one_continues_in_the_other(tmp_path: Path, is_ours_first: bool) -> None:
    version = "import torch; print(torch.__version__)"
    versions = {
        subprocess.run([one, "-c", version], capture_output=True, text=True, check=True).stdout
        for one in (sys.executable, OTHER)
    }
    assert len(versions) == 2, "the other lane has the same torch"
    first, second = (sys.executable, OTHER) if is_ours_first else (OTHER, sys.executable)
    cycle = Cycle(tmp_path / "whole", TINY.replace("every_steps = 4", "every_steps = 4\nkeep_last = 9"), env={})
    config = cycle.folder / "tiny.toml"
    run(first, cycle.workspace, config, "prepare")
    run(first, cycle.workspace, config, "train")
    moved = Cycle(tmp_path / "moved", env={})
    shutil.copytree(cycle.workspace, moved.workspace)
    forget_after(moved.workspace, HALF)
    assert f"step-{HALF}" in run(second, moved.workspace, config, "train")
    losses, expected = moved.losses(), cycle.losses()
    assert sorted(losses) == sorted(expected) == list(range(1, END + 1))
    assert max(abs(losses[step] - expected[step]) for step in losses) < 1e-6
    ours, theirs = (
        load_file(one.workspace / "checkpoints" / "one" / f"step-{END}" / "model.safetensors") for one in (moved, cycle)
    )
    assert ours.keys() == theirs.keys()
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) < 1e-6
