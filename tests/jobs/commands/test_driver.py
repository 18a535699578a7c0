"""`trnjobs driver`: where its time comes from, and how it looks at the cycles of a workspace."""

import argparse
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from jobs.commands import driver
from jobs.config import JobsConfig
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import Closed, JobRecord, JobState
from jobs.plan.dag import Plan
from jobs.schedule import MissedPolicy, ScheduleConfig
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle, open_cycle
from pipeline.io.storage import open_storage
from pipeline.settings import resolve
from tests.jobs.cycle.cases import cycle


def in_workspace(folder: Path, said: list[str]) -> driver.WorkspaceCycles:
    settings = resolve((), {}, [("--workspace", str(folder))], model=CycleSettings).settings
    return driver.WorkspaceCycles(open_cycle(settings, said.append), "batch")


def claim(folder: Path, name: str) -> CycleStore:
    store = CycleStore(open_storage(str(folder)), name, lambda: 1000.0)
    with store.submitting(cycle(), "batch", "a"):
        return store


class Target:
    """All jobs in one state."""

    def __init__(self, state: JobState) -> None:
        self.state = state

    def records(self, plan: Plan) -> tuple[JobRecord, ...]:
        return tuple(JobRecord(name=one.name, id=one.name, state=self.state, created_at=1.0) for one in plan.jobs)


def test_claimed_cycles_and_those_that_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cycles = in_workspace(tmp_path, said)
    assert cycles.claimed() == []
    claim(tmp_path, "2026-11-18").close(Closed(outcome="failed", at=1.0))
    store = claim(tmp_path, "2026-11-19")
    assert cycles.claimed() == ["2026-11-18", "2026-11-19"]
    assert cycles.has_ended("2026-11-18")
    for state, ended in ((JobState.RUNNING, False), (JobState.SUCCEEDED, True)):
        monkeypatch.setattr("jobs.setup.open_target", lambda *_, state=state: Target(state))
        assert cycles.has_ended("2026-11-19") is ended
        assert {one.state for one in store.records()} == {state}
    assert store.closed() == Closed(outcome="succeeded", at=1.0, round=0)


def test_of_several_cycles_the_newest_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cycles, names = in_workspace(tmp_path, []), [f"2026-11-{day}" for day in range(10, 20)]
    for name in names:
        store = claim(tmp_path, name)
        if name not in ("2026-11-12", "2026-11-15", "2026-11-17"):
            store.close(Closed(outcome="failed", at=1.0))
    asked: list[str] = []

    def target(cycle: OpenCycle, _: str) -> Target:
        asked.append(cycle.name)
        return Target(JobState.SUCCEEDED if cycle.name == "2026-11-17" else JobState.RUNNING)

    monkeypatch.setattr("jobs.setup.open_target", target)
    assert cycles.newest_under_way(names) == "2026-11-15"
    assert asked == ["2026-11-17", "2026-11-15"]
    assert cycles.newest_under_way(names[-2:]) == ""


def test_a_claim_without_a_plan_has_not_ended(tmp_path: Path) -> None:
    store = claim(tmp_path, "2026-11-19")
    store.storage.delete([store.key("plan.json")])
    assert not in_workspace(tmp_path, []).has_ended("2026-11-19")


def test_a_cycle_is_submitted_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def submit(cycle: OpenCycle, plan: Plan, target: str) -> int:
        asked.append((plan.cycle, target))
        return 75

    monkeypatch.setattr(driver, "submit_plan", submit)
    assert in_workspace(tmp_path, []).submit("2026-11-20") == 75
    assert asked == [("2026-11-20", "batch")]


class Nothing:
    """A workspace in which every start is noted."""

    started: list[str]

    def __init__(self, settings: Any, target: str, *_: Any) -> None:
        Nothing.started, self.target = [], target

    def claimed(self) -> Sequence[str]:
        return []

    def newest_under_way(self, names: Sequence[str]) -> str:
        return ""

    def submit(self, name: str) -> int:
        self.started.append(f"{name} on {self.target}")
        return 0


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        (["--scheduled-time", "2026-11-20T02:00:00Z"], "2026-11-21T02:00:00Z", "2026-11-20 on batch"),
        ([], "2026-11-21T02:00:00Z", "2026-11-21 on batch"),
        (["--target", "local"], "", "2026-11-22 on local"),
    ],
)
def test_the_time_comes_from_the_flag_the_variable_or_the_clock(
    words: list[str], variable: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls(2026, 11, 22, 12, tzinfo=UTC)

    monkeypatch.setattr(driver, "datetime", Clock)
    monkeypatch.setattr(driver, "WorkspaceCycles", Nothing)
    monkeypatch.setenv(driver.TIME_VARIABLE, variable)
    parser = argparse.ArgumentParser()
    cli.add_flags("driver", parser)
    schedule = ScheduleConfig(expression="cron(0 2 * * ? *)", policy=MissedPolicy.SKIP, max_late_s=10 * 86_400)
    arguments = parser.parse_args(words)
    arguments.settings = CycleSettings(jobs=JobsConfig(schedule=schedule, target="batch"))
    said: list[str] = []
    assert driver.run_driver(arguments, said.append) == 0
    assert Nothing.started == [expected]
