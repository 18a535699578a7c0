"""A tool that is missing, hangs, floods or fails: always an answer, and nothing that it started is left behind."""

import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from pipeline.core.errors import ConfigError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.proc.tool import (
    NOT_INSTALLED,
    ProcessTree,
    ToolRun,
    host_memory_bytes,
    last_line,
    process_tree,
    run_tool,
)
from tests.health.fake_tools import environment, fake_tool, says
from tests.kit.processes import marked

MARK = "TOOL_TEST_MARK"
WAIT_S = 60.0
STUBBORN = "trap '' TERM; touch ready; while :; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may be seconds until a process is gone that was killed."""
    monkeypatch.setattr(ProcessTree.end, "__kwdefaults__", {"kill_wait_s": WAIT_S})


def run(folder: Path, *, timeout_s: float = WAIT_S, stop: StopSignal | None = None) -> ToolRun:
    env = {**environment(folder), MARK: str(folder)}
    return run_tool(["tool", "-j"], timeout_s=timeout_s, stop=stop or StopSignal(), env=env, output_limit_bytes=10_000)


@pytest.mark.unit
def test_both_outputs_and_the_exit_code_are_kept_apart(tmp_path: Path) -> None:
    fake_tool(tmp_path, "tool", 'echo "[1]"; echo careful >&2; echo "args $*" >&2; exit 3')
    result = run(tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "[1]\n", "careful\nargs -j\n")
    assert result.summary() == "tool: exit code 3: args -j" and not result.failure


@pytest.mark.unit
@pytest.mark.parametrize("content", [None, b"\x7fELF\x00\x00 of another machine", b"#!/no/such/interpreter\n", b""])
def test_what_cannot_be_started(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tool").write_bytes(content)
        (tmp_path / "tool").chmod(0o755)
    result = run(tmp_path)
    assert result.exit_code is None and result.failure.startswith(NOT_INSTALLED if content is None else "could not be")


@pytest.mark.unit
def test_no_place_for_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says(tmp_path, "tool", "[]")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert "could not be run" in run(tmp_path).failure


@pytest.mark.fault
@pytest.mark.parametrize("script", [STUBBORN, f"({STUBBORN}) & exec sleep 600", f'setsid sh -c "{STUBBORN}" & wait'])
def test_one_that_hangs_is_ended_with_all_it_started(tmp_path: Path, script: str) -> None:
    fake_tool(tmp_path, "tool", f"echo begun; {script}")
    for timeout_s in (0.4, 4.0, 40.0):  # on a busy machine it may not have begun
        result = run(tmp_path, timeout_s=timeout_s)
        if result.stdout:
            break
    assert (result.exit_code, result.num_left, result.stdout) == (None, 0, "begun\n")
    assert result.failure == f"did not end within {timeout_s:g} s"
    assert marked(MARK, str(tmp_path)) == []


@pytest.mark.fault
def test_one_that_leaves_a_process_behind(tmp_path: Path) -> None:
    fake_tool(tmp_path, "tool", "sleep 600 & echo done")
    result = run(tmp_path)
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert marked(MARK, str(tmp_path)) == []


@pytest.mark.fault
@pytest.mark.parametrize("script", ["yes 0123456789", "head -c 20000 /dev/zero | tr '\\0' x"])
def test_one_that_floods(tmp_path: Path, script: str) -> None:
    fake_tool(tmp_path, "tool", script)
    result = run(tmp_path)
    assert result.failure == "wrote more than 10000 bytes" and len(result.stdout) == 10_000
    assert marked(MARK, str(tmp_path)) == []


@pytest.mark.fault
def test_the_stop_signal_ends_it(tmp_path: Path) -> None:
    fake_tool(tmp_path, "tool", STUBBORN)
    stop = StopSignal()
    threading.Timer(0.3, stop.set, ["SIGTERM"]).start()
    with pytest.raises(Preempted, match="running tool"):
        run(tmp_path, stop=stop)
    assert marked(MARK, str(tmp_path)) == []


@pytest.mark.unit
def test_our_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, "tool", "echo $NEURON_RT_TEST")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("NEURON_RT_TEST", "seen")
    assert run_tool(["tool"], timeout_s=60, stop=StopSignal()).stdout == "seen\n"


@pytest.mark.unit
def test_last_line_fits_a_message() -> None:
    assert last_line("one\n\x1b[31mtwo\x00 \n\n") == "[31mtwo"
    assert len(last_line("x" * 10_000)) == 300
    assert last_line("\n \n") == ""


def wait_for(path: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.01)


@pytest.mark.fault
@pytest.mark.parametrize(
    "script",
    [
        f'sh -c "{STUBBORN}" & sleep 0.3; exit 3',  # the parent is gone, the child lives on in the session
        f'setsid sh -c "{STUBBORN}" & sleep 0.3; exit 3',  # and here in a session of its own
    ],
)
def test_nothing_of_a_tree_is_left(tmp_path: Path, script: str) -> None:
    env = {**os.environ, MARK: str(tmp_path)}
    with process_tree(["sh", "-c", script], cwd=tmp_path, env=env, log=tmp_path / "log") as tree:
        wait_for(tmp_path / "ready")
        until = time.monotonic() + WAIT_S
        while tree.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert tree.poll() == 3
        assert marked(MARK, str(tmp_path)) != []
    assert marked(MARK, str(tmp_path)) == []


@pytest.mark.fault
def test_sigterm_comes_first(tmp_path: Path) -> None:
    code = "import signal, sys, time, pathlib\nsignal.signal(15, lambda *_: sys.exit(7))\n"
    code += "pathlib.Path('ready').touch()\ntime.sleep(600)"
    with process_tree([sys.executable, "-c", code], cwd=tmp_path, env=os.environ, log=tmp_path / "log") as tree:
        wait_for(tmp_path / "ready")
        tree.end(WAIT_S)
        assert tree.poll() == 7


@pytest.mark.fault
@pytest.mark.parametrize(("command", "error"), [("sleep", ValueError), ("no-such-tool", ConfigError)])
def test_an_error_in_the_block_or_of_the_start(tmp_path: Path, command: str, error: type[Exception]) -> None:
    env = {**os.environ, MARK: str(tmp_path)}
    with pytest.raises(error), process_tree([command, "600"], cwd=tmp_path, env=env, log=tmp_path / "log"):
        raise ValueError
    assert marked(MARK, str(tmp_path)) == []


@pytest.mark.unit
def test_memory_of_a_container(tmp_path: Path) -> None:
    limit, none = tmp_path / "limit", tmp_path / "none"
    limit.write_text("1048576\n")
    none.write_text("max\n")
    assert host_memory_bytes([none, tmp_path / "missing"]) == psutil.virtual_memory().total
    assert host_memory_bytes([none, limit]) == 2**20
