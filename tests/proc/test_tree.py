"""A program ends with everything it started."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.core.errors import ConfigError
from pipeline.proc.tool import ProcessTree, host_memory_bytes, process_tree

MARK = "TREE_TEST_MARK"
WAIT_S = 60.0
STUBBORN = "trap '' TERM; touch ready; while :; do sleep 0.05; done"


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may be seconds until a process is gone that was killed."""
    monkeypatch.setattr(ProcessTree.end, "__kwdefaults__", {"kill_wait_s": WAIT_S})


def wait_for(path: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.01)


@pytest.mark.fault
@pytest.mark.parametrize(
    "script",
    [
        f"({STUBBORN}) & wait",
        f'setsid sh -c "{STUBBORN}" & wait',  # a session of its own
        f'sh -c "{STUBBORN}" & sleep 0.3; exit 3',  # the parent is gone, the child lives on in the session
        f'setsid sh -c "{STUBBORN}" & sleep 0.3; exit 3',  # both
    ],
)
def test_nothing_is_left(tmp_path: Path, script: str) -> None:
    mark = f"{os.getpid()}-{tmp_path.name}"
    env = {**os.environ, MARK: mark}
    with process_tree(["sh", "-c", script], cwd=tmp_path, env=env, log=tmp_path / "log") as tree:
        wait_for(tmp_path / "ready")
        if "exit 3" in script:
            until = time.monotonic() + WAIT_S
            while tree.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            assert tree.poll() == 3
        assert marked(mark) != []
    assert marked(mark) == []


def test_sigterm_comes_first(tmp_path: Path) -> None:
    code = "import signal, sys, time, pathlib\nsignal.signal(15, lambda *_: sys.exit(7))\n"
    code += "pathlib.Path('ready').touch()\ntime.sleep(600)"
    with process_tree([sys.executable, "-c", code], cwd=tmp_path, env=os.environ, log=tmp_path / "log") as tree:
        wait_for(tmp_path / "ready")
        tree.end(WAIT_S)
        assert tree.poll() == 7


def test_an_error_in_the_block_ends_it_too(tmp_path: Path) -> None:
    mark = f"{os.getpid()}-{tmp_path.name}"
    with (
        pytest.raises(ValueError),
        process_tree(["sleep", "600"], cwd=tmp_path, env={**os.environ, MARK: mark}, log=tmp_path / "log"),
    ):
        raise ValueError
    assert marked(mark) == []


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="no-such-tool cannot be started"),
        process_tree(["no-such-tool"], cwd=tmp_path, env=os.environ, log=tmp_path / "log"),
    ):
        pass


def test_memory_of_a_container(tmp_path: Path) -> None:
    limit, none = tmp_path / "limit", tmp_path / "none"
    limit.write_text("1048576\n")
    none.write_text("max\n")
    assert host_memory_bytes([none, tmp_path / "missing"]) == psutil.virtual_memory().total
    assert host_memory_bytes([none, limit]) == 2**20
