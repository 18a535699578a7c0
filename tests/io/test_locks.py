"""Locks of the kernel: held by one, given back at death."""

import os
import signal
from pathlib import Path

import pytest

from pipeline.core.errors import Preempted
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from tests.kit.killing import FORK

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", ["folder", "new/below/lock"])
def test_a_lock_is_a_folder_that_is_there_or_a_file_that_is_made(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    stop = StopSignal()
    with atomic.exclusive(tmp_path / name, stop):
        stop.set("SIGTERM")
        with pytest.raises(Preempted), atomic.exclusive(tmp_path / name, stop):
            pass
    assert (tmp_path / name).is_file() == (name != "folder") and not list((tmp_path / "folder").iterdir())
    with atomic.exclusive(tmp_path / name, StopSignal()):
        pass


@pytest.mark.fault
def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"

    def child() -> None:
        with atomic.exclusive(path, StopSignal()):
            os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    stop = StopSignal()
    stop.set("SIGTERM")  # waiting for it would raise
    with atomic.exclusive(path, stop):
        pass
