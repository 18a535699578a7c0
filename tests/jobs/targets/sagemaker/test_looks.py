"""What is done for jobs that are to end before their time, from records and what was seen of attempts. Pure."""

from collections.abc import Mapping

import pytest

from jobs.cycle.job_states import (
    CANCELLED,
    EXITED,
    AttemptEnd,
    Cancel,
    JobRecord,
    JobState,
    Leaf,
    leaves_of,
    new_record,
    running_record,
)
from jobs.cycle.job_states import starting_record as started
from jobs.plan.spec import JobSpec
from jobs.targets.sagemaker.describe import QUEUED, Seen
from jobs.targets.sagemaker.target import LAG_S, Look, looked, observed_record
from tests.jobs.cycle.cases import job

BY_HAND = Cancel(reason=CANCELLED + "by hand", at=100.0)
RUNNING = Seen(started_at=1.0)
STOPPED = Seen(started_at=1.0, ended_at=120.0, end=AttemptEnd(143, EXITED))
WAITS = Seen(is_queued=True, note=QUEUED)


def record(leaf: Leaf, state: JobState = JobState.RUNNABLE, reason: str = "") -> JobRecord:
    return new_record(leaf, leaf.spec.name, 0.0).model_copy(update={"state": state, "status_reason": reason})


def found(
    jobs: list[JobSpec], seen: Mapping[str, Seen], cancelled: Mapping[str, Cancel], *, at: float = 200.0, note: str = ""
) -> Look:
    """`seen`: of the attempts that exist."""
    leaves = [leaf for one in jobs for leaf in leaves_of(one)]
    states = {leaf.name: JobState.PENDING if leaf.spec.depends_on else JobState.RUNNABLE for leaf in leaves}
    records = {leaf.name: record(leaf, states[leaf.name], note) for leaf in leaves}
    return looked(leaves, records, lambda leaf, attempt: seen.get(leaf.name), cancelled=cancelled, at=at)


@pytest.mark.parametrize("seen", [STOPPED, None, WAITS, RUNNING])
def test_of_a_cancelled_cycle_every_job_says_so_and_none_that_a_dependency_failed(seen: Seen | None) -> None:
    """Whatever it waited for is cancelled with it, and has not failed."""
    names = ["a", "b", "c", "e:0", "e:1"]
    jobs = [job("a"), job("b", "a"), job("c", "b"), job("e", "b", array_size=2)]
    after = found(jobs, {"a": seen} if seen else {}, dict.fromkeys(names, BY_HAND))
    is_live = seen in (WAITS, RUNNING)
    ends = {name: (one.state, one.status_reason) for name, one in after.records.items() if name != "a" or not is_live}
    assert ends == dict.fromkeys(ends, (JobState.CANCELLED, BY_HAND.reason))
    assert [(leaf.name, reason) for leaf, reason in after.stops] == ([("a", BY_HAND.reason)] if is_live else [])
    assert after.starts == ()


@pytest.mark.parametrize(("health", "stops"), [(RUNNING, ["health"]), (None, []), (WAITS, ["health"])])
def test_what_feeds_only_a_job_that_cannot_run_is_ended(health: Seen | None, stops: list[str]) -> None:
    jobs = [job("prepare"), job("health"), job("step"), job("compile", "prepare", "health")]
    failed = Seen(started_at=1.0, ended_at=50.0, end=AttemptEnd(65, EXITED))
    after = found(jobs, {"prepare": failed} | ({"health": health} if health else {}), {})
    reason = "no longer needed: prepare failed"
    assert [(leaf.name, why) for leaf, why in after.stops] == [(name, reason) for name in stops]
    assert [leaf.name for leaf in after.starts] == ["step"]
    assert after.records["compile"].status_reason == "not run: prepare failed"


@pytest.mark.parametrize(
    ("code", "ended_at", "state"),
    [
        (65, 99.0, JobState.FAILED),
        (65, 100.0, JobState.CANCELLED),
        (65, None, JobState.CANCELLED),
        (0, 120.0, JobState.SUCCEEDED),
    ],
)
def test_an_attempt_that_ended_by_itself_before_it_was_cancelled_keeps_its_end(
    code: int, ended_at: float | None, state: JobState
) -> None:
    leaf = Leaf(job("a"))
    running = running_record(started(record(leaf), ["s"]), 1.0)
    one = Seen(started_at=1.0, ended_at=ended_at, end=AttemptEnd(code, EXITED))
    assert observed_record(leaf, running, one, BY_HAND, 200.0).state is state


@pytest.mark.parametrize(
    ("note", "at", "state"),
    [
        ("", 101.0, JobState.CANCELLED),  # it was never handed over
        (f"{QUEUED} ml", 100.0 + LAG_S, JobState.RUNNABLE),  # it may be listed late
        (f"{QUEUED} ml", 100.1 + LAG_S, JobState.CANCELLED),
    ],
)
def test_an_attempt_that_is_not_there_is_cancelled_once_no_lag_can_be_the_reason(
    note: str, at: float, state: JobState
) -> None:
    after = found([job("a")], {}, {"a": BY_HAND}, at=at, note=note)
    assert (after.records["a"].state, after.starts, after.stops) == (state, (), ())


def test_what_waits_in_a_queue_stays_runnable_and_what_vanished_before_it_began_is_made_again() -> None:
    after = found([job("a"), job("b")], {"a": WAITS}, {})
    assert (after.records["a"].state, after.records["a"].status_reason) == (JobState.RUNNABLE, QUEUED)
    assert [leaf.name for leaf in after.starts] == ["b"]
    leaf = Leaf(job("a"))
    made = started(record(leaf), ["s"])
    vanished = looked([leaf], {"a": made}, lambda leaf, attempt: None, cancelled={}, at=9.0)
    assert ([one.name for one in vanished.starts], vanished.stops) == (["a"], ())
    done = observed_record(leaf, made, Seen(ended_at=5.0, end=AttemptEnd(0, EXITED)), None, 9.0)
    assert (done.state, done.started_at) == (JobState.SUCCEEDED, 5.0)
    # Between two attempts Batch has it in its queue again, and our record still has the first as active.
    assert observed_record(leaf, made, WAITS, None, 9.0).state is JobState.STARTING
