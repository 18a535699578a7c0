"""Whatever the end: nobody we started lives on, and no temporary file stays."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import TransientError
from pipeline.proc import children, tool
from pipeline.proc.tool import FOLDER_VARIABLE, guarded_temp_folder
from tests.jobs.targets.local.waiting import until
from tests.kit.processes import marked

OWNER = """
import subprocess, tempfile, time
from pipeline.proc.tool import guarded_temp_folder
with guarded_temp_folder() as folder:
    tempfile.NamedTemporaryFile(delete=False).close()
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & echo $$ > $TMPDIR/pid; wait"], start_new_session=True)
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/somewhere")
    with guarded_temp_folder() as folder:
        assert Path(tempfile.mkdtemp()).parent == folder
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        until(lambda: [one.pid for one in marked(FOLDER_VARIABLE, str(tmp_path))] == [child.pid])
        assert {os.environ[FOLDER_VARIABLE], os.environ["TMPDIR"]} == {str(folder)}
    assert child.wait(60) == -signal.SIGKILL
    assert [*tmp_path.iterdir()] == []
    assert tempfile.tempdir == str(tmp_path) and os.environ["TMPDIR"] == "/somewhere"
    assert FOLDER_VARIABLE not in os.environ


def test_a_process_that_shows_its_mark_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between exec and its environment /proc has an empty one: seen once in a run of all tests on a busy machine."""
    child = subprocess.Popen(["sleep", "600"])
    looks: list[int] = []

    def late(pid: int, environ: Callable[[int], bytes] = children._environ) -> bytes:
        looks.extend([pid] * (pid == child.pid))
        return environ(pid) if pid != child.pid or child.poll() else b"A=1\0MARK=here\0" if len(looks) > 2 else b""

    monkeypatch.setattr(children, "_environ", late)
    monkeypatch.setattr(children, "SETTLE_S", 10.0)  # three looks may take their time on a busy machine
    monkeypatch.setattr(children, "LIMIT_S", 60.0)
    assert children.end_marked("MARK", "here".__eq__) == 0
    assert child.wait(60) == -signal.SIGKILL and len(looks) > 2


def test_an_error_inside_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="mine"), guarded_temp_folder():
        raise OSError("mine")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.fault
def test_the_next_start_ends_what_a_killed_owner_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=env, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    until((folder / "pid").exists)
    monkeypatch.setattr(tool, "LOCKED_AFTER_S", 0.0)
    with guarded_temp_folder() as ours:
        assert folder.exists() and ours.exists(), "its owner lives"
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert marked(FOLDER_VARIABLE, str(tmp_path))
    with guarded_temp_folder() as ours:
        assert [*tmp_path.iterdir()] == [ours]
        until(lambda: not marked(FOLDER_VARIABLE, str(folder)))


def test_no_folder_no_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(TransientError, match="cannot create a folder for temporary files"), guarded_temp_folder():
        pass


def test_each_grace_is_shorter_than_that_of_what_is_around_it() -> None:
    graces = (children.TOOL_S, children.RANK_S, children.LAUNCHER_S, children.PROMISED_S, children.COMMAND_S)
    assert [*graces, children.EXPLAIN_S, children.PLATFORM_S] == [8.0, 15.0, 19.0, 20.0, 25.0, 29.0, 30.0]


def test_kills_for_want_of_memory_are_counted_where_the_kernel_tells(tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "old").write_text("oom_kill_disable 0\nunder_oom 0\n")
    files = [str(tmp_path / name) for name in ("missing", "old", "v1")]
    assert (children.oom_kill_count(files), children.oom_kill_count(files[:2])) == (3, None)
    assert children.oom_kill_count(children.MACHINE_OOM_FILES) is not None or sys.platform != "linux"
