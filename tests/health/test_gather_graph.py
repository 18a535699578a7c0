"""The all-gather that ranks check on a device that reduces in its graph is one, and no all-reduce of padded tensors."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.stage
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
def test_each_collective_of_the_device_is_itself_in_the_graph() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.health.gather_graphs"],
        cwd=ROOT,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    gather, reduce = found["graphs"]["all-gather"], found["graphs"]["all-reduce"]
    assert "= f32[12]{0} all-gather(f32[6]{0}" in gather, gather
    assert "all-reduce" not in gather
    assert "all-reduce(" in reduce and "all-gather" not in reduce
    assert all(shape == expected for shape, expected in found["shapes"].values()), found["shapes"]
