"""The ledger of a cycle as its workspace tells it."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.config import JobsConfig
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import Closed, JobState
from jobs.cycle.ledger import Category, read_ledger, read_moments, scheduled_at
from jobs.schedule import ScheduleConfig
from jobs.settings import CycleSettings
from jobs.setup import OpenCycle
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.test_ledger import attempt, record

SHAPE = plan(job("prepare"), job("report", "prepare"))
CONFIG = JobsConfig(vcpu_usd_per_hour=0.05)


@pytest.fixture
def store(tmp_path: Path) -> CycleStore:
    made = CycleStore(open_storage(str(tmp_path)), "2026-11-20", lambda: 500.0)
    with made.submitting(SHAPE, "local", "me"):
        return made


def log(store: CycleStore, text: str) -> None:
    store.storage.write_bytes("cycles/2026-11-20/events.jsonl", text.encode())


def test_events_are_read_past_lines_that_are_none(store: CycleStore) -> None:
    assert read_moments(store.storage, store.cycle) == ()
    good = '{"time": "1970-01-01T00:08:20.250+00:00", "event": "stage_started", "stage": "prepare"}'
    log(store, f'{good}\n[1]\n{{"event": "x"}}\n{{"time": "soon", "event": "x"}}\n{good[:40]}\n')
    (moment,) = read_moments(store.storage, store.cycle)
    assert (moment.at_ms, moment.name, dict(moment.fields)) == (500_250, "stage_started", {"stage": "prepare"})


def test_the_report_is_about_the_other_jobs(store: CycleStore) -> None:
    records = (
        record("prepare", attempt(100, 160)),
        record("report", attempt(170, None, None), state=JobState.RUNNING),
    )
    inside = read_ledger(store, SHAPE, records, CONFIG.model_copy(update={"sla_s": 60}), without_report=True)
    outside = read_ledger(store, SHAPE, records, CONFIG)
    assert (inside.outcome, inside.ended_at, inside.deadline_at, inside.deadline) == ("succeeded", 160, 560, "met")
    assert (outside.outcome, outside.deadline) == ("open", "none")
    assert inside.entries[1].spent_ms[Category.EVALUATION] == 330_000, "it runs until now"
    assert inside.total.usd == pytest.approx(2 * 0.05 * (60 + 330) / 3600)


def test_a_cycle_that_has_ended_is_read_from_the_record(store: CycleStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (record("prepare", attempt(0, 1)),), (record("prepare", attempt(0, 2)),)
    store.save_records(old)
    monkeypatch.setattr("jobs.setup.open_target", lambda *_: SimpleNamespace(records=lambda plan: new))
    cycle = OpenCycle(CycleSettings(), store, print, StopSignal())
    assert cycle.records(SHAPE) == new, "under way"
    store.close(Closed(outcome="succeeded", at=300.0))
    assert cycle.records(SHAPE) == old
    assert read_ledger(store, SHAPE, old, CONFIG).outcome == "succeeded"
    lost = (record("prepare", attempt(100, None, None)),)
    assert read_ledger(store, SHAPE, lost, CONFIG).entries[0].length_ms == 200_000, "until the end, not now"


def test_a_deadline_counts_from_the_scheduled_time() -> None:
    daily = ScheduleConfig(expression="cron(0 2 * * ? *)")
    due, claimed = (
        datetime(2026, 11, 20, 2, tzinfo=UTC).timestamp(),
        datetime(2026, 11, 20, 2, 7, tzinfo=UTC).timestamp(),
    )
    assert scheduled_at(daily, "2026-11-20", claimed) == due
    assert scheduled_at(daily, "2026-11-20", claimed + 9 * 86400) == due, "caught up later"
    assert scheduled_at(daily, "by-hand", claimed) == claimed
    assert scheduled_at(daily, "2026-11-20-again", claimed) == claimed
    assert scheduled_at(ScheduleConfig(), "2026-11-20", claimed) == claimed
