"""`trnjobs driver`: once, twice, late, beside a cycle that still runs; and where its time comes from."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from jobs import cli
from jobs.commands import submit
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import Closed, JobRecord, JobState
from jobs.plan.spec import JobPlan
from jobs.schedule import ScheduleConfig
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle, open_cycle
from pipeline.core.errors import ConfigError, TransientError
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import cycle

DAY = timedelta(days=1)
AT_TWO = datetime(2026, 11, 20, 2, tzinfo=UTC)
DAILY = ScheduleConfig(expression="cron(0 2 * * ? *)")


class World:
    """A workspace whose jobs are all in one state; `submissions`: what the driver has started."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.state = folder, JobState.RUNNING
        self.said, self.submissions = list[str](), list[str]()
        patch.setattr("jobs.setup.open_target", lambda *_: self)
        patch.setattr(submit, "submit_plan", self._submit)

    def claim(self, name: str, closed: bool = False) -> CycleStore:
        store = CycleStore(open_storage(str(self.folder)), name, lambda: 1000.0)
        with store.submitting(cycle().model_copy(update={"cycle": name}), "batch", "a"):
            pass
        if closed:
            store.close(Closed(outcome="failed", at=1.0))
        return store

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        return tuple(JobRecord(name=one.name, id=one.name, state=self.state, created_at=1.0) for one in plan.jobs)

    def interrupted_at(self) -> None:
        return None

    def _submit(self, cycle: OpenCycle, plan: JobPlan, target: str) -> int:
        self.submissions.append(f"{plan.cycle} on {target}")
        return 75

    def deliver(self, when: datetime = AT_TWO, now: datetime | None = None) -> int:
        asked = open_cycle(CycleSettings.model_validate({"workspace": str(self.folder)}), self.said.append)
        return submit.drive(DAILY, when, now or when, asked, "batch")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_it_starts_the_cycle_of_its_time_and_a_second_delivery_goes_on_with_it(world: World) -> None:
    world.claim("2026-11-19", closed=True)
    assert world.deliver() == 75
    world.claim("2026-11-20")
    assert world.deliver() == 75
    assert world.submissions == ["2026-11-20 on batch"] * 2
    world.state = JobState.SUCCEEDED
    assert world.deliver() == 0
    assert world.said[-1] == "cycle 2026-11-20 has already ended" and len(world.submissions) == 2


@pytest.mark.parametrize("other", ["2026-11-19", "experiment"])
def test_an_overlap_is_refused_until_the_other_cycle_has_ended(world: World, other: str) -> None:
    store = world.claim(other)
    with pytest.raises(TransientError, match=f"{other} is under way, and cycle 2026-11-20 would overlap"):
        world.deliver()
    assert world.submissions == [] and {one.state for one in store.records()} == {JobState.RUNNING}
    world.state = JobState.SUCCEEDED
    assert world.deliver() == 75
    assert store.closed() == Closed(outcome="succeeded", at=1.0, round=0)


def test_a_claim_without_a_plan_has_not_ended_and_one_that_is_too_late_is_not_started(world: World) -> None:
    assert world.deliver(now=AT_TWO + DAY) == 0
    assert world.submissions == [] and "too late" in world.said[-1]
    assert "deadline MISSED" in world.said[-1], "the alarm waits for these words"
    store = world.claim("2026-11-19")
    store.storage.delete([store.key("plan.json")])
    with pytest.raises(TransientError, match="2026-11-19 is under way"):
        world.deliver()
    asked = open_cycle(CycleSettings.model_validate({"workspace": str(world.folder)}), world.said.append)
    with pytest.raises(ConfigError, match="trnjobs cancel --cycle 2026-11-19"):
        asked.other("2026-11-19").plan()
    submit.cancel_cycle(asked.other("2026-11-19"), "by hand")
    assert world.said[-1] == "cycle 2026-11-19 was claimed but not submitted, so its claim was deleted"
    assert world.deliver() == 75


def test_a_claim_is_not_deleted_while_it_is_being_submitted(world: World) -> None:
    store = world.claim("2026-11-19")
    assert not store.withdraw_claim("b"), "it has a plan"
    with store.submitting(cycle().model_copy(update={"cycle": "2026-11-19"}), "batch", "a"):
        store.storage.delete([store.key("plan.json")])
        with pytest.raises(TransientError, match="is being submitted by a"):
            store.withdraw_claim("b")


def test_the_records_of_an_ended_cycle_are_those_it_ended_with(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, which has read earlier states, stores them while the page is written."""
    store = world.claim("2026-11-19")
    asked = open_cycle(CycleSettings.model_validate({"workspace": str(world.folder)}), world.said.append)
    older = world.records(cycle())
    monkeypatch.setattr(submit, "write_page", lambda *_: store.save_records(older))
    world.state = JobState.SUCCEEDED
    assert submit.has_ended(asked.other("2026-11-19"))
    assert {one.state for one in store.records()} == {JobState.SUCCEEDED}


@pytest.mark.parametrize("text", ["2026-11-20T02:00:00Z", "2026-11-20T03:00:00+01:00", ""])
def test_the_scheduled_time(text: str) -> None:
    assert submit.scheduled_time(text, DAILY, AT_TWO + DAY / 2) == AT_TWO


@pytest.mark.parametrize("text", ["<aws.scheduler.scheduled-time>", "2026-11-20T02:00:00", "2026-13-01T00:00:00Z"])
def test_a_scheduled_time_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="scheduled time"):
        submit.scheduled_time(text, DAILY, AT_TWO)


@pytest.mark.parametrize(
    ("words", "variable", "expected"),
    [
        (["--scheduled-time", "2026-11-20T02:00:00Z"], "2026-11-21T02:00:00Z", "2026-11-20 on local"),
        (["--target", "batch"], "2026-11-21T02:00:00Z", "2026-11-21 on batch"),
    ],
)
def test_the_time_comes_from_the_flag_or_the_variable(
    world: World, monkeypatch: pytest.MonkeyPatch, words: list[str], variable: str, expected: str
) -> None:
    monkeypatch.setenv(submit.TIME_VARIABLE, variable)
    schedule = ["--jobs.schedule.expression=cron(0 2 * * ? *)", "--jobs.schedule.max-late-s=1000000000"]
    assert cli.main(["driver", f"--workspace={world.folder}", *schedule, *words]) == 75
    assert world.submissions == [expected]
