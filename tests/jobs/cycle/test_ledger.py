"""Where the time and the money of tries and cycles went, and what the next cycle will take."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.cycle.job_records import AttemptRecord, JobRecord, JobState
from jobs.cycle.ledger import (
    NEVER,
    SPENT,
    Category,
    CycleLedger,
    Moment,
    Try,
    critical_seconds,
    deadline_of,
    expected_seconds,
    ledger_of,
    spent_in,
    with_kept_until,
)
from jobs.plan.resources import Prices
from jobs.plan.spec import Plan
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


def at(second: float, name: EventName, **fields: Any) -> Moment:
    return Moment(round(1000 * second), str(name), fields)


def ledger(shape: Plan, records: list[JobRecord], moments: tuple[Moment, ...] = (), **more: Any) -> CycleLedger:
    given: dict[str, Any] = {"now": 10_000.0, "outcome": "succeeded", "deadline_at": None} | more
    return ledger_of(shape, records, moments, PRICES, **given)


TRAIN = plan(job("train", num_nodes=4, resources=TRN1))


def test_a_gang_that_lost_a_node_and_continued() -> None:
    records = [record("train", attempt(100, 400, 75), attempt(460, 860))]
    moments = (
        at(110, EventName.TRAIN_STARTED, step=0),
        at(210, EventName.TRAIN_STEPS, step=100, losses=[0.0] * 100, seconds=100),
        at(212, EventName.CHECKPOINT_SAVED, step=100),
        at(310, EventName.TRAIN_STEPS, step=200, losses=[0.0] * 100, seconds=100),
        at(480, EventName.TRAIN_STARTED, step=100),
        at(780, EventName.TRAIN_STEPS, step=400, losses=[0.0] * 300, seconds=300),
        at(860, EventName.STAGE_FINISHED, stage="train"),
    )
    found = ledger(TRAIN, records, moments)
    first, second = found.entries
    assert (first.nodes, first.waiting_ms, first.length_ms, first.ending) == (4, 100_000, 300_000, "exit 75")
    assert {kind: ms / 1000 for kind, ms in first.spent_ms.items() if ms} == {
        K.START_UP: 10,
        K.PRODUCTIVE: 100,
        K.WASTED: 190,
    }
    assert (second.waiting_ms, second.spent_ms[K.PRODUCTIVE], second.spent_ms[K.CHECKPOINT]) == (
        60_000,
        300_000,
        80_000,
    )
    whole = found.total
    assert whole.all_ms == 4 * 700_000
    assert whole.goodput == pytest.approx(400 / 700)
    assert whole.usd == pytest.approx(21.5 * 4 * 700 / 3600)
    assert whole.wasted_usd == pytest.approx(21.5 * 4 * 190 / 3600)
    assert whole.waiting_ms == 160_000


def test_tries_of_an_earlier_round_count_and_its_states_do_not() -> None:
    shape = plan(job("prepare"), job("train", "prepare", resources=TRN1))
    prepare = record("prepare", attempt(10, 50))
    first = record("train", attempt(60, 3660, 75), attempt(3660, 7260, 70), id="id1")
    second = record("train", attempt(8020, 8380), id="id2", created_at=8000.0)
    found = ledger(shape, [prepare, second], earlier=(first,))
    tries = [one for one in found.entries if one.job == "train"]
    assert [(one.attempt, one.ending, one.waiting_ms) for one in tries] == [
        (1, "exit 75", 10_000),
        (2, "exit 70", 0),
        (1, "succeeded", 20_000),
    ]
    train = found.stages()[1]
    assert train.usd == pytest.approx(21.5 * 2.1)
    assert train.wasted_usd == pytest.approx(43.0)
    assert (found.jobs, found.succeeded, found.failed, found.began_at, found.took_s) == (2, 2, 0, 0.0, 8380.0)


def test_what_an_earlier_round_has_saved_was_not_wasted() -> None:
    moments = (
        at(10, EventName.TRAIN_STARTED, step=0),
        at(90, EventName.TRAIN_STEPS, step=100, losses=[0.0] * 100, seconds=80),
        at(90, EventName.CHECKPOINT_SAVED, step=100),
        at(101.5, EventName.TRAIN_STARTED, step=100),
        at(181, EventName.TRAIN_STEPS, step=200, losses=[0.0] * 100, seconds=79.5),
    )
    first = record("train", attempt(0, 100, 70), id="id1")
    second = record("train", attempt(101, 181), id="id2", created_at=101.0)
    one, two = ledger(TRAIN, [second], moments, earlier=(first,)).entries
    assert (one.try_name, two.try_name) == ("1", "1 (submission 2)")
    assert (one.spent_ms[K.PRODUCTIVE], one.spent_ms[K.WASTED], two.spent_ms[K.PRODUCTIVE]) == (80_000, 10_000, 79_500)


def test_a_try_of_an_earlier_round_whose_end_is_unknown_ends_with_the_round() -> None:
    first = record("train", attempt(0, None, None), state="RUNNING", id="id1")
    second = record("train", attempt(50, None, None), state="RUNNING", id="id2", created_at=40.0)
    found = ledger(TRAIN, [second], now=60.0, outcome=None, earlier=(first,))
    assert [(one.length_ms, one.ending) for one in found.entries] == [(40_000, "no exit code"), (10_000, "running")]


def test_waiting_begins_when_the_last_dependency_has_ended() -> None:
    shape = plan(job("prepare"), job("train", "prepare"))
    found = ledger(shape, [record("prepare", attempt(5, 50)), record("train", attempt(80, 100))])
    assert [entry.waiting_ms for entry in found.entries] == [5000, 30_000]


def test_children_of_an_array_each_have_their_tries_and_one_node() -> None:
    shape = plan(job("embed", array_size=2, resources=TRN1))
    children = (record("embed:0", attempt(0, 100)), record("embed:1", attempt(0, 50, 75), attempt(50, 200)))
    events = (at(10, EventName.STAGE_STARTED, stage="embed"), at(100, EventName.STAGE_FINISHED, stage="embed"))
    found = ledger(shape, [record("embed", children=children)], events)
    assert [(e.job, e.attempt, e.nodes) for e in found.entries] == [
        ("embed:0", 1, 1),
        ("embed:1", 1, 1),
        ("embed:1", 2, 1),
    ]
    assert found.entries[0].spent_ms[K.START_UP] == 10_000, "the first child writes the events"
    assert found.entries[1].spent_ms[K.WASTED] == 50_000
    assert found.entries[2].spent_ms[K.PRODUCTIVE] == 150_000
    assert (found.jobs, found.succeeded) == (2, 2)


def test_a_refusal_by_the_gate_is_no_waste() -> None:
    found = ledger(plan(job("evaluate")), [record("evaluate", attempt(0, 60, 80))], outcome="refused")
    assert found.total.machine_ms[K.EVALUATION] == 60_000


def test_what_nobody_has_priced_is_unknown_and_not_free() -> None:
    shape = plan(job("prepare"), job("train", "prepare", resources=TRN1))
    found = ledger(shape, [record("prepare", attempt(0, 60)), record("train", attempt(60, 120))])
    prepare, train = found.stages()
    assert (prepare.usd, found.total.usd, found.total.wasted_usd) == (None, None, None)
    assert train.usd == pytest.approx(21.5 * 60 / 3600)


def test_a_try_that_runs_counts_until_now() -> None:
    found = ledger(TRAIN, [record("train", attempt(0, None, None), state="RUNNING")], now=30.0, outcome=None)
    (entry,) = found.entries
    assert (entry.ending, entry.length_ms, found.outcome, found.ended_at) == ("running", 30_000, "open", None)


def test_a_job_that_never_ran() -> None:
    found = ledger(TRAIN, [record("train", state="FAILED", status_reason="Dependent Job failed")], outcome="failed")
    assert (found.entries, found.failed, found.total.goodput, found.total.usd) == ((), 1, None, 0)


def test_events_of_other_jobs_are_not_mixed_up() -> None:
    shape = plan(job("prepare"), job("health"))
    records = [record("prepare", attempt(0, 100)), record("health", attempt(0, 20))]
    moments = (
        at(1, EventName.STAGE_STARTED, stage="health"),
        at(3, EventName.STAGE_STARTED, stage="prepare"),
        at(19, EventName.STAGE_FINISHED, stage="health"),
        at(90, EventName.STAGE_FINISHED, stage="prepare"),
    )
    prepare = ledger(shape, records, moments).entries[0]
    assert (prepare.spent_ms[K.START_UP], prepare.spent_ms[K.PRODUCTIVE]) == (13_000, 87_000)


@pytest.mark.parametrize(
    ("deadline_at", "ended_at", "now", "done", "expected"),
    [
        (None, 50.0, 60.0, True, "none"),
        (100.0, 100.0, 120.0, True, "met"),
        (100.0, 101.0, 120.0, True, "missed"),
        (100.0, 50.0, 120.0, False, "missed"),
        (100.0, None, 100.0, False, "open"),
        (100.0, None, 101.0, False, "missed"),
    ],
)
def test_deadlines(deadline_at: float | None, ended_at: float | None, now: float, done: bool, expected: str) -> None:
    assert deadline_of(deadline_at, ended_at, now, done=done) == expected


@pytest.mark.parametrize(("deadline_at", "expected"), [(None, "none"), (20.0, "none"), (9.0, "missed")])
def test_a_cycle_that_was_cancelled_in_time_has_missed_nothing(deadline_at: float | None, expected: str) -> None:
    tries = [record("train", attempt(0, 10, 75))]
    assert ledger(TRAIN, tries, outcome="cancelled", deadline_at=deadline_at, now=99.0).deadline == expected
    waited = record("verify", state="FAILED", stopped_at=30.0)
    shape = plan(job("train"), job("verify", "train"))
    found = ledger(shape, [*tries, waited], outcome="cancelled", deadline_at=deadline_at, now=99.0)
    assert found.deadline == ("missed" if deadline_at else "none"), "the last job was ended after it"


# One try.


def steps(second: float, step: int, count: int, seconds: float, **fields: Any) -> Moment:
    return at(second, EventName.TRAIN_STEPS, step=step, losses=[0.1] * count, seconds=seconds, **fields)


def seconds(one: Try) -> dict[Category, float]:
    """Without the empty ones."""
    return {kind: ms / 1000 for kind, ms in spent_in(one).items() if ms}


def train(*moments: Moment, stop: int = 100, kept: bool = True, until: float = NEVER) -> Try:
    return Try("train", 0, 1000 * stop, kept, moments, until)


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
    assert seconds(one) == {
        K.START_UP: 10 + 10,
        K.DATA_WAIT: 5,
        K.COMPILE: 4,
        K.PRODUCTIVE: 11 + 20,
        K.EVALUATION: 11,
        K.CHECKPOINT: 4 + 25,
    }


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
    one = train(
        at(10, EventName.TRAIN_STARTED, step=0),
        steps(30, 10, 10, 20),
        at(33, EventName.CHECKPOINT_SAVED, step=10, seconds=3),
        at(34, EventName.STAGE_STOPPED, stage="train"),
        stop=40,
        kept=False,
        until=10.0,
    )
    assert seconds(one) == {K.START_UP: 10, K.PRODUCTIVE: 20, K.CHECKPOINT: 3, K.WASTED: 7}


def test_a_try_that_left_nothing_is_wasted_from_its_start() -> None:
    one = train(at(10, EventName.TRAIN_STARTED, step=0), steps(30, 10, 10, 20), kept=False, until=0.0)
    assert seconds(one) == {K.WASTED: 100}
    assert seconds(Try("evaluate", 0, 5000, False, (at(1, EventName.STAGE_STARTED, stage="evaluate"),))) == {
        K.WASTED: 5
    }


def test_other_stages() -> None:
    started, finished = at(2, EventName.STAGE_STARTED), at(8, EventName.STAGE_FINISHED)
    for stage, kind in (("prepare", K.PRODUCTIVE), ("compile", K.COMPILE), ("evaluate", K.EVALUATION)):
        assert seconds(Try(stage, 0, 10_000, True, (started, finished))) == {K.START_UP: 4, kind: 6}
        assert seconds(Try(stage, 0, 10_000, True, (started,))) == {K.START_UP: 2, kind: 8}, "under way"
    assert seconds(Try("health", 0, 10_000, True, (started, finished))) == {K.START_UP: 10}
    assert seconds(Try("verify", 0, 10_000, True)) == {K.EVALUATION: 10}, "it writes no events"
    skipped = (started, at(8, EventName.STAGE_SKIPPED))
    assert seconds(Try("embed", 0, 10_000, True, skipped)) == {K.START_UP: 10}, "it was done before"


def test_parts_of_a_failed_try_are_kept() -> None:
    parts = (
        at(10, EventName.STAGE_STARTED, stage="embed"),
        at(20, EventName.PART_EMBEDDED, part=0, seconds=8),
        at(30, EventName.PART_EMBEDDED, part=1, seconds=12),  # two workers at once
    )
    assert seconds(Try("embed", 0, 40_000, False, parts)) == {K.START_UP: 10, K.PRODUCTIVE: 20, K.WASTED: 10}
    prepared = (at(1, EventName.STAGE_STARTED, stage="prepare"), at(7, EventName.PARTITION_PREPARED, rows=5))
    assert seconds(Try("prepare", 0, 10_000, False, prepared)) == {K.START_UP: 1, K.PRODUCTIVE: 6, K.WASTED: 3}


def tries_of(*starts_and_saves: tuple[int | None, int]) -> list[Try]:
    made = []
    for start, saved in starts_and_saves:
        moments = [] if start is None else [at(1, EventName.TRAIN_STARTED, step=start)]
        made.append(train(*moments, at(2, EventName.CHECKPOINT_SAVED, step=saved), kept=False))
    return made


def until(*starts_and_saves: tuple[int | None, int]) -> list[float]:
    return [one.kept_until for one in with_kept_until(tries_of(*starts_and_saves))]


def test_what_a_later_try_continued_from_is_kept() -> None:
    assert until((0, 100), (100, 150), (50, 60)) == [50.0, 50.0, 150.0], "150 was bad: all from 50 on was done again"
    assert until((0, 100), (None, 0)) == [100.0, 100.0], "the second never began"
    good = train(at(1, EventName.TRAIN_STARTED, step=100))
    assert [one.kept_until for one in with_kept_until([*tries_of((0, 120)), good])] == [100.0, NEVER]


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
moments_of = st.lists(st.builds(Moment, st.integers(-10_000, 200_000), names.map(str), fields), max_size=25)


@given(
    stage=st.sampled_from(["prepare", "health", "compile", "train", "evaluate", "embed", "verify", "report", "other"]),
    length_ms=st.integers(0, 150_000),
    kept=st.booleans(),
    kept_until=st.one_of(st.just(NEVER), st.integers(0, 300).map(float)),
    moments=moments_of,
)
def test_the_parts_of_any_try_add_up_exactly(
    stage: str, length_ms: int, kept: bool, kept_until: float, moments: list[Moment]
) -> None:
    moments.sort(key=lambda moment: moment.at_ms)
    spent = spent_in(Try(stage, 0, length_ms, kept, tuple(moments), kept_until))
    assert sum(spent.values()) == length_ms
    assert set(spent) == set(SPENT) and all(ms >= 0 for ms in spent.values())


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
    def took(seconds: float) -> JobRecord:
        return good("train", tried(at=(0.0, seconds)))

    history = [[took(100), good("eval", tried(at=(0.0, 5.0)))], [took(9_000)], [took(120), bad("eval", tried(80))]]
    assert expected_seconds(history) == {"train": 120, "eval": 5}
    assert expected_seconds([]) == {}


DIAMOND = plan(job("a"), job("b", "a"), job("c", "a"), job("d", "b", "c"))


def test_the_longest_way_through_the_jobs() -> None:
    assert critical_seconds(DIAMOND, {"a": 1, "b": 10, "c": 20, "d": 3}) == 24
    assert critical_seconds(DIAMOND, {"a": 1, "b": 30, "c": 20, "d": 3}) == 34


def test_of_which_one_is_unknown() -> None:
    assert critical_seconds(DIAMOND, {"a": 1, "b": 10, "d": 3}) is None
    assert critical_seconds(plan(), {}) == 0.0
