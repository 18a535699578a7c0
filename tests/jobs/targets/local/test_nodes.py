"""Keepers and their commands as processes: ends, time-outs, what is left behind, kill -9."""

import errno
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs.cycle.job_states import Task
from jobs.targets.local import node_keeper
from jobs.targets.local.nodes import (
    NodeEnd,
    NodeView,
    Phase,
    Processes,
    end_leftovers,
    group_port,
    local_command,
    local_files,
    node_environment,
)
from pipeline.core.interpreter import OWN_MODULE
from pipeline.parallel.world import torchrun_arguments
from tests.jobs.cycle.cases import job, plan
from tests.jobs.targets.local.waiting import keepers_of, number_in, suspend, until, until_dead

# Starts a process in a session of its own, which ignores SIGTERM and writes its id to a file.
GRANDCHILD = """
import os, subprocess, sys
code = '''
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("grandchild", "w").write(str(os.getpid()) + chr(10))
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
while not (os.path.exists("grandchild") and open("grandchild").read().endswith(chr(10))):
    pass
"""
SLEEP = """
import os, time
open("command", "w").write(str(os.getpid()) + chr(10))
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a node of an attempt that nobody else has; commands write into the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / str(uuid.uuid4()) / "1" / "node-0"


def start(nodes: Processes, folder: Path, code: str, *, timeout_s: float = 600.0) -> None:
    command = [sys.executable, "-S", "-c", code]
    nodes.start(folder, command, {**os.environ, "COLOUR": "blue"}, timeout_s)


def ended(nodes: Processes, folder: Path) -> NodeEnd:
    until(lambda: nodes.observe(folder).phase is Phase.ENDED, "the end of a node")
    end = nodes.observe(folder).end
    assert end is not None
    return end


def test_a_command_has_its_environment_a_session_and_a_log(folder: Path) -> None:
    nodes = Processes(grace_s=5)
    code = "import os, sys\nprint(os.environ['COLOUR'], os.getsid(0) == os.getpid(), flush=True)\nsys.exit('bye')"
    start(nodes, folder, code)
    end = ended(nodes, folder)
    assert (end.exit_code, end.stopped_by, end.lost, end.error) == (1, "", False, "")
    assert (folder / "log.txt").read_text() == "blue True\nbye\n"
    view = nodes.observe(folder)
    assert view.started_at is not None
    assert end.at is not None
    assert end.at >= view.started_at


def test_a_stop_kills_what_does_not_listen_with_all_it_started(folder: Path) -> None:
    nodes = Processes(grace_s=0.1)
    code = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + GRANDCHILD + SLEEP
    start(nodes, folder, code, timeout_s=600)
    until(lambda: number_in(Path("command")), "the command")
    nodes.stop(folder, "SIGTERM")
    nodes.stop(folder, "SIGTERM")  # the first counts
    end = ended(nodes, folder)
    assert (end.exit_code, end.stopped_by) == (137, "SIGTERM")
    until_dead(number_in(Path("command")))
    until_dead(number_in(Path("grandchild")))


def test_a_node_started_twice_runs_once(folder: Path) -> None:
    one, other = Processes(grace_s=5), Processes(grace_s=5)
    code = "open('runs','a').write('x')"
    start(one, folder, code)
    start(other, folder, code)
    assert ended(one, folder).exit_code == 0
    assert ended(other, folder).exit_code == 0
    start(Processes(grace_s=5), folder, code)
    until(lambda: not any(keepers_of(folder)), "the last keeper")
    assert Path("runs").read_text() == "x"


@pytest.mark.parametrize("how", ["killed", "suspended"])
def test_a_dead_or_suspended_keeper_takes_all_it_keeps_with_it_and_the_reason_stays(folder: Path, how: str) -> None:
    nodes = Processes(grace_s=0.1)
    start(nodes, folder, GRANDCHILD + SLEEP)
    until(lambda: number_in(Path("command")), "the command")
    (pid,) = keepers_of(folder)
    if how == "killed":
        os.kill(pid, signal.SIGKILL)
    else:
        suspend(pid)
        nodes.stop(folder, "SIGTERM")
        assert nodes.observe(folder).phase is Phase.RUNNING
        nodes.kill(folder, "timeout")
        nodes.kill(folder, "SIGTERM")  # the first counts
    end = NodeEnd(lost=True, stopped_by="timeout" if how == "suspended" else "")
    assert ended(Processes(grace_s=5), folder) == ended(nodes, folder) == end
    for one in (pid, number_in(Path("command")), number_in(Path("grandchild"))):
        until_dead(one)


def test_a_keeper_killed_after_an_interruption_is_no_lost_host(folder: Path) -> None:
    """As by a second Ctrl-C, before the command has ended."""
    nodes = Processes(grace_s=600)
    start(nodes, folder, "import signal\nsignal.signal(signal.SIGTERM, lambda *_: open('told', 'w'))\n" + SLEEP)
    until(lambda: number_in(Path("command")), "the command")
    nodes.stop(folder, "SIGINT")
    nodes.stop(folder, "SIGTERM")  # the first counts
    until(Path("told").exists, "the signal")
    (pid,) = keepers_of(folder)
    os.kill(pid, signal.SIGKILL)
    assert ended(Processes(grace_s=5), folder) == NodeEnd(lost=True, stopped_by="SIGINT")
    until_dead(number_in(Path("command")))


def test_a_full_disk_keeps_no_interruption_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    nodes = Processes(grace_s=5)
    start(nodes, folder, SLEEP)
    until(lambda: number_in(Path("command")), "the command")
    monkeypatch.setattr("jobs.targets.local.nodes.write_bytes_atomic", full)
    nodes.stop(folder, "SIGINT")
    assert ended(nodes, folder).stopped_by == "SIGINT"


def test_what_attempts_that_are_over_have_left_is_found(tmp_path: Path) -> None:
    """Processes that bear a mark, beside one of the attempt that runs now and one of another job."""
    job, other = str(uuid.uuid4()), str(uuid.uuid4())
    marks = [f"{job}_3/1/node-0", f"{job}_3/2/node-1", f"{job}_3/3/node-0", f"{job}_30/1/node-0", f"{other}/1/node-0"]
    sleepers = [subprocess.Popen(["sleep", "600"], env={**os.environ, node_keeper.MARK: mark}) for mark in marks]
    try:
        until(lambda: all(_has_mark(one.pid, mark) for one, mark in zip(sleepers, marks, strict=True)))
        assert end_leftovers({f"{job}:3": 2}) == 2
        assert [one.wait() for one in sleepers[:2]] == [-signal.SIGKILL] * 2
        assert [one.poll() for one in sleepers[2:]] == [None] * 3
    finally:
        for one in sleepers:
            one.kill()
            one.wait()


def _has_mark(pid: int, mark: str) -> bool:
    """From its exec on."""
    return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()


def test_an_excluded_node_never_starts(folder: Path) -> None:
    nodes = Processes(grace_s=5)
    assert nodes.observe(folder) == NodeView(Phase.ABSENT)
    nodes.exclude(folder)
    expected = NodeView(Phase.ENDED, None, NodeEnd(error="stopped before it began"))
    assert nodes.observe(folder) == expected
    start(nodes, folder, "open('runs','a').write('x')")
    until(lambda: nodes._own[folder].poll() is not None, "the keeper that finds the node taken")
    assert nodes.observe(folder) == expected
    assert not Path("runs").exists()


def test_a_keeper_waits_for_room_on_the_disk() -> None:
    answers = iter([errno.ENOSPC, errno.EDQUOT, 0])

    def write() -> int:
        if code := next(answers):
            raise OSError(code, os.strerror(code))
        return 5

    assert node_keeper._retry_while_full(write, []) == 5
    assert node_keeper._retry_while_full(write, ["SIGTERM"]) is None


def test_a_workspace_elsewhere_keeps_the_state_of_this_machine_in_the_scratch_folder(tmp_path: Path) -> None:
    storage: Any = SimpleNamespace(root="s3://bucket/a", local_path=lambda key: None)
    files = local_files(storage, tmp_path, "c1")
    assert files.folder.is_relative_to(tmp_path / "jobs") and files.folder.name == "c1"
    assert files.folder / files.log_stream("id", 1, 0) == files.node("id", 1, 0) / "log.txt"


# What a node is told: the words of a place, and the settings of its own job.

COMMON = {"TRNJOBS_JOB": "a", "TRNJOBS_JOB_ID": "id", "TRNJOBS_ATTEMPT": "2"}
GROUP = COMMON | {"TRNJOBS_NODES": "2"}


@pytest.mark.parametrize(
    ("fields", "index", "node", "expected"),
    [
        ({"array_size": 3}, 1, 0, COMMON | {"TRNJOBS_JOB_ID": "id:1", "TRNJOBS_INDEX": "1"}),
        ({"num_nodes": 2}, None, 0, GROUP | {"TRNJOBS_NODE": "0"}),
        ({"num_nodes": 2}, None, 1, GROUP | {"TRNJOBS_NODE": "1", "TRNJOBS_MAIN": "10.0.0.7"}),
    ],
)
def test_a_place_in_words(fields: dict[str, int], index: int | None, node: int, expected: dict[str, str]) -> None:
    task = Task(job("a", **fields), index)
    task_id = "id" if index is None else f"id:{index}"
    found = node_environment({}, plan(task.spec), task, task_id, 2, node, "10.0.0.7")
    assert {name: value for name, value in found.items() if name.startswith("TRNJOBS_")} == expected
    if task.spec.num_nodes:  # where torchrun lets the ranks of all nodes meet
        port = f"--master-port={group_port('id', 2)}"
        assert torchrun_arguments(1, found, own=lambda: "10.0.0.7")[-2:] == ["--master-addr=10.0.0.7", port]


def test_a_job_sees_its_own_settings_and_nothing_of_what_is_around_the_engine() -> None:
    around = {
        "HOME": "/home/x",
        "PATH": "/usr/bin",
        "AWS_REGION": "us-west-2",
        "TRNPIPE_TRAIN__MAX_STEPS": "1",
        "TRNJOBS_JOB": "driver",
        "AWS_BATCH_JOB_NODE_INDEX": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "1",
    }
    spec = job("a", environment={"TRNPIPE_BACKEND": "cpu", "HOME": "/root"})
    found = node_environment(around, plan(spec), Task(spec), "id", 1, 0, "10.0.0.7")
    assert {name: found.get(name) for name in around} == {
        **dict.fromkeys(around, None),
        "HOME": "/root",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin",
        "AWS_REGION": "us-west-2",
        "TRNJOBS_JOB": "a",
    }
    assert found["TRNPIPE_BACKEND"] == "cpu"
    assert (found["TRNPIPE_CYCLE"], found["TRNPIPE_WORKSPACE"]) == ("2026-11-20", "s3://bucket/relevance")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("trnjobs-entry", "--", "trnpipe", "train"), [*OWN_MODULE, "jobs.node", "--", "trnpipe", "train"]),
        (("trnpipe", "train"), [*OWN_MODULE, "pipeline", "train"]),
        (("sh", "-c", "trnpipe"), ["sh", "-c", "trnpipe"]),
    ],
)
def test_our_commands_run_with_this_interpreter(words: tuple[str, ...], expected: list[str]) -> None:
    assert local_command(words) == expected
