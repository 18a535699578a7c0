"""Engines, keepers and commands killed at random: jobs still end by retries alone, and none runs twice at once."""

import os
import random
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import JobState
from jobs.plan.spec import JobSpec, Plan, Resources, Retry
from jobs.targets.local.target import LocalTarget, Slots
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import job
from tests.jobs.targets.local.waiting import keepers_of, until_no_keepers
from tests.kit.killing import FORK

# A lock that a child in a session of its own holds too: whoever finds it taken runs beside what an earlier try left.
CODE = """
import fcntl, os, random, subprocess, sys, time
index = os.environ.get("TRNJOBS_INDEX", ""), os.environ.get("TRNJOBS_NODE", "")
name = "-".join((os.environ["TRNJOBS_JOB"], *index))
def note(what):
    with open("journal", "a") as file:
        file.write(f"{what} {os.environ['TRNJOBS_JOB_ID']}#{index[1]} {os.environ['TRNJOBS_ATTEMPT']}\\n")
lock = open("lock-" + name, "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    note("beside")
    sys.exit(65)
note("begin")
os.set_inheritable(lock.fileno(), True)
subprocess.Popen(["sleep", "600"], start_new_session=True, close_fds=False)
time.sleep(600 if index[1] == "1" else random.random() * 0.3)
while name.startswith("z") and not os.path.exists("killed"):
    time.sleep(0.01)
sys.exit(random.choice([0, 0, 0, 75]))
"""
MAX_KILLS = 8


def work(name: str, *after: str, **fields: object) -> JobSpec:
    small = Resources(vcpus=1, memory_mib=64)
    command = (sys.executable, "-S", "-c", CODE)
    return job(name, *after, command=command, resources=small, retry=Retry.of(10), **fields)


PLAN = Plan(
    pipeline="p",
    cycle="c1",
    workspace="unused",
    jobs=(
        work("a"),
        work("g", "a", num_nodes=2),
        work("h", "a", num_nodes=2),
        work("e", "g", array_size=4),
        work("z", "e", "h"),
    ),
)


@pytest.mark.fault
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.thorough) for seed in range(2, 12))])
def test_random_kills(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dice = random.Random(seed)
    machine = Slots(vcpus=4, memory_mib=4096, groups=2)
    store = CycleStore(open_storage(str(tmp_path / "workspace")), "c1", time.time)
    target = LocalTarget(store, tmp_path, machine, lambda line: None, StopSignal(), grace_s=1.0, poll_s=0.02)
    kills = Counter[str]()
    exit_code = None
    while exit_code != 0:
        engine = FORK.Process(target=lambda: target.submit(PLAN, 1, [one.name for one in PLAN.jobs]))
        engine.start()
        while engine.exitcode is None and sum(kills.values()) < MAX_KILLS:
            engine.join(dice.random() * 0.3)
            whom = dice.choice(["engine", "keeper", "command"])
            kills[whom] += _killed(whom, engine.pid or 0, tmp_path, dice)
            if kills.total():
                Path("killed").touch()  # the last job waits for it
        engine.join()
        exit_code = engine.exitcode
    assert sum(kills.values()) > 0
    leaves = [leaf for record in target.records(PLAN) for leaf in record.leaves()]
    assert {leaf.state for leaf in leaves} == {JobState.SUCCEEDED}, kills
    lines = Counter(Path("journal").read_text().splitlines())
    assert not [line for line in lines if line.startswith("beside")]
    assert set(lines.values()) == {1}  # each attempt of each node began once
    until_no_keepers(tmp_path)


def _killed(whom: str, engine: int, place: Path, dice: random.Random) -> int:
    """kill -9 to one of them; how many were there to be killed."""
    match whom:
        case "engine":
            pids = [engine]
        case "keeper":
            pids = keepers_of(place)
        case _:
            pids = _commands(place)
    with suppress(ProcessLookupError):
        if pids:
            os.kill(dice.choice(pids), signal.SIGKILL)
            return 1
    return 0


def _commands(place: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found += [process.pid] if CODE in process.cmdline() and process.cwd() == str(place) else []
    return found
