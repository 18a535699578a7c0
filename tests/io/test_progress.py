"""Transfers, hashing and verifying show how many bytes are done, on either storage."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.progress import use_display
from pipeline.core.stop import StopSignal
from pipeline.io.commit import commit_dir, fetch_dir, verify_dir
from pipeline.io.requests import run_parallel
from pipeline.io.storage import open_storage
from tests.kit.shown import Shown

SIZES = {"a": 100, "b": 17 * 2**20, "c": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "new").mkdir()
    for name, size in SIZES.items():
        (tmp_path / "new" / name).write_bytes(b"x" * size)
    return tmp_path / "new"


def test_to_s3_and_back(s3_uri: str, folder: Path, tmp_path: Path) -> None:
    storage, shown = open_storage(s3_uri), Shown()
    with use_display(shown.display):
        commit_dir(storage, folder, "one", kind="test", fields={})
        verify_dir(storage, "one", deep=True)
        fetch_dir(storage, "one", tmp_path / "cache")
    for doing in ("uploading one", "downloading one", "verifying one", f"hashing {folder}"):
        assert sum(work.done for name, work in shown.works if name == doing) == sum(SIZES.values()), doing
    shown.check_complete()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_items_in_threads(num_threads: int) -> None:
    shown = Shown()
    with use_display(shown.display):
        found = run_parallel(str, range(9), num_threads=num_threads, stop=StopSignal(), doing="counting")
    assert found == list("012345678")
    ((name, work),) = shown.works
    assert (name, work.total, work.done, work.unit) == ("counting", 9, 9, "items")


_AT_THE_END = """
import time
from concurrent.futures import ThreadPoolExecutor, thread
from pipeline.core.stop import StopSignal
from pipeline.io.requests import run_parallel

def work():
    while not thread._shutdown:
        time.sleep(0.01)
    print(*run_parallel(str, range(9), num_threads=4, stop=StopSignal(), doing="counting"))

ThreadPoolExecutor(1).submit(work)
"""


def test_items_of_a_thread_that_the_interpreter_waits_for_at_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", _AT_THE_END], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [*"012345678"], done.stderr
