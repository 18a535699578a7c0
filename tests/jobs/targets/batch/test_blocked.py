"""Blocked queues: reasons in words, and patience before anything is done."""

import pytest

from jobs.cycle.job_records import JobRecord, JobState, Sighting
from jobs.targets.batch.blocked import BlockKind, block_lines, explain, overdue, watch

RESOURCES = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
UNKNOWN = "UNDETERMINED - Batch job is blocked, root cause is undetermined."
ALL = frozenset(BlockKind)


def record(name: str, reason: str, state: JobState = JobState.RUNNABLE, *children: JobRecord) -> JobRecord:
    return JobRecord(name=name, id=f"id-{name}", state=state, status_reason=reason, created_at=0.0, children=children)


@pytest.mark.parametrize(
    ("reason", "kind", "words"),
    [
        (CAPACITY, BlockKind.CAPACITY, "no such instances free"),
        ("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE", BlockKind.MISCONFIGURATION, "maxvCpus"),
        (RESOURCES, BlockKind.MISCONFIGURATION, "no instance type"),
        ("MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS", BlockKind.MISCONFIGURATION, "service role"),
        ("MISCONFIGURATION:SOMETHING_NEW", BlockKind.MISCONFIGURATION, "set up wrongly"),
        ("CAPACITY:SOMETHING_NEW", BlockKind.CAPACITY, "no capacity"),
        (UNKNOWN, BlockKind.UNDETERMINED, "does not know"),
        (f"{RESOURCES} - The job needs 129 vCPU", BlockKind.MISCONFIGURATION, "no instance type"),
        (f"Canceled by JobStateTimeLimit action due to reason: {CAPACITY}", BlockKind.CAPACITY, "no such instances"),
    ],
)
def test_reasons_in_words(reason: str, kind: BlockKind, words: str) -> None:
    block = explain(reason)
    assert block is not None
    assert (block.kind, words in block.words, bool(block.next_command)) == (kind, True, True)


@pytest.mark.parametrize("reason", ["", "Essential container in task exited", "Host EC2 (instance i-0) terminated."])
def test_other_reasons_are_no_block(reason: str) -> None:
    assert explain(reason) is None
    assert watch([record("train", reason)], [], 0.0) == ()


def test_first_sight_is_kept_while_the_reason_persists() -> None:
    seen = watch([record("train", RESOURCES)], [], 100.0)
    assert [(one.job, one.reason, one.since) for one in seen] == [("train", RESOURCES, 100.0)]
    assert watch([record("train", f"{RESOURCES} - more words")], seen, 200.0) == seen
    other = watch([record("train", CAPACITY)], seen, 200.0)
    assert [(one.reason, one.since) for one in other] == [(CAPACITY, 200.0)]
    assert watch([record("train", RESOURCES)], other, 300.0)[0].since == 300.0, "it was another reason in between"
    assert watch([record("train", RESOURCES, JobState.STARTING)], seen, 200.0) == ()
    assert watch([record("train", RESOURCES)], (), 300.0)[0].since == 300.0, "it had gone in between"


def test_another_attempt_to_submit_the_job_begins_anew() -> None:
    seen = watch([record("train", RESOURCES)], [], 100.0)
    again = record("train", RESOURCES).model_copy(update={"id": "another"})
    assert watch([again], seen, 200.0)[0].since == 200.0


def test_children_of_an_array_are_seen_one_by_one() -> None:
    children = (record("embed:0", "", JobState.RUNNING), record("embed:1", CAPACITY))
    (seen,) = watch([record("embed", CAPACITY, JobState.PENDING, *children)], [], 5.0)
    assert (seen.job, seen.id) == ("embed:1", "id-embed:1")


@pytest.mark.parametrize(
    ("reason", "age_s", "kinds", "acts"),
    [
        (RESOURCES, 899.0, ALL, False),
        (RESOURCES, 900.0, ALL, True),
        (RESOURCES, 0.0, ALL, False),
        (CAPACITY, 9000.0, ALL, True),
        (CAPACITY, 9000.0, frozenset({BlockKind.MISCONFIGURATION}), False),
        (UNKNOWN, 9000.0, frozenset({BlockKind.MISCONFIGURATION}), False),
    ],
)
def test_nothing_is_done_before_the_dwell_time(
    reason: str, age_s: float, kinds: frozenset[BlockKind], acts: bool
) -> None:
    seen = (Sighting(job="train", id="1", reason=reason, since=1000.0),)
    assert bool(overdue(seen, 1000.0 + age_s, 900.0, kinds)) is acts


def test_a_line_says_job_reason_age_and_next_command() -> None:
    (line,) = block_lines([Sighting(job="train", id="1", reason=CAPACITY, since=0.0)], 3600.0)
    assert line.startswith("train cannot start: EC2 has no such instances free")
    assert "(CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY, for 1h00m); next: wait" in line
