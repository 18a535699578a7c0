"""States, dependencies, arrays and attempts against the tables of AWS Batch, one row each."""

import pytest

from jobs.cycle import job_states
from jobs.cycle.job_records import AttemptRecord, Cancel, JobRecord, JobState
from jobs.cycle.job_states import (
    EXITED,
    INTERRUPTED,
    AttemptEnd,
    Leaf,
    advance_waiting_jobs,
    cause_text,
    in_our_words,
    leaves_of,
    unneeded_jobs,
)
from jobs.plan.spec import JobSpec, Retry
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.record_cases import array as array_record
from tests.jobs.cycle.record_cases import bad, tried

SUBMITTED, PENDING, RUNNABLE, STARTING, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobState
RETRY = Retry.of(3)


def record(name: str, state: JobState, *attempts: AttemptRecord) -> JobRecord:
    return JobRecord(name=name, id=f"id-{name}", state=state, created_at=1.0, attempts=attempts)


def array(name: str, size: int, *after: str) -> JobSpec:
    return job(name, *after, array_size=size)


def settled(jobs: list[JobSpec], now: dict[str, JobState]) -> dict[str, JobState]:
    """Names and states of all leaves when nothing more moves."""
    leaves = [leaf for one in jobs for leaf in leaves_of(one)]
    records = {leaf.name: record(leaf.name, now[leaf.name]) for leaf in leaves if leaf.name in now}
    leaves = [leaf for leaf in leaves if leaf.name in records]
    while changed := advance_waiting_jobs(leaves, records, 2.0):
        records |= changed
    return {name: one.state for name, one in records.items()}


def test_a_job_without_dependencies_skips_pending() -> None:
    leaves = leaves_of(job("a"))
    changed = advance_waiting_jobs(leaves, {"a": record("a", SUBMITTED)}, 2.0)
    assert changed["a"].state is RUNNABLE


def test_a_job_with_dependencies_is_pending_first() -> None:
    leaves = [*leaves_of(job("a")), *leaves_of(job("b", "a"))]
    records = {"a": record("a", SUCCEEDED), "b": record("b", SUBMITTED)}
    changed = advance_waiting_jobs(leaves, records, 2.0)
    assert changed["b"].state is PENDING
    assert advance_waiting_jobs(leaves, records | changed, 2.0)["b"].state is RUNNABLE


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (SUCCEEDED, SUCCEEDED, RUNNABLE),
        (SUCCEEDED, RUNNING, PENDING),
        (SUCCEEDED, FAILED, FAILED),
        (RUNNING, FAILED, FAILED),  # at once, while the other still runs
        (FAILED, FAILED, FAILED),
        (STARTING, SUCCEEDED, PENDING),
    ],
)
def test_success_of_all_is_required_and_one_failure_is_enough(
    first: JobState, second: JobState, expected: JobState
) -> None:
    found = settled([job("a"), job("b"), job("c", "a", "b")], {"a": first, "b": second, "c": SUBMITTED})
    assert found == {"a": first, "b": second, "c": expected}


def test_failure_goes_down_the_chain_with_its_reason() -> None:
    leaves = [leaf for one in (job("a"), job("b", "a"), job("c", "b")) for leaf in leaves_of(one)]
    records = {"a": record("a", FAILED), "b": record("b", PENDING), "c": record("c", PENDING)}
    changed = advance_waiting_jobs(leaves, records, 7.0)
    for name in ("b", "c"):
        assert (changed[name].state, changed[name].status_reason) == (FAILED, "not run: a failed")
        assert changed[name].stopped_at == 7.0
        assert changed[name].attempts == ()


def test_a_dependency_of_an_earlier_round_has_succeeded() -> None:
    assert settled([job("b", "a")], {"b": SUBMITTED}) == {"b": RUNNABLE}


def test_a_dependency_on_an_array_waits_for_all_of_it() -> None:
    jobs = [array("a", 2), job("b", "a")]
    assert settled(jobs, {"a:0": SUCCEEDED, "a:1": RUNNING, "b": PENDING})["b"] is PENDING
    assert settled(jobs, {"a:0": FAILED, "a:1": RUNNING, "b": PENDING})["b"] is PENDING  # the others continue
    assert settled(jobs, {"a:0": FAILED, "a:1": SUCCEEDED, "b": PENDING})["b"] is FAILED
    assert settled(jobs, {"a:0": SUCCEEDED, "a:1": SUCCEEDED, "b": PENDING})["b"] is RUNNABLE


@pytest.mark.parametrize(
    ("children", "parent"),
    [
        ((SUBMITTED, SUBMITTED), SUBMITTED),
        ((PENDING, PENDING), PENDING),
        ((RUNNABLE, RUNNABLE), PENDING),  # a parent is never RUNNABLE or RUNNING
        ((RUNNING, STARTING), PENDING),
        ((RUNNING, FAILED), PENDING),
        ((SUCCEEDED, RUNNING), PENDING),
        ((SUCCEEDED, FAILED), FAILED),
        ((SUCCEEDED, SUCCEEDED), SUCCEEDED),
    ],
)
def test_the_state_of_an_array(children: tuple[JobState, ...], parent: JobState) -> None:
    shown = job_states.parent_record(array("a", 2), "id", [record(f"a:{i}", one) for i, one in enumerate(children)])
    assert (shown.state, shown.id, len(shown.children)) == (parent, "id", 2)


def test_an_array_shows_its_times_and_the_first_failure() -> None:
    ran = {"started_at": 3.0, "stopped_at": 5.0}
    children = [
        record("a:0", SUCCEEDED).model_copy(update=ran),
        record("a:1", FAILED).model_copy(update={"started_at": 2.0, "stopped_at": 9.0, "status_reason": "why"}),
    ]
    shown = job_states.parent_record(array("a", 2), "id", children)
    assert (shown.created_at, shown.started_at, shown.stopped_at, shown.status_reason) == (1.0, 2.0, 9.0, "why")


@pytest.mark.parametrize(
    ("earlier", "end", "state"),
    [
        (0, AttemptEnd(0, EXITED), SUCCEEDED),
        (0, AttemptEnd(1, EXITED), FAILED),
        (0, AttemptEnd(80, EXITED), FAILED),
        (0, AttemptEnd(75, EXITED), RUNNABLE),
        (0, AttemptEnd(143, EXITED), RUNNABLE),
        (1, AttemptEnd(75, EXITED), RUNNABLE),
        (2, AttemptEnd(75, EXITED), FAILED),  # three attempts in all
        (2, AttemptEnd(0, EXITED), SUCCEEDED),
        (0, AttemptEnd(None, "Host EC2 (local) terminated."), RUNNABLE),
        (0, AttemptEnd(None, "Task failed to start", "CannotStartContainerError: x"), RUNNABLE),
        (0, AttemptEnd(137, EXITED, "OutOfMemoryError: Container killed due to memory usage"), FAILED),
        (0, AttemptEnd(143, "Job attempt duration exceeded timeout"), FAILED),
        (0, AttemptEnd(0, "Job attempt duration exceeded timeout"), FAILED),
        (0, AttemptEnd(143, "a user's reason"), FAILED),
        (0, AttemptEnd(0, "a user's reason"), FAILED),
        (0, AttemptEnd(143, INTERRUPTED), RUNNABLE),
        (2, AttemptEnd(143, INTERRUPTED), RUNNABLE),  # does not count
    ],
)
def test_after_an_attempt(earlier: int, end: AttemptEnd, state: JobState) -> None:
    tries = tuple(AttemptRecord(exit_code=75, status_reason=EXITED) for _ in range(earlier))
    now = record("a", RUNNING, *tries, AttemptRecord(started_at=2.0))
    after = job_states.record_after_attempt(now, RETRY, end, 9.0)
    assert after.state is state
    assert after.attempts[-1].stopped_at == 9.0
    assert (after.attempts[-1].exit_code, after.attempts[-1].reason) == (end.exit_code, end.reason)
    assert after.status_reason == after.attempts[-1].status_reason == end.status_reason
    assert (after.stopped_at == 9.0) is state.is_final


def test_interrupted_attempts_leave_the_number_of_tries_as_it_was() -> None:
    now = record("a", RUNNING, AttemptRecord(status_reason=INTERRUPTED), AttemptRecord(status_reason=INTERRUPTED))
    for expected in (RUNNABLE, RUNNABLE, FAILED):
        now = job_states.record_after_attempt(
            now.model_copy(update={"state": RUNNING, "attempts": (*now.attempts, AttemptRecord())}),
            RETRY,
            AttemptEnd(75, EXITED),
            9.0,
        )
        assert now.state is expected
    assert len(now.attempts) == 5


def test_who_is_tried_again_stands_at_the_front() -> None:
    leaves = [Leaf(job(name)) for name in "abcd"]
    again = {name: AttemptRecord(stopped_at=at) for name, at in (("b", 5.0), ("d", 6.0))}
    records = {name: record(name, RUNNABLE, *([again[name]] if name in again else [])) for name in "abcd"}
    assert [leaf.name for leaf in job_states.queue(leaves, records)] == ["d", "b", "a", "c"]
    records["d"] = record("d", RUNNING)
    assert [leaf.name for leaf in job_states.queue(leaves, records)] == ["b", "a", "c"]


def unneeded(jobs: list[JobSpec], states: dict[str, JobState], reasons: dict[str, str] | None = None) -> dict[str, str]:
    leaves = [leaf for one in jobs for leaf in leaves_of(one)]
    why = reasons or {}
    records = {
        leaf.name: record(leaf.name, states.get(leaf.name, PENDING)).model_copy(
            update={"status_reason": why.get(leaf.name, "")}
        )
        for leaf in leaves
    }
    return unneeded_jobs(leaves, records)


CYCLE = [job("prepare"), job("health"), job("compile", "prepare", "health"), job("train", "compile")]
FOR_PREPARE = "no longer needed: prepare failed"


@pytest.mark.parametrize(
    ("jobs", "states", "expected"),
    [
        (CYCLE, {"prepare": RUNNING, "health": RUNNING}, {}),
        (CYCLE, {"prepare": FAILED, "health": SUCCEEDED}, {}),
        *((CYCLE, {"prepare": FAILED, "health": state}, {"health": FOR_PREPARE}) for state in (RUNNABLE, RUNNING)),
        (CYCLE, {"prepare": RUNNING, "health": FAILED}, {"prepare": "no longer needed: health failed"}),
        # by a chain: none of them will be used
        (
            [job("prepare"), job("a"), array("b", 2, "a"), job("c", "b", "prepare")],
            {"prepare": FAILED, "a": RUNNING},
            {"a": FOR_PREPARE, "b:0": FOR_PREPARE, "b:1": FOR_PREPARE},
        ),
        # a job that no other waits for, and what feeds it, is what somebody wants
        ([job("prepare"), job("step")], {"prepare": FAILED, "step": RUNNING}, {}),
        ([job("prepare"), job("a"), job("step", "a"), job("c", "a", "prepare")], {"prepare": FAILED, "a": RUNNING}, {}),
        # the other children of an array go on, and what only feeds what comes after it is of no use
        (
            [array("e", 2), job("health"), job("z", "e", "health")],
            {"e:0": FAILED, "e:1": RUNNING, "health": RUNNING},
            {"health": "no longer needed: e failed"},
        ),
    ],
)
def test_what_feeds_only_jobs_that_cannot_run_is_of_no_use(
    jobs: list[JobSpec], states: dict[str, JobState], expected: dict[str, str]
) -> None:
    assert unneeded(jobs, states) == expected


def test_the_cause_is_the_job_that_failed_and_not_one_that_ended_because_of_it() -> None:
    states = {"prepare": FAILED, "health": CANCELLED, "compile": PENDING, "train": PENDING}
    leaves = [leaf for one in CYCLE for leaf in leaves_of(one)]
    records = {leaf.name: record(leaf.name, states[leaf.name]) for leaf in leaves}
    records["health"] = records["health"].model_copy(update={"status_reason": FOR_PREPARE})
    changed = advance_waiting_jobs(leaves, records, 7.0)
    assert {name: one.status_reason for name, one in changed.items()} == dict.fromkeys(
        ("compile", "train"), "not run: prepare failed"
    )


@pytest.mark.parametrize(
    ("failed", "words"),
    [
        (bad("train", tried(1)), "train failed"),
        (bad("evaluate", tried(80)), "evaluate refused the model"),
        (bad("train", tried(143), why="cancelled: by hand"), "train was cancelled"),
        (bad("embed:3", tried(65)), "embed failed"),
    ],
)
def test_why_a_job_was_not_run(failed: JobRecord, words: str) -> None:
    assert cause_text([failed]) == words


def test_what_aws_batch_calls_failed_has_our_states_and_reasons() -> None:
    """By our own record of what was cancelled, whatever AWS Batch says of it; what had failed before stays FAILED."""
    shape = plan(job("a"), job("b"), job("c", "a"), array("d", 2), job("e", "d"))
    of_batch = [
        bad("a", tried(1), stopped_at=5.0),
        bad("b", tried(143), why="Host EC2 terminated", stopped_at=20.0),
        bad("c", why="Dependent Job failed", stopped_at=6.0),
        array_record("d", "FAILED", bad("d:0", tried(1), stopped_at=5.0), bad("d:1", tried(143), stopped_at=20.0)),
        bad("e", why="a user's words", stopped_at=20.0),
    ]
    by_hand = Cancel(reason="cancelled: by hand", at=10.0)
    found = {one.name: one for one in in_our_words(shape, of_batch, dict.fromkeys("bde", by_hand))}
    assert {name: (one.state, one.status_reason) for name, one in found.items() if name in "abc"} == {
        "a": (FAILED, "Essential container in task exited"),
        "b": (CANCELLED, "cancelled: by hand"),
        "c": (FAILED, "not run: a failed"),
    }
    assert [child.state for child in found["d"].children] == [FAILED, CANCELLED]
    assert (found["e"].state, found["e"].status_reason) == (CANCELLED, "cancelled: by hand")
