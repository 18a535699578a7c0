"""How a cycle ended: who is to blame, the exit code, cycles that were submitted half."""

import pytest

from jobs.cycle.job_records import AttemptRecord, Closed, JobRecord
from jobs.cycle.job_states import (
    CANCELLED,
    HOST_TERMINATED,
    TIMED_OUT,
    exit_code,
    exit_code_of_cycle,
    first_failure,
    outcome_of,
    reason_of,
)
from pipeline.core.errors import EXIT_TABLE, ExitRule
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.record_cases import array, bad, good, tried, under_way

PLAN = plan(job("a"), job("b", "a"), job("c", "b"))
OUT_OF_MEMORY = "OutOfMemoryError: Container killed due to memory usage"
BY_HAND = CANCELLED + "by hand"


def ended(*records: JobRecord, cancelled: Closed | None = None) -> Closed:
    closed = outcome_of(PLAN, records, cancelled=cancelled)
    assert closed is not None
    return closed


def test_success() -> None:
    records = good("a", stopped_at=5), good("b", stopped_at=9), good("c", stopped_at=7)
    assert ended(*records) == Closed(outcome="succeeded", at=9)
    assert exit_code_of_cycle(ended(*records), records) == 0


@pytest.mark.parametrize("state", ["SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING"])
def test_under_way(state: str) -> None:
    assert outcome_of(PLAN, [good("a"), good("b"), under_way("c", state)]) is None
    assert outcome_of(PLAN, [bad("a", tried(65)), bad("b"), under_way("c", state)]) is None
    half = [bad("a", tried(143), why=BY_HAND), under_way("b", state)]
    assert outcome_of(PLAN, half, cancelled=Closed(outcome="cancelled", at=1)) is None


@pytest.mark.parametrize("rule", EXIT_TABLE, ids=lambda rule: rule.name)
def test_the_first_failure_and_not_its_consequences_gives_reason_and_exit_code(rule: ExitRule) -> None:
    code, name = rule.exit_code, rule.name
    records = good("a"), bad("b", tried(75), tried(code), stopped_at=8), bad("c", stopped_at=8)
    closed = ended(*records)
    assert closed.outcome == ("refused" if code == 80 else "failed")
    assert closed.reason == f"b: exit code {code} ({name})"
    assert closed.at == 8
    assert exit_code_of_cycle(closed, records) == code


def test_of_two_failures_the_earlier_one_counts_wherever_it_stands() -> None:
    records = [bad("a", tried(65), stopped_at=9.0), bad("b", tried(1), stopped_at=3.0), bad("c", stopped_at=1.0)]
    for order in (records, records[::-1]):
        assert first_failure(order) is records[1]
        assert exit_code_of_cycle(ended(*order), order) == 1


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        (tried(None, status_reason=HOST_TERMINATED), HOST_TERMINATED),
        (tried(143, status_reason=TIMED_OUT), f"{TIMED_OUT}, exit code 143 (Preempted)"),
        (tried(137, reason=OUT_OF_MEMORY), f"{OUT_OF_MEMORY}, exit code 137"),
        (
            tried(None, status_reason="Task failed to start", reason="CannotPullContainerError: no such image"),
            "Task failed to start, CannotPullContainerError: no such image",
        ),
        (tried(None, status_reason=""), "no reason given"),
    ],
)
def test_reasons(attempt: AttemptRecord, reason: str) -> None:
    record = bad("a", attempt)
    if not record.attempts[0].status_reason:
        record = record.model_copy(update={"status_reason": ""})
    assert reason_of(record) == reason


def test_what_has_no_exit_code_of_failure_exits_with_the_code_to_try_again() -> None:
    for attempt in (tried(None, status_reason=HOST_TERMINATED), tried(0, status_reason=TIMED_OUT)):
        records = [bad("a", attempt), bad("b"), bad("c")]
        assert exit_code_of_cycle(ended(*records), records) == 75


def test_of_an_array_the_child_that_failed() -> None:
    children = good("b:0"), bad("b:1", tried(75), tried(65), stopped_at=4), good("b:2", stopped_at=9)
    record = array("b", "FAILED", *children, why="Array Child Job failed")
    assert exit_code(record) == 65
    assert reason_of(record) == "exit code 65 (DataError)"
    records = good("a"), record, bad("c", stopped_at=9)
    assert ended(*records).reason == "b: exit code 65 (DataError)"
    assert exit_code_of_cycle(ended(*records), records) == 65


def test_an_array_that_waits_in_vain_is_a_consequence() -> None:
    never = array("b", "FAILED", bad("b:0", stopped_at=1.0), bad("b:1", stopped_at=1.0), why="Dependent Job failed")
    assert ended(bad("a", tried(70), stopped_at=1.0), never, bad("c", stopped_at=1.0)).reason.startswith("a: ")


def test_nothing_ran_so_there_is_no_exit_code() -> None:
    assert exit_code(bad("a")) is None
    assert exit_code(under_way("a", "RUNNING", tried(75), tried(None, at=None))) is None


@pytest.mark.parametrize(
    "records",
    [
        [good("a"), bad("b", tried(143), why=BY_HAND), bad("c", why=BY_HAND, stopped_at=1.0)],
        [good("a"), bad("b", why=BY_HAND, stopped_at=3.0), bad("c", stopped_at=2.0)],
        [good("a"), bad("b", tried(0), why=BY_HAND), bad("c", why=BY_HAND)],
    ],
)
def test_cancelled(records: list[JobRecord]) -> None:
    closed = ended(*records)
    assert (closed.outcome, closed.reason.partition(", ")[0]) == ("cancelled", f"b: {BY_HAND}")
    assert exit_code_of_cycle(closed, records) == 143


def test_a_job_that_was_ended_because_of_a_failure_is_not_the_reason() -> None:
    """It may have no time of its end, or be ended before the failure is on record."""
    plan_ = plan(job("health"), job("prepare"), job("compile", "health", "prepare"))
    ended = bad("health", tried(143), why="no longer needed: prepare failed", stopped_at=1.0)
    records = [ended, bad("prepare", tried(65), stopped_at=3.0), bad("compile", stopped_at=0.0)]
    closed = outcome_of(plan_, records)
    assert closed is not None and (closed.outcome, closed.reason) == ("failed", "prepare: exit code 65 (DataError)")
    assert exit_code_of_cycle(closed, records) == 65


def test_a_failure_before_the_cancelling_stays_one() -> None:
    records = [bad("a", tried(65), stopped_at=1.0), bad("b"), bad("c", tried(143), why=BY_HAND, stopped_at=3.0)]
    assert ended(*records).outcome == "failed"


def test_a_half_submitted_cycle_is_open_until_it_is_cancelled() -> None:
    now = Closed(outcome="cancelled", at=20.0, reason=BY_HAND)
    for records in ([], [good("a")], [good("a"), bad("b", tried(65))]):
        assert outcome_of(PLAN, records) is None
        assert outcome_of(PLAN, records, cancelled=now) == now


def test_a_half_submitted_cycle_whose_jobs_were_cancelled_is_found_cancelled_by_anybody() -> None:
    records = [good("a"), bad("b", tried(143), why=BY_HAND, stopped_at=5.0)]
    closed = outcome_of(PLAN, records)
    assert closed == Closed(outcome="cancelled", at=5.0, reason=f"b: {BY_HAND}, exit code 143 (Preempted)")
    failed_first = [bad("a", tried(65), stopped_at=1.0), bad("b", why=BY_HAND)]
    assert ended(*failed_first).outcome == "cancelled"  # else it would stay open for ever


def test_a_whole_cycle_that_had_ended_when_it_was_cancelled_keeps_its_outcome() -> None:
    now = Closed(outcome="cancelled", at=20.0, reason=BY_HAND)
    assert ended(good("a"), good("b"), good("c"), cancelled=now).outcome == "succeeded"
    assert ended(good("a"), bad("b", tried(80)), bad("c"), cancelled=now).outcome == "refused"
