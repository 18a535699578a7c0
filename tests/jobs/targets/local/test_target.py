"""Whole submissions on this machine: ends, logs, cancelling, interruptions, and an engine killed at any moment."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import EXITED, INTERRUPTED, JobRecord, JobState
from jobs.plan.spec import JobPlan, JobSpec, Resources, Retry
from jobs.targets.local.target import LocalTarget, Slots
from pipeline.core.errors import ConfigError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.proc.signals import stop_on_signals
from tests.jobs.cycle.cases import job
from tests.jobs.targets.local.waiting import number_in, until, until_no_keepers
from tests.kit.killing import FILE_CHANGES, FORK, killed_at

SUCCEEDED, FAILED = JobState.SUCCEEDED, JobState.FAILED
SMALL = Resources(vcpus=1, memory_mib=64)
MACHINE = Slots(vcpus=4, memory_mib=4096, groups=1)
# One line in the journal a try of a node, written at its beginning and at its end.
BEGIN = """
import os, sys
me = "{TRNJOBS_JOB_ID}#{TRNJOBS_NODE}/{TRNJOBS_ATTEMPT}".format_map({"TRNJOBS_NODE": "0", **os.environ})
def note(what):
    with open("journal", "a") as file:
        file.write(f"{what} {os.environ['TRNJOBS_JOB']} {me}\\n")
note("begin")
"""
SLEEP = BEGIN + "open('command', 'w').write(f'{os.getpid()}\\n')\nimport time\ntime.sleep(600)\n"


def work(name: str, *after: str, code: str = "", **fields: object) -> JobSpec:
    command = (sys.executable, "-S", "-c", BEGIN + code + "\nnote('end')\n")
    return job(name, *after, **{"command": command, "resources": SMALL, **fields})


def sleeps(name: str, *after: str, **fields: object) -> JobSpec:
    return job(name, *after, command=(sys.executable, "-S", "-c", SLEEP), resources=SMALL, **fields)


def plan_of(*jobs: JobSpec) -> JobPlan:
    return JobPlan(pipeline="p", cycle="c1", workspace="unused", jobs=jobs)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace; commands write into the working folder above it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "workspace"


def target(place: Path, *, grace_s: float = 10.0, say: Callable[[str], None] = lambda line: None) -> LocalTarget:
    store = CycleStore(open_storage(str(place)), "c1", time.time)
    stop = StopSignal()
    return LocalTarget(store, place / "scratch", MACHINE, say, stop, grace_s=grace_s, poll_s=0.01)


def submit(to: LocalTarget, plan: JobPlan, submission: int = 1) -> dict[str, JobRecord]:
    to.submit(plan, submission, [one.name for one in plan.jobs])
    return {record.name: record for record in to.records(plan)}


def journal() -> list[str]:
    path = Path("journal")
    return path.read_text().splitlines() if path.exists() else []


def codes(record: JobRecord) -> list[int | None]:
    return [attempt.exit_code for attempt in record.attempts]


AGAIN_ONCE = "sys.exit(75 if os.environ['TRNJOBS_ATTEMPT'] == '1' else 0)"


def test_a_cycle_of_jobs_gangs_and_arrays(place: Path) -> None:
    plan = plan_of(
        work("a", code="print('out')\nprint('err', file=sys.stderr)"),
        work("g", "a", num_nodes=2, code=AGAIN_ONCE),
        work("e", "g", array_size=3, code=f"if os.environ['TRNJOBS_INDEX'] == '1': {AGAIN_ONCE}"),
        work("z", "e", code="sys.exit(80)"),
        work("never", "z"),
    )
    to = target(place)
    found = submit(to, plan)
    assert {name: record.state for name, record in found.items()} == {
        "a": SUCCEEDED,
        "g": SUCCEEDED,
        "e": SUCCEEDED,
        "z": FAILED,
        "never": FAILED,
    }
    assert codes(found["g"]) == [75, 0]
    assert [codes(child) for child in found["e"].children] == [[0], [75, 0], [0]]
    assert found["z"].status_reason == "Essential container in task exited"
    assert found["never"].status_reason.startswith("not run: ")
    assert sorted(to.logs(found["a"], attempt=1, node=0)) == ["err", "out"]
    assert list(to.logs(found["e"].children[1], attempt=2, node=0)) == []
    log = place / found["a"].attempts[0].log_streams[0]
    pieces = iter(["ne", "w\nand a \x1b[2Kbar\r5 %\r", ""])

    def more() -> bool:
        with log.open("a") as file:
            return bool(file.write(next(pieces)))

    assert [*to.logs(found["a"], attempt=1, node=0, more=more)][2:] == ["new", "and a \x1b[2Kbar", "5 %"]
    assert to.newest_line(found["a"]) == "5 %" and to.newest_line(found["never"]) == ""
    for attempt, node in ((2, 0), (1, 1), (0, 0)):
        with pytest.raises(ConfigError, match=f"no log of attempt {attempt}, node {node}"):
            list(to.logs(found["a"], attempt=attempt, node=node))
    stream = Path(found["a"].attempts[0].log_streams[0])
    assert (place / stream).is_file()  # named relative to the workspace
    assert [one.state for one in target(place).records(plan)] == [one.state for one in found.values()]


def test_a_later_round_has_jobs_of_its_own(place: Path) -> None:
    plan = plan_of(work("a"), work("b", "a", code="sys.exit(0 if os.path.exists('fixed') else 65)"), work("c", "b"))
    first = submit(target(place), plan)
    assert first["b"].state is first["c"].state is FAILED
    Path("fixed").touch()
    to = target(place)
    to.submit(plan, 2, ["b", "c"])
    second = {record.name: record for record in to.records(plan)}
    assert {record.state for record in second.values()} == {SUCCEEDED}
    assert second["a"] == first["a"]
    assert second["b"].id != first["b"].id


def test_interrupted_it_ends_what_runs_and_goes_on_with_the_next_submission(place: Path) -> None:
    plan = plan_of(
        work("a", retry=Retry.of(1), code="if not os.path.exists('again'):\n    import time\n    time.sleep(600)"),
        work("b", "a"),
    )
    stop = StopSignal()
    interrupting = target(place, say=lambda line: stop.set("SIGINT") if "RUNNING" in line else None)
    stopped = replace(interrupting, stop=stop)
    with pytest.raises(Preempted):
        submit(stopped, plan)
    until_no_keepers(place)
    (a, b) = stopped.records(plan)
    assert (a.state, b.state) == (JobState.RUNNABLE, JobState.PENDING)
    Path("again").touch()
    found = submit(target(place), plan)
    assert {record.state for record in found.values()} == {SUCCEEDED}
    assert codes(found["a"]) == [143, 0]


def test_after_a_second_ctrl_c_the_only_try_is_not_used_up(place: Path) -> None:
    code = """
import signal, time
if os.environ["TRNJOBS_ATTEMPT"] == "1":
    signal.signal(signal.SIGTERM, lambda *_: open("told", "w"))
    open("ready", "w")
    time.sleep(600)
"""
    plan = plan_of(work("a", retry=Retry.of(1), code=code))

    def run() -> None:
        stop = StopSignal()
        with stop_on_signals(stop, grace_s=600):
            submit(replace(target(place, grace_s=600), stop=stop), plan)

    engine = FORK.Process(target=run)
    engine.start()
    assert engine.pid is not None
    until(Path("ready").exists, "its handler")
    os.kill(engine.pid, signal.SIGINT)
    until(Path("told").exists, "the command is told")
    os.kill(engine.pid, signal.SIGINT)
    engine.join()
    assert engine.exitcode == Preempted.exit_code
    until_no_keepers(place)
    found = submit(target(place), plan)
    assert [attempt.status_reason for attempt in found["a"].attempts] == [INTERRUPTED, EXITED]
    assert found["a"].state is SUCCEEDED


# Told to end, it does so once there is a file `waits`.
RELUCTANT = """
import os, signal, sys, time
def leave(*_):
    while not os.path.exists("waits"):
        time.sleep(0.01)
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
"""


def test_cancelled_from_another_process_while_the_engine_runs(place: Path) -> None:
    a = work("a", command=(sys.executable, "-S", "-c", RELUCTANT + SLEEP))
    plan = plan_of(a, sleeps("g", num_nodes=2), work("b", "a"))
    engine = FORK.Process(target=lambda: submit(target(place, grace_s=600), plan))
    engine.start()
    until(lambda: len(journal()) == 3, "three nodes")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        Path("waits").touch()

    to = target(place, say=say)
    to.cancel(plan, "not today")
    engine.join()
    for record in to.records(plan):
        assert (record.state, record.status_reason) == (FAILED, "not today"), record.name
    assert engine.exitcode == 0
    until_no_keepers(place)
    assert lines[0] == "waiting for another process that is running the jobs of this cycle"
    to.cancel(plan, "again")  # nothing is left to end
    assert to.records(plan)[0].status_reason == "not today"


def test_a_job_that_may_still_run_is_not_submitted_again(place: Path) -> None:
    plan = plan_of(sleeps("a"))
    engine = FORK.Process(target=lambda: submit(target(place), plan))
    engine.start()
    until(lambda: number_in(Path("command")), "the command")
    engine.kill()
    engine.join()
    with pytest.raises(ConfigError, match=r"a is (STARTING|RUNNING) in submission 1"):
        submit(target(place), plan, submission=2)
    target(place).cancel(plan, "end of the test")


CHANGES = FILE_CHANGES | {"subprocess.Popen", "os.kill"}


@pytest.mark.fault
@pytest.mark.parametrize("calls", [(1, 9, 20), (3, 14, 40), (5, 28, 60), (7, 33, 2), (12, 12, 12), (25, 50, 4)])
def test_killed_at_any_call_and_started_again_it_ends_the_same(place: Path, calls: tuple[int, ...]) -> None:
    """The engine is killed just before the n-th change of a file, start of a process or signal of each life."""
    plan = plan_of(
        work("a"),
        work("g", "a", num_nodes=2, code=AGAIN_ONCE),
        work("e", "a", array_size=2, code=AGAIN_ONCE),
        work("z", "g", "e", code="sys.exit(65)"),
    )
    ends = [killed_at(number, lambda: submit(target(place), plan), CHANGES) for number in calls]
    assert -signal.SIGKILL in ends
    found = submit(target(place), plan)
    tries = {task.name: codes(task) for record in found.values() for task in record.tasks()}
    assert tries == {"a": [0], "g": [75, 0], "e:0": [75, 0], "e:1": [75, 0], "z": [65]}
    begun = Counter(line for line in journal() if line.startswith("begin"))
    assert set(begun.values()) == {1}  # each attempt of each node once
    mains = [line for line in begun if "#1" not in line]
    assert len(mains) == sum(map(len, tries.values()))
    until_no_keepers(place)
