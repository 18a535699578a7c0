"""Where the time and the money of tries and cycles went, and what the next cycle will take."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.cycle.costs import (
    NEVER,
    SPENT,
    AttemptSpan,
    Category,
    CycleEvent,
    CycleLedger,
    critical_seconds,
    expected_seconds,
    ledger_of,
    read_cycle_events,
    read_ledger,
    scheduled_at,
    time_by_category,
    with_kept_until,
)
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import AttemptRecord, Closed, JobRecord, JobState
from jobs.plan.resources import Prices
from jobs.plan.spec import JobPlan
from jobs.schedule import ScheduleConfig
from jobs.settings import CycleSettings, JobsConfig
from jobs.setup import OpenCycle
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.telemetry.events import EventName
from tests.jobs.cycle.cases import TRN1, job, plan
from tests.jobs.cycle.record_cases import array, bad, good, tried, under_way

K = Category
PRICES = Prices({"trn1.32xlarge": 21.5})


def attempt(start: float, stop: float | None, code: int | None = 0, **more: Any) -> AttemptRecord:
    return AttemptRecord(started_at=start, stopped_at=stop, exit_code=code, **more)


def record(name: str, *attempts: AttemptRecord, **more: Any) -> JobRecord:
    good = not attempts or attempts[-1].exit_code == 0
    fields = {"id": name, "state": JobState.SUCCEEDED if good else JobState.FAILED, "created_at": 0.0}
    return JobRecord.model_validate({"name": name, "attempts": attempts} | fields | more)


def at(second: float, name: EventName, **fields: Any) -> CycleEvent:
    return CycleEvent(round(1000 * second), str(name), fields)


def ledger(shape: JobPlan, records: list[JobRecord], events: tuple[CycleEvent, ...] = (), **more: Any) -> CycleLedger:
    given: dict[str, Any] = {"now": 10_000.0, "outcome": "succeeded", "deadline_at": None} | more
    return ledger_of(shape, records, events, PRICES, **given)


TRAIN = plan(job("train", num_nodes=4, resources=TRN1))


def test_a_gang_that_lost_a_node_and_continued() -> None:
    records = [record("train", attempt(100, 400, 75), attempt(460, 860))]
    events = (
        at(110, EventName.TRAIN_STARTED, step=0),
        at(210, EventName.TRAIN_STEPS, step=100, losses=[0.0] * 100, seconds=100),
        at(212, EventName.CHECKPOINT_SAVED, step=100),
        at(310, EventName.TRAIN_STEPS, step=200, losses=[0.0] * 100, seconds=100),
        at(480, EventName.TRAIN_STARTED, step=100),
        at(780, EventName.TRAIN_STEPS, step=400, losses=[0.0] * 300, seconds=300),
        at(860, EventName.STAGE_FINISHED, stage="train"),
    )
    found = ledger(TRAIN, records, events)
    first, second = found.entries
    assert (first.nodes, first.waiting_ms, first.length_ms, first.ending) == (4, 100_000, 300_000, "exit 75")
    kinds = (K.START_UP, K.PRODUCTIVE, K.CHECKPOINT, K.WASTED)
    assert [first.spent_ms[kind] // 1000 for kind in kinds] == [10, 100, 0, 190]
    assert [second.spent_ms[kind] // 1000 for kind in kinds] == [20, 300, 80, 0]
    whole = found.total
    assert (whole.all_ms, whole.waiting_ms) == (4 * 700_000, 160_000)
    assert whole.goodput == pytest.approx(400 / 700)
    assert whole.usd == pytest.approx(21.5 * 4 * 700 / 3600)
    assert whole.wasted_usd == pytest.approx(21.5 * 4 * 190 / 3600)


def test_tries_of_an_earlier_round_count_and_its_states_do_not() -> None:
    """What they had saved was not wasted; one whose end is unknown ended with the round."""
    shape = plan(job("prepare"), job("train", "prepare", resources=TRN1))
    prepare = record("prepare", attempt(10, 50))
    first = record("train", attempt(60, 3660, 75), attempt(3660, 7260, 70), id="id1")
    second = record("train", attempt(8020, None, None), state="RUNNING", id="id2", created_at=8000.0)
    third = record("train", attempt(9020, 9380), id="id3", created_at=9000.0)
    events = (
        at(60, EventName.TRAIN_STARTED, step=0),
        at(140, EventName.TRAIN_STEPS, step=100, losses=[0.0] * 100, seconds=80),
        at(140, EventName.CHECKPOINT_SAVED, step=100),
        at(8021, EventName.TRAIN_STARTED, step=100),
    )
    found = ledger(shape, [prepare, third], events, earlier=(first, second))
    tries = [one for one in found.entries if one.job == "train"]
    assert [(one.attempt_name, one.ending, one.waiting_ms, one.length_ms) for one in tries] == [
        ("1", "exit 75", 10_000, 3_600_000),
        ("2", "exit 70", 0, 3_600_000),
        ("1 (submission 2)", "no exit code", 20_000, 980_000),
        ("1 (submission 3)", "succeeded", 20_000, 360_000),
    ]
    assert tries[0].spent_ms[K.PRODUCTIVE] == 80_000
    assert found.stages()[1].usd == pytest.approx(21.5 * 8540 / 3600)
    assert (found.jobs, found.succeeded, found.failed, found.began_at, found.took_s) == (2, 2, 0, 0.0, 9380.0)


def test_children_of_an_array_each_have_their_tries_and_one_node() -> None:
    shape = plan(job("embed", array_size=2, resources=TRN1))
    children = (record("embed:0", attempt(0, 100)), record("embed:1", attempt(0, 50, 75), attempt(50, 200)))
    events = (at(10, EventName.STAGE_STARTED, stage="embed"), at(100, EventName.STAGE_FINISHED, stage="embed"))
    found = ledger(shape, [record("embed", children=children)], events)
    one, two, three = found.entries
    assert [(e.job, e.attempt) for e in found.entries] == [("embed:0", 1), ("embed:1", 1), ("embed:1", 2)]
    assert one.spent_ms[K.START_UP] == 10_000, "the first child writes the events"
    assert (two.spent_ms[K.WASTED], three.spent_ms[K.PRODUCTIVE]) == (50_000, 150_000)
    assert (found.jobs, found.succeeded) == (2, 2)


def test_what_nobody_has_priced_is_unknown_and_not_free() -> None:
    shape = plan(job("prepare"), job("train", "prepare", resources=TRN1))
    found = ledger(shape, [record("prepare", attempt(0, 60)), record("train", attempt(80, 140))])
    prepare, train = found.stages()
    assert (prepare.usd, found.total.usd, found.total.wasted_usd) == (None, None, None)
    assert train.usd == pytest.approx(21.5 * 60 / 3600)
    assert train.waiting_ms == 20_000, "from the end of prepare"


@pytest.mark.parametrize(
    ("made", "outcome", "expected"),
    [
        (record("train", attempt(0, None, None), state="RUNNING"), None, ("running", 30_000)),  # until now
        (record("train", attempt(0, 20, 80), state="FAILED"), "refused", ("exit 80", 20_000)),
        (record("train", state="FAILED", status_reason="Dependent Job failed"), "failed", None),  # it never ran
    ],
)
def test_the_end_of_a_try(made: JobRecord, outcome: str | None, expected: tuple[str, int] | None) -> None:
    found = ledger(TRAIN, [made], now=30.0, outcome=outcome)
    assert [(one.ending, one.length_ms) for one in found.entries] == ([expected] if expected else [])
    assert (found.outcome, found.ended_at) == (outcome or "open", {"refused": 20, "failed": 30}.get(outcome or ""))
    assert found.total.machine_ms[K.WASTED] == 0, "a refusal by the gate is no waste"


def test_a_try_that_was_stopped_has_failed_even_if_it_exits_with_0() -> None:
    made = record("train", attempt(0, 20, 0, status_reason="Job attempt duration exceeded timeout"), state="FAILED")
    found = ledger(TRAIN, [made], outcome="failed")
    assert found.entries[0].ending == "Job attempt duration exceeded timeout"
    assert found.total.machine_ms[K.WASTED] == 4 * 20_000


def test_events_of_other_jobs_are_not_mixed_up() -> None:
    shape = plan(job("prepare"), job("health"))
    records = [record("prepare", attempt(0, 100)), record("health", attempt(0, 20))]
    events = (
        at(1, EventName.STAGE_STARTED, stage="health"),
        at(3, EventName.STAGE_STARTED, stage="prepare"),
        at(19, EventName.STAGE_FINISHED, stage="health"),
        at(90, EventName.STAGE_FINISHED, stage="prepare"),
    )
    prepare = ledger(shape, records, events).entries[0]
    assert (prepare.spent_ms[K.START_UP], prepare.spent_ms[K.PRODUCTIVE]) == (13_000, 87_000)


def test_a_cycle_in_which_nothing_ran_misses_its_deadline() -> None:
    found = ledger(TRAIN, [record("train", state="FAILED")], outcome="failed", deadline_at=50.0, now=9.0)
    assert (found.deadline, found.ended_at) == ("missed", 9.0)


@pytest.mark.parametrize(
    ("outcome", "deadline_at", "expected"),
    [
        *((outcome, None, "none") for outcome in ("succeeded", "cancelled", None)),
        ("succeeded", 10.0, "met"),
        ("refused", 9.0, "missed"),
        ("failed", 50.0, "missed"),
        (None, 99.0, "open"),
        (None, 98.0, "missed"),
        ("cancelled", 20.0, "missed"),  # its last job was ended after it
        ("cancelled", 30.0, "none"),  # in time: it has missed nothing
    ],
)
def test_deadlines(outcome: str | None, deadline_at: float | None, expected: str) -> None:
    shape = plan(job("train"), job("verify", "train"))
    records = [record("train", attempt(0, 10)), record("verify")]
    if outcome == "cancelled":
        records[1] = record("verify", state="FAILED", stopped_at=30.0)
    assert ledger(shape, records, outcome=outcome, deadline_at=deadline_at, now=99.0).deadline == expected


# One try.


def steps(second: float, step: int, count: int, seconds: float, **fields: Any) -> CycleEvent:
    return at(second, EventName.TRAIN_STEPS, step=step, losses=[0.1] * count, seconds=seconds, **fields)


def seconds(one: AttemptSpan) -> dict[Category, float]:
    """Without the empty ones."""
    return {kind: ms / 1000 for kind, ms in time_by_category(one).items() if ms}


def train(*events: CycleEvent, stop: int = 100, kept: bool = True, until: float = NEVER) -> AttemptSpan:
    return AttemptSpan("train", 0, 1000 * stop, kept, events, until)


def test_a_training_from_start_to_end() -> None:
    one = train(
        at(8, EventName.STAGE_STARTED, stage="train"),
        at(10, EventName.TRAIN_STARTED, step=0),
        steps(30, 10, 10, 20, data_wait_share=0.25),  # 10 to 30; of them 5 waiting for data, 4 compiling
        at(30, EventName.GRAPH_COMPILED, step=10, compile_s=4),
        at(36, EventName.HOLDOUT_EVALUATED, step=10, seconds=6),
        steps(60, 20, 10, 20),  # 40 to 60; the 4 seconds before went into a checkpoint
        at(50, EventName.CHECKPOINT_SAVED, step=10, seconds=9),  # behind the steps
        at(65, EventName.HOLDOUT_EVALUATED, step=20, seconds=5),
        at(75, EventName.CHECKPOINT_SAVED, step=20, seconds=10),
        at(90, EventName.STAGE_FINISHED, stage="train"),
    )
    spent = {K.START_UP: 20, K.DATA_WAIT: 5, K.COMPILE: 4, K.PRODUCTIVE: 31, K.EVALUATION: 11, K.CHECKPOINT: 29}
    assert seconds(one) == spent


def test_steps_that_were_done_again_are_wasted() -> None:
    one = train(
        at(10, EventName.TRAIN_STARTED, step=0),
        steps(30, 10, 10, 20),
        steps(50, 20, 10, 20, data_wait_share=0.5),
        steps(70, 30, 10, 20),
        kept=False,
        until=15.0,
    )
    assert seconds(one) == {K.START_UP: 10, K.PRODUCTIVE: 20 + 5, K.DATA_WAIT: 5, K.WASTED: 10 + 20 + 30}


def test_a_preempted_training_keeps_what_it_saved() -> None:
    events = (
        at(10, EventName.TRAIN_STARTED, step=0),
        steps(30, 10, 10, 20),
        at(33, EventName.CHECKPOINT_SAVED, step=10, seconds=3),
        at(34, EventName.STAGE_STOPPED, stage="train"),
    )
    kept = {K.START_UP: 10, K.PRODUCTIVE: 20, K.WASTED: 10}
    assert seconds(train(*events, stop=40, kept=False, until=10.0)) == kept
    assert seconds(train(*events[:2], kept=False, until=0.0)) == {K.WASTED: 100}, "it left nothing"


def test_other_stages() -> None:
    started, finished = at(2, EventName.STAGE_STARTED), at(8, EventName.STAGE_FINISHED)
    for stage, kind in (("prepare", K.PRODUCTIVE), ("compile", K.COMPILE), ("evaluate", K.EVALUATION)):
        assert seconds(AttemptSpan(stage, 0, 10_000, True, (started, finished))) == {K.START_UP: 4, kind: 6}
        assert seconds(AttemptSpan(stage, 0, 10_000, True, (started,))) == {K.START_UP: 2, kind: 8}, "under way"
    assert seconds(AttemptSpan("health", 0, 10_000, True, (started, finished))) == {K.START_UP: 10}
    assert seconds(AttemptSpan("verify", 0, 10_000, True)) == {K.EVALUATION: 10}, "it writes no events"
    skipped = (started, at(8, EventName.STAGE_SKIPPED))
    assert seconds(AttemptSpan("embed", 0, 10_000, True, skipped)) == {K.START_UP: 10}, "it was done before"


def test_parts_of_a_failed_try_are_kept() -> None:
    parts = (
        at(10, EventName.STAGE_STARTED, stage="embed"),
        at(20, EventName.PART_EMBEDDED, part=0, seconds=8),
        at(30, EventName.PART_EMBEDDED, part=1, seconds=12),  # two workers at once
    )
    assert seconds(AttemptSpan("embed", 0, 40_000, False, parts)) == {K.START_UP: 10, K.PRODUCTIVE: 20, K.WASTED: 10}
    prepared = (at(1, EventName.STAGE_STARTED, stage="prepare"), at(7, EventName.PARTITION_PREPARED, rows=5))
    assert seconds(AttemptSpan("prepare", 0, 10_000, False, prepared)) == {K.START_UP: 1, K.PRODUCTIVE: 6, K.WASTED: 3}


def until(*starts_and_saves: tuple[int | None, int], kept: bool = False) -> list[float]:
    """`kept`: whether the last one ended well."""
    tries = list[AttemptSpan]()
    for start, saved in starts_and_saves:
        events = [] if start is None else [at(1, EventName.TRAIN_STARTED, step=start)]
        is_last = len(tries) == len(starts_and_saves) - 1
        tries.append(train(*events, at(2, EventName.CHECKPOINT_SAVED, step=saved), kept=kept and is_last))
    return [one.kept_until for one in with_kept_until(tries)]


def test_what_a_later_try_continued_from_is_kept() -> None:
    assert until((0, 100), (100, 150), (50, 60)) == [50.0, 50.0, 150.0], "150 was bad: all from 50 on was done again"
    assert until((0, 100), (None, 0)) == [100.0, 100.0], "the second never began"
    assert until((0, 120), (100, 200), kept=True) == [100.0, NEVER]


names = st.sampled_from([*EventName])
numbers = st.one_of(st.integers(-5, 300), st.floats(allow_nan=True), st.none(), st.text(max_size=2))
fields = st.fixed_dictionaries(
    {},
    optional={
        "step": numbers,
        "seconds": numbers,
        "compile_s": numbers,
        "data_wait_share": numbers,
        "losses": st.one_of(st.none(), st.lists(st.just(0.5), max_size=9)),
    },
)
moments_of = st.lists(st.builds(CycleEvent, st.integers(-10_000, 200_000), names.map(str), fields), max_size=25)


@given(
    stage=st.sampled_from(["prepare", "health", "compile", "train", "evaluate", "embed", "verify", "report", "other"]),
    length_ms=st.integers(0, 150_000),
    kept=st.booleans(),
    kept_until=st.one_of(st.just(NEVER), st.integers(0, 300).map(float)),
    events=moments_of,
)
def test_the_parts_of_any_try_add_up_exactly(
    stage: str, length_ms: int, kept: bool, kept_until: float, events: list[CycleEvent]
) -> None:
    events.sort(key=lambda moment: moment.at_ms)
    spent = time_by_category(AttemptSpan(stage, 0, length_ms, kept, tuple(events), kept_until))
    assert sum(spent.values()) == length_ms
    assert set(spent) == set(SPENT) and all(ms >= 0 for ms in spent.values())


# The ledger as a workspace tells it.

SHAPE = plan(job("prepare"), job("report", "prepare"))
CONFIG = JobsConfig(vcpu_usd_per_hour=0.05)


@pytest.fixture
def store(tmp_path: Path) -> CycleStore:
    made = CycleStore(open_storage(str(tmp_path)), "2026-11-20", lambda: 500.0)
    with made.submitting(SHAPE, "local", "me"):
        return made


def test_events_are_read_past_lines_that_are_none(store: CycleStore) -> None:
    assert read_cycle_events(store.storage, store.cycle) == ()
    good = '{"time": "1970-01-01T00:08:20.250+00:00", "event": "stage_started", "stage": "prepare"}'
    text = f'{good}\n[1]\n{{"event": "x"}}\n{{"time": "soon", "event": "x"}}\n{good[:40]}\n'
    store.storage.write_bytes("cycles/2026-11-20/events.jsonl", text.encode())
    (moment,) = read_cycle_events(store.storage, store.cycle)
    assert (moment.at_ms, moment.name, dict(moment.fields)) == (500_250, "stage_started", {"stage": "prepare"})


def test_the_report_is_about_the_other_jobs(store: CycleStore) -> None:
    records = record("prepare", attempt(100, 160)), record("report", attempt(170, None, None), state=JobState.RUNNING)
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
    daily, due = ScheduleConfig(expression="cron(0 2 * * ? *)"), datetime(2026, 11, 20, 2, tzinfo=UTC).timestamp()
    claimed = due + 420
    assert scheduled_at(daily, "2026-11-20", claimed) == due
    assert scheduled_at(daily, "2026-11-20", claimed + 9 * 86400) == due, "caught up later"
    for name in ("by-hand", "2026-11-20-again"):
        assert scheduled_at(daily, name, claimed) == claimed
    assert scheduled_at(ScheduleConfig(), "2026-11-20", claimed) == claimed


# What a cycle will take.


@pytest.mark.parametrize(
    ("record", "seconds"),
    [
        (good("a", tried(at=(5.0, 15.0))), 10.0),
        (good("a", tried(75, at=(0.0, 100.0)), tried(at=(200.0, 230.0))), 30.0),  # the try that did it
        (good("a", tried(at=None)), None),
        (bad("a", tried(65, at=(0.0, 9.0))), None),
        (under_way("a", "RUNNING", tried(at=(0.0, 9.0))), None),
        (array("e", "SUCCEEDED", good("e:0", tried(at=(0.0, 3.0))), good("e:1", tried(at=(10.0, 17.0)))), 7.0),
        (array("e", "FAILED", good("e:0", tried(at=(0.0, 3.0))), bad("e:1", tried(65))), None),
        (array("e", "PENDING", good("e:0", tried(at=(0.0, 3.0))), under_way("e:1")), None),
    ],
)
def test_what_a_job_took(record: JobRecord, seconds: float | None) -> None:
    assert expected_seconds([[record]]).get(record.name) == seconds


def test_the_median_of_the_cycles_in_which_a_job_succeeded() -> None:
    took = {name: good("train", tried(at=(0.0, s))) for name, s in (("1", 100.0), ("2", 9000.0), ("3", 120.0))}
    history = [[took["1"], good("eval", tried(at=(0.0, 5.0)))], [took["2"]], [took["3"], bad("eval", tried(80))]]
    assert expected_seconds(history) == {"train": 120, "eval": 5}


DIAMOND = plan(job("a"), job("b", "a"), job("c", "a"), job("d", "b", "c"))


@pytest.mark.parametrize(
    ("shape", "seconds", "expected"),
    [
        (DIAMOND, {"a": 1, "b": 10, "c": 20, "d": 3}, 24),
        (DIAMOND, {"a": 1, "b": 30, "c": 20, "d": 3}, 34),
        (DIAMOND, {"a": 1, "b": 10, "d": 3}, None),
        (plan(), {}, 0.0),
    ],
)
def test_the_longest_way_through_the_jobs(shape: JobPlan, seconds: dict[str, float], expected: float | None) -> None:
    assert critical_seconds(shape, seconds) == expected
