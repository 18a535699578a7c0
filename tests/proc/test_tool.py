"""A tool that is missing, hangs, floods, fails or runs for ever: always an answer, and nothing left behind."""

import os
import threading
from pathlib import Path

import psutil
import pytest

from pipeline.core.errors import Preempted
from pipeline.core.stop import StopSignal
from pipeline.proc.tool import ProcessTree, ToolRun, json_in, last_line, run_tool
from tests.health.fake_tools import environment, fake_tool, says

STUBBORN = "trap '' TERM; while :; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may be seconds until a process is gone that was killed."""
    monkeypatch.setattr(ProcessTree.end, "__kwdefaults__", {"kill_wait_s": 60.0})


def run(folder: Path, *, timeout_s: float = 60.0, limit: int = 10_000, stop: StopSignal | None = None) -> ToolRun:
    env = {**environment(folder), "TOOL_TEST_MARK": folder.name}
    return run_tool(["tool", "-j"], timeout_s=timeout_s, stop=stop or StopSignal(), env=env, output_limit_bytes=limit)


def left(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TOOL_TEST_MARK") == folder.name and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.unit
def test_both_outputs_and_the_exit_code_are_kept_apart(tmp_path: Path) -> None:
    fake_tool(tmp_path, "tool", 'echo "[1]"; echo careful >&2; echo "args $*" >&2; exit 3')
    result = run(tmp_path)
    assert (result.exit_code, result.stdout, result.stderr) == (3, "[1]\n", "careful\nargs -j\n")
    assert result.told() == "tool: exit code 3: args -j"
    assert (result.missing, result.timed_out, result.failure) == (False, False, "")


@pytest.mark.unit
def test_a_tool_that_is_not_there(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.missing and result.exit_code is None
    assert result.told() == "tool is not installed"


@pytest.mark.unit
@pytest.mark.parametrize("content", [b"\x7fELF\x00\x00 of another machine", b"#!/no/such/interpreter\n", b""])
def test_a_file_that_is_no_program(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tool"
    path.write_bytes(content)
    path.chmod(0o755)
    result = run(tmp_path)
    assert not result.missing
    assert "could not be run" in result.told()


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
    assert result.timed_out and result.exit_code is None and result.num_left == 0
    assert result.stdout == "begun\n"
    assert result.told().startswith(f"tool: did not end within {timeout_s:g} s: ")
    assert left(tmp_path) == []


@pytest.mark.fault
def test_one_that_leaves_a_process_behind(tmp_path: Path) -> None:
    fake_tool(tmp_path, "tool", "sleep 600 & echo done")
    result = run(tmp_path)
    assert (result.exit_code, result.stdout) == (0, "done\n")
    assert left(tmp_path) == []


@pytest.mark.fault
def test_one_that_floods(tmp_path: Path) -> None:
    fake_tool(tmp_path, "tool", "yes 0123456789")
    result = run(tmp_path)
    assert "wrote more than 10000 bytes" in result.failure
    assert len(result.stdout) == 10_000 and not result.timed_out
    assert left(tmp_path) == []


@pytest.mark.unit
def test_too_much_at_once_is_a_failure_too(tmp_path: Path) -> None:
    says(tmp_path, "tool", "x" * 20_000)
    assert "wrote more than" in run(tmp_path).failure


@pytest.mark.fault
def test_the_stop_signal_ends_it(tmp_path: Path) -> None:
    fake_tool(tmp_path, "tool", STUBBORN)
    stop = StopSignal()
    threading.Timer(0.3, stop.set, ["SIGTERM"]).start()
    with pytest.raises(Preempted, match="running tool"):
        run(tmp_path, stop=stop)
    assert left(tmp_path) == []


@pytest.mark.unit
def test_one_that_runs_for_ever_is_ended_when_it_has_said_enough(tmp_path: Path) -> None:
    fake_tool(tmp_path, "tool", "echo one; sleep 0.2; echo two; exec sleep 600")
    result = run_tool(
        ["tool"],
        timeout_s=60,
        stop=StopSignal(),
        env=environment(tmp_path),
        enough=lambda text: "two" in text,
    )
    assert result.stdout == "one\ntwo\n"
    assert (result.failure, result.timed_out, result.exit_code) == ("", False, None)


@pytest.mark.unit
def test_our_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tool(tmp_path, "tool", "echo $NEURON_RT_TEST")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("NEURON_RT_TEST", "seen")
    assert run_tool(["tool"], timeout_s=60, stop=StopSignal()).stdout == "seen\n"


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("null", None),
        ("no neuron device found", None),
        ('[{"a": 1}]\n', [{"a": 1}]),
        ('2026-05-02 WARN old driver\n[{"a": 1}]\n', [{"a": 1}]),
        ('[2026-05-02] WARN old driver\n{"a": 1}', {"a": 1}),
        ('[\n  {"a": 1},\n  {"a"', None),  # the inner object must not pass for the whole
        ("[" * 100_000, None),
        ("[" + "9" * 10_000 + "]", None),
    ],
)
def test_json_in_what_a_tool_printed(text: str, value: object) -> None:
    assert json_in(text) == value


@pytest.mark.unit
def test_last_line_fits_a_message() -> None:
    assert last_line("one\n\x1b[31mtwo\x00 \n\n") == "[31mtwo"
    assert len(last_line("x" * 10_000)) == 300
    assert last_line("\n \n") == ""
