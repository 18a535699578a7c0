"""Runs xla_cases.py in a process of its own, as torch_xla needs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.graphs.traces import FAST_COMPILE, ROOT, needs_xla


@needs_xla
@pytest.mark.stage
def test_xla_cases() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("xla_cases.py"))],
        cwd=ROOT,
        env={**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": FAST_COMPILE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
