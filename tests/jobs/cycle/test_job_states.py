"""States, dependencies, arrays and attempts against the tables of AWS Batch, one row each; and how a cycle ended."""

import pytest

from jobs.cycle import job_states
from jobs.cycle.job_states import (
    EXITED,
    HOST_TERMINATED,
    INTERRUPTED,
    TASK_NOT_STARTED,
    TIMED_OUT,
    AttemptEnd,
    AttemptRecord,
    Cancel,
    Closed,
    JobRecord,
    JobState,
    Outcome,
    Task,
    advance_waiting_jobs,
    cause_text,
    exit_code,
    exit_code_of_cycle,
    first_failure,
    normalize_batch_records,
    outcome_of,
    reason_of,
    tasks_of,
    unneeded_jobs,
)
from jobs.plan.spec import JobSpec, Retry
from pipeline.core.errors import EXIT_TABLE, ExitRule
from tests.jobs.cycle.cases import job, plan
from tests.jobs.cycle.record_cases import array as array_record
from tests.jobs.cycle.record_cases import bad, good, tried, under_way

SUBMITTED, PENDING, RUNNABLE, STARTING, RUNNING, SUCCEEDED, FAILED, CANCELLED = JobState
RETRY = Retry.of(3)


def record(name: str, state: JobState, *attempts: AttemptRecord, why: str = "") -> JobRecord:
    return JobRecord(name=name, id=f"id-{name}", state=state, created_at=1.0, attempts=attempts, status_reason=why)


def array(name: str, size: int, *after: str) -> JobSpec:
    return job(name, *after, array_size=size)


def settled(jobs: list[JobSpec], now: dict[str, JobState]) -> dict[str, JobState]:
    """Names and states of all leaves when nothing more moves."""
    tasks = [task for one in jobs for task in tasks_of(one) if task.name in now]
    records = {task.name: record(task.name, now[task.name]) for task in tasks}
    while changed := advance_waiting_jobs(tasks, records, 2.0):
        records |= changed
    return {name: one.state for name, one in records.items()}


def test_a_job_with_dependencies_is_pending_first() -> None:
    tasks = [*tasks_of(job("a")), *tasks_of(job("b", "a"))]
    changed = advance_waiting_jobs(tasks, {"a": record("a", SUBMITTED), "b": record("b", SUBMITTED)}, 2.0)
    assert (changed["a"].state, changed["b"].state) == (RUNNABLE, PENDING)


@pytest.mark.parametrize(
    ("jobs", "now", "expected"),
    [
        *(
            ([job("a"), job("b"), job("c", "a", "b")], {"a": first, "b": second, "c": SUBMITTED}, last)
            for first, second, last in (
                (SUCCEEDED, SUCCEEDED, RUNNABLE),
                (SUCCEEDED, RUNNING, PENDING),
                (SUCCEEDED, FAILED, FAILED),
                (RUNNING, FAILED, FAILED),  # at once, while the other still runs
                (FAILED, FAILED, FAILED),
                (STARTING, SUCCEEDED, PENDING),
            )
        ),
        ([job("b", "a")], {"b": SUBMITTED}, RUNNABLE),  # a dependency of an earlier round has succeeded
        *(
            ([array("a", 2), job("b", "a")], {"a:0": first, "a:1": second, "b": PENDING}, last)
            for first, second, last in (
                (SUCCEEDED, RUNNING, PENDING),
                (FAILED, RUNNING, PENDING),  # the others continue
                (FAILED, SUCCEEDED, FAILED),
                (SUCCEEDED, SUCCEEDED, RUNNABLE),
            )
        ),
    ],
)
def test_success_of_all_is_required_and_one_failure_is_enough(
    jobs: list[JobSpec], now: dict[str, JobState], expected: JobState
) -> None:
    last = jobs[-1].name
    assert settled(jobs, now) == now | {last: expected}


def test_failure_goes_down_the_chain_with_its_cause() -> None:
    """The cause is the job that failed, not one that ended because of it."""
    states = {"prepare": FAILED, "health": CANCELLED, "compile": PENDING, "train": PENDING}
    tasks = [task for one in CYCLE for task in tasks_of(one)]
    records = {name: record(name, state) for name, state in states.items()}
    records["health"] = record("health", CANCELLED, why=FOR_PREPARE)
    changed = advance_waiting_jobs(tasks, records, 7.0)
    for name in ("compile", "train"):
        one = changed[name]
        assert (one.state, one.status_reason, one.stopped_at, one.attempts) == (
            *(FAILED, "not run: prepare failed", 7.0, ()),
        )
        assert job_states.change_line(one).split(maxsplit=1)[1] == "NOT RUN    prepare failed"


@pytest.mark.parametrize(
    ("children", "parent"),
    [
        ((SUBMITTED, SUBMITTED), SUBMITTED),
        ((PENDING, PENDING), PENDING),
        ((RUNNABLE, RUNNABLE), PENDING),  # a parent is never RUNNABLE or RUNNING
        ((RUNNING, FAILED), PENDING),
        ((SUCCEEDED, RUNNING), PENDING),
        ((SUCCEEDED, FAILED), FAILED),
        ((SUCCEEDED, SUCCEEDED), SUCCEEDED),
    ],
)
def test_an_array_shows_its_state_its_times_and_the_first_failure(
    children: tuple[JobState, ...], parent: JobState
) -> None:
    times = ({"started_at": 3.0, "stopped_at": 5.0}, {"started_at": 2.0, "stopped_at": 9.0})
    records = [
        record(f"a:{i}", state, why="why" if state is FAILED else "").model_copy(update=times[i])
        for i, state in enumerate(children)
    ]
    shown = job_states.parent_record(array("a", 2), "id", records)
    assert (shown.state, shown.id, shown.children) == (parent, "id", tuple(records))
    assert (shown.created_at, shown.started_at) == (1.0, 2.0)
    assert shown.stopped_at == (9.0 if parent.is_final else None)
    assert shown.status_reason == ("why" if parent is FAILED else "")


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
        (0, AttemptEnd(None, HOST_TERMINATED), RUNNABLE),
        (0, AttemptEnd(None, TASK_NOT_STARTED, "CannotStartContainerError: x"), RUNNABLE),
        (0, AttemptEnd(137, EXITED, "OutOfMemoryError: Container killed due to memory usage"), FAILED),
        *((0, AttemptEnd(code, reason), FAILED) for code in (0, 143) for reason in (TIMED_OUT, "a user's reason")),
        (0, AttemptEnd(143, INTERRUPTED), RUNNABLE),
        (2, AttemptEnd(143, INTERRUPTED), RUNNABLE),  # does not count
    ],
)
def test_after_an_attempt(earlier: int, end: AttemptEnd, state: JobState) -> None:
    interrupted = AttemptRecord(status_reason=INTERRUPTED)  # it leaves the number of tries as it was
    tries = (interrupted, *(AttemptRecord(exit_code=75, status_reason=EXITED) for _ in range(earlier)))
    now = record("a", RUNNING, *tries, AttemptRecord(started_at=2.0))
    after = job_states.record_after_attempt(now, RETRY, end, 9.0)
    last = after.attempts[-1]
    assert (after.state, last.stopped_at) == (state, 9.0)
    assert AttemptEnd(last.exit_code, last.status_reason, last.reason) == end
    assert after.status_reason == end.status_reason
    assert (after.stopped_at == 9.0) is state.is_final


FAILURE, RECLAIMED, HOST = (75, EXITED), (143, EXITED), (None, HOST_TERMINATED)


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        ((RECLAIMED, HOST, RECLAIMED, HOST), RUNNABLE),
        ((RECLAIMED, HOST, RECLAIMED, HOST, FAILURE), RUNNABLE),
        ((FAILURE, RECLAIMED, HOST, RECLAIMED, HOST, FAILURE), FAILED),
        ((FAILURE, RECLAIMED, HOST, RECLAIMED, HOST, RECLAIMED), FAILED),  # the fifth counts as an attempt
        ((RECLAIMED, RECLAIMED, (143, TIMED_OUT)), FAILED),
    ],
)
def test_preemptions_have_a_budget_of_their_own(ends: tuple[tuple[int | None, str], ...], state: JobState) -> None:
    retry, now = Retry.of(2, preemptions=4), record("a", RUNNABLE)
    for number, (code, reason) in enumerate(ends, 1):
        now = job_states.running_record(job_states.starting_record(now, ()), 2.0 * number)
        now = job_states.record_after_attempt(now, retry, AttemptEnd(code, reason), 2.0 * number + 1)
        assert number == len(ends) or now.state is RUNNABLE
    assert now.state is state


@pytest.mark.parametrize("retry", [RETRY, Retry.of(3, 0), Retry.of(3, 40)])
def test_a_policy_is_read_as_it_was_stored(retry: Retry) -> None:
    stored = retry.model_dump()
    assert Retry.model_validate(stored) == retry
    assert ("preemptions" in stored) == (retry != RETRY)  # plans of before have none


def test_who_is_tried_again_stands_at_the_front() -> None:
    tasks = [Task(job(name)) for name in "abcd"]
    again = {name: AttemptRecord(stopped_at=at) for name, at in (("b", 5.0), ("d", 6.0))}
    records = {name: record(name, RUNNABLE, *([again[name]] if name in again else [])) for name in "abcd"}
    assert [task.name for task in job_states.queue(tasks, records)] == ["d", "b", "a", "c"]
    records["d"] = record("d", RUNNING)
    assert [task.name for task in job_states.queue(tasks, records)] == ["b", "a", "c"]


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
    tasks = [task for one in jobs for task in tasks_of(one)]
    records = {task.name: record(task.name, states.get(task.name, PENDING)) for task in tasks}
    assert unneeded_jobs(tasks, records) == expected


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
    found = {one.name: one for one in normalize_batch_records(shape, of_batch, dict.fromkeys("bde", by_hand))}
    assert {name: (one.state, one.status_reason) for name, one in found.items() if name != "d"} == {
        "a": (FAILED, EXITED),
        "b": (CANCELLED, "cancelled: by hand"),
        "c": (FAILED, "not run: a failed"),
        "e": (CANCELLED, "cancelled: by hand"),
    }
    assert [child.state for child in found["d"].children] == [FAILED, CANCELLED]


# How a cycle ended.

PLAN = plan(job("a"), job("b", "a"), job("c", "b"))
OUT_OF_MEMORY = "OutOfMemoryError: Container killed due to memory usage"
BY_HAND = job_states.CANCELLED + "by hand"
NOW = Closed(outcome="cancelled", at=20.0, reason=BY_HAND)


def ended(*records: JobRecord, cancelled: Closed | None = None) -> tuple[str, str, int]:
    """Outcome, reason without the exit code's name, and exit code."""
    closed = outcome_of(PLAN, records, cancelled=cancelled)
    assert closed is not None
    return closed.outcome, closed.reason.partition(" (")[0], exit_code_of_cycle(closed, records)


@pytest.mark.parametrize("state", ["SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING"])
def test_a_cycle_under_way_has_not_ended(state: str) -> None:
    assert outcome_of(PLAN, [good("a"), good("b"), under_way("c", state)]) is None
    assert outcome_of(PLAN, [bad("a", tried(65)), bad("b"), under_way("c", state)]) is None
    assert outcome_of(PLAN, [bad("a", tried(143), why=BY_HAND), under_way("b", state)], cancelled=NOW) is None


@pytest.mark.parametrize("rule", EXIT_TABLE, ids=lambda rule: rule.name)
def test_the_first_failure_and_not_its_consequences_gives_reason_and_exit_code(rule: ExitRule) -> None:
    code = rule.exit_code
    records = good("a"), bad("b", tried(75), tried(code), stopped_at=8), bad("c", stopped_at=8)
    outcome: Outcome = "refused" if code == 80 else "failed"
    assert outcome_of(PLAN, records) == Closed(outcome=outcome, at=8, reason=f"b: exit code {code} ({rule.name})")
    assert ended(*records)[2] == code


OF_ARRAY = array_record("b", "FAILED", good("b:0"), bad("b:1", tried(75), tried(65), stopped_at=4), good("b:2"))
IN_VAIN = array_record(
    "b", "FAILED", bad("b:0", stopped_at=1.0), bad("b:1", stopped_at=1.0), why="Dependent Job failed"
)


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([good("a"), good("b"), good("c")], ("succeeded", "", 0)),
        # of two failures the earlier one, wherever it stands
        ([bad("a", tried(65), stopped_at=9.0), bad("b", tried(1), stopped_at=3.0)], ("failed", "b: exit code 1", 1)),
        ([good("a"), OF_ARRAY], ("failed", "b: exit code 65", 65)),
        ([bad("a", tried(70), stopped_at=1.0), IN_VAIN], ("failed", "a: exit code 70", 70)),
        # without an exit code of a failure: worth another try
        ([bad("a", tried(None, status_reason=HOST_TERMINATED)), bad("b")], ("failed", "a: Host EC2", 75)),
        ([bad("a", tried(0, status_reason=TIMED_OUT)), bad("b")], ("failed", f"a: {TIMED_OUT}, exit code 0", 75)),
        (
            [good("a"), bad("b", tried(143), why=BY_HAND), bad("c", why=BY_HAND, stopped_at=1.0)],
            ("cancelled", f"b: {BY_HAND}, exit code 143", 143),
        ),
        ([good("a"), bad("b", why=BY_HAND, stopped_at=3.0)], ("cancelled", f"b: {BY_HAND}", 143)),
        # a failure before the cancelling stays one
        (
            [bad("a", tried(65), stopped_at=1.0), bad("b"), bad("c", tried(143), why=BY_HAND, stopped_at=3.0)],
            ("failed", "a: exit code 65", 65),
        ),
        # a job that was ended because of a failure is not the reason, whatever is on record of its time
        (
            [bad("a", tried(143), why="no longer needed: b failed", stopped_at=1.0), bad("b", tried(65))],
            ("failed", "b: exit code 65", 65),
        ),
    ],
)
def test_how_a_cycle_ended(records: list[JobRecord], expected: tuple[str, str, int]) -> None:
    rest = [bad(name, stopped_at=9.0) for name in "bc" if name not in {one.name for one in records}]
    assert ended(*records, *rest) == expected
    assert first_failure([*records, *rest][::-1]) == first_failure([*records, *rest])


@pytest.mark.parametrize(
    ("attempt", "reason"),
    [
        (tried(None, status_reason=HOST_TERMINATED), HOST_TERMINATED),
        (tried(143, status_reason=TIMED_OUT), f"{TIMED_OUT}, exit code 143 (Preempted)"),
        (tried(137, reason=OUT_OF_MEMORY), f"{OUT_OF_MEMORY}, exit code 137"),
        (
            tried(None, status_reason=TASK_NOT_STARTED, reason="CannotPullContainerError: no such image"),
            "Task failed to start, CannotPullContainerError: no such image",
        ),
        (tried(None, status_reason=""), "no reason given"),
    ],
)
def test_reasons(attempt: AttemptRecord, reason: str) -> None:
    assert reason_of(record("a", FAILED, attempt, why=attempt.status_reason)) == reason


def test_nothing_ran_so_there_is_no_exit_code() -> None:
    assert exit_code(bad("a")) is None
    assert exit_code(under_way("a", "RUNNING", tried(75), tried(None, at=None))) is None


def test_a_half_submitted_cycle_is_open_until_it_is_cancelled() -> None:
    for records in ([], [good("a")], [good("a"), bad("b", tried(65))]):
        assert outcome_of(PLAN, records) is None
        assert outcome_of(PLAN, records, cancelled=NOW) == NOW
    assert ended(good("a"), bad("b", tried(143), why=BY_HAND))[0] == "cancelled", "found so by anybody"
    assert ended(bad("a", tried(65), stopped_at=1.0), bad("b", why=BY_HAND))[0] == "cancelled", "not open for ever"
    assert ended(good("a"), good("b"), good("c"), cancelled=NOW)[0] == "succeeded", "it had ended before"
    assert ended(good("a"), bad("b", tried(80)), bad("c"), cancelled=NOW)[0] == "refused"
