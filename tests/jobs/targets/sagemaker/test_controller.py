"""What is done for jobs that are to end before their time, from records and what was seen of tries. Pure."""

from collections.abc import Mapping

import pytest

from jobs.cycle.job_records import Cancel, JobRecord, JobState
from jobs.cycle.job_states import CANCELLED, EXITED, AttemptEnd, Leaf, leaves_of, new_record, running_record
from jobs.cycle.job_states import starting_record as started
from jobs.plan.spec import JobSpec
from jobs.targets.sagemaker.controller import LAG_S, Advance, Try, advance, observed_record
from jobs.targets.sagemaker.describe import QUEUED, Seen
from tests.jobs.cycle.cases import job

BY_HAND = Cancel(reason=CANCELLED + "by hand", at=100.0)
RUNNING = Seen(started_at=1.0)
STOPPED = Seen(started_at=1.0, ended_at=120.0, end=AttemptEnd(143, EXITED))
WAITS = Seen(is_queued=True, note=QUEUED)


def leaves(*jobs: JobSpec) -> list[Leaf]:
    return [leaf for one in jobs for leaf in leaves_of(one)]


def record(leaf: Leaf) -> JobRecord:
    """Of a job that may start."""
    return new_record(leaf, leaf.spec.name, 0.0).model_copy(update={"state": JobState.RUNNABLE})


def advanced(
    jobs: list[JobSpec], seen: Mapping[Try, Seen | None], cancelled: Mapping[str, Cancel], at: float = 200.0
) -> Advance:
    every = leaves(*jobs)
    states = {leaf.name: JobState.PENDING if leaf.spec.depends_on else JobState.RUNNABLE for leaf in every}
    records = {leaf.name: record(leaf).model_copy(update={"state": states[leaf.name]}) for leaf in every}
    return advance(every, records, seen, cancelled=cancelled, at=at)


def ends(found: Advance) -> dict[str, tuple[JobState, str]]:
    return {name: (one.state, one.status_reason) for name, one in found.records.items()}


CHAIN = [job("a"), job("b", "a"), job("c", "b"), job("e", "b", array_size=2)]


@pytest.mark.parametrize("seen", [STOPPED, None, WAITS, RUNNING])
def test_of_a_cancelled_cycle_every_job_says_so_and_none_that_a_dependency_failed(seen: Seen | None) -> None:
    """Whatever it waited for is cancelled with it, and has not failed."""
    every = [leaf.name for leaf in leaves(*CHAIN)]
    found = advanced(CHAIN, {("a", 1): seen}, dict.fromkeys(every, BY_HAND))
    cancelled = (JobState.CANCELLED, BY_HAND.reason)
    is_live = seen in (WAITS, RUNNING)
    assert ends(found) == dict.fromkeys(every, cancelled) | (
        {"a": (found.records["a"].state, found.records["a"].status_reason)} if is_live else {}
    )
    assert [(leaf.name, reason) for leaf, reason in found.stops] == ([("a", BY_HAND.reason)] if is_live else [])
    assert found.starts == ()


@pytest.mark.parametrize(("health", "stops"), [(RUNNING, ["health"]), (None, []), (WAITS, ["health"])])
def test_what_feeds_only_a_job_that_cannot_run_is_ended(health: Seen | None, stops: list[str]) -> None:
    jobs = [job("prepare"), job("health"), job("step"), job("compile", "prepare", "health")]
    failed = Seen(started_at=1.0, ended_at=50.0, end=AttemptEnd(65, EXITED))
    found = advanced(jobs, {("prepare", 1): failed, ("health", 1): health, ("step", 1): None}, {})
    reason = "no longer needed: prepare failed"
    assert [(leaf.name, why) for leaf, why in found.stops] == [(name, reason) for name in stops]
    assert [leaf.name for leaf in found.starts] == ["step"]
    assert ends(found)["compile"] == (JobState.FAILED, "not run: prepare failed")
    if not stops:
        assert ends(found)["health"] == (JobState.CANCELLED, reason)


@pytest.mark.parametrize("there", [RUNNING, WAITS])
def test_only_a_try_that_is_looked_for_and_not_there_is_started(there: Seen) -> None:
    found = advanced([job("made"), job("absent"), job("unknown")], {("made", 1): there, ("absent", 1): None}, {})
    assert [leaf.name for leaf in found.starts] == ["absent"]
    assert found.looks == (("unknown", 1),) and found.stops == ()


def test_a_try_that_ended_by_itself_before_it_was_cancelled_keeps_its_end() -> None:
    (leaf,) = leaves(job("a"))
    running = running_record(started(record(leaf), ["s"]), 1.0)

    def end(code: int, ended_at: float | None) -> JobRecord:
        one = Seen(started_at=1.0, ended_at=ended_at, end=AttemptEnd(code, EXITED))
        return observed_record(leaf, running, one, BY_HAND, 200.0)

    assert (end(65, 99.0).state, end(65, 99.0).status_reason) == (JobState.FAILED, EXITED)
    assert (end(65, 100.0).state, end(65, None).status_reason) == (JobState.CANCELLED, BY_HAND.reason)
    assert end(0, 120.0).state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    ("ended_at", "reason"), [(40.0, EXITED), (50.0, "no longer needed: prepare failed"), (60.0, None)]
)
def test_what_ended_before_the_failure_was_not_ended_for_it(ended_at: float, reason: str | None) -> None:
    """The first failure counts, and what has not failed says nothing of when."""
    prepare, step, *_ = every = leaves(job("prepare"), job("step"), job("health"), job("compile", "prepare", "health"))
    records = {leaf.name: record(leaf) for leaf in every[:3]} | {
        "compile": record(every[3]).model_copy(update={"state": JobState.PENDING})
    }
    for leaf, code, at in ((prepare, 65, 50.0), (step, 1, 90.0)):
        one = Seen(started_at=1.0, ended_at=at, end=AttemptEnd(code, EXITED))
        records[leaf.name] = observed_record(leaf, record(leaf), one, None, at)
    end = Seen(started_at=1.0, ended_at=ended_at, end=AttemptEnd(1, EXITED))
    found = advance(every, records, {("health", 1): end}, cancelled={}, at=200.0).records["health"]
    assert found.attempts[0].status_reason == (reason or "no longer needed: prepare failed")
    assert found.stopped_at == ended_at


@pytest.mark.parametrize(
    ("note", "at", "state"),
    [
        ("", 101.0, JobState.CANCELLED),  # it was never handed over
        (f"{QUEUED} ml", 101.0, JobState.RUNNABLE),  # it may be listed late
        (f"{QUEUED} ml", 100.0 + LAG_S, JobState.RUNNABLE),
        (f"{QUEUED} ml", 100.1 + LAG_S, JobState.CANCELLED),
    ],
)
def test_a_try_that_is_not_there_is_cancelled_once_no_lag_can_be_the_reason(
    note: str, at: float, state: JobState
) -> None:
    (leaf,) = leaves(job("a"))
    waiting = record(leaf).model_copy(update={"status_reason": note})
    found = advance([leaf], {"a": waiting}, {("a", 1): None}, cancelled={"a": BY_HAND}, at=at)
    assert found.records["a"].state is state
    assert (found.starts, found.stops) == ((), ())
    assert advance([leaf], {"a": waiting}, {}, cancelled={"a": BY_HAND}, at=1e9).records["a"].state is JobState.RUNNABLE


def test_a_try_that_vanished_before_it_began_is_made_again_and_one_that_succeeded_began() -> None:
    (leaf,) = leaves(job("a"))
    waiting = record(leaf)
    made = started(waiting, ["s"])
    vanished = advance([leaf], {"a": made}, {("a", 1): None}, cancelled={}, at=9.0)
    assert ([one.name for one in vanished.starts], vanished.stops) == (["a"], ())
    assert advance([leaf], {"a": made}, {}, cancelled={}, at=9.0).looks == (("a", 1),)
    again = made.model_copy(update={"state": JobState.RUNNABLE})
    assert advance([leaf], {"a": again}, {}, cancelled={}, at=9.0).looks == (("a", 2),)
    quick = Seen(ended_at=5.0, end=AttemptEnd(0, EXITED))
    done = observed_record(leaf, made, quick, None, 9.0)
    assert (done.state, done.started_at) == (JobState.SUCCEEDED, 5.0)
    unstarted = Seen(ended_at=5.0, end=AttemptEnd(None, "CapacityError"))
    assert observed_record(leaf, made, unstarted, None, 9.0).started_at is None


def test_what_waits_in_a_queue_stays_runnable_and_says_what_it_waits_for() -> None:
    (leaf,) = leaves(job("a"))
    waiting = record(leaf)
    queued = observed_record(leaf, waiting, WAITS, None, 9.0)
    assert (queued.state, queued.status_reason, queued.attempts) == (JobState.RUNNABLE, QUEUED, ())
    ended = Seen(is_queued=True, ended_at=7.0, end=AttemptEnd(None, "deleted"))
    gone = observed_record(leaf, waiting, ended, None, 9.0)
    assert (gone.state, gone.status_reason, gone.stopped_at) == (JobState.FAILED, "deleted", 7.0)
    assert observed_record(leaf, waiting, ended, BY_HAND, 9.0).status_reason == BY_HAND.reason
    timeless = Seen(is_queued=True, end=AttemptEnd(None, "deleted"))
    assert observed_record(leaf, waiting, timeless, None, 9.0).stopped_at == 9.0
    # between two tries Batch has it in its queue again, and our record still has the first as active
    active = started(waiting, ["s"])
    assert observed_record(leaf, active, WAITS, None, 9.0).state is JobState.STARTING
