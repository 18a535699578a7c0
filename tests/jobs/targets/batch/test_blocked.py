"""Blocked queues: reasons in words, and patience before anything is done."""

import pytest

from jobs.cycle.job_records import JobRecord, JobState, Sighting
from jobs.targets.batch.blocked import block_lines, blocked_sightings, explain, overdue

RESOURCES = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"
UNKNOWN = "UNDETERMINED - Batch job is blocked, root cause is undetermined."


def record(name: str, reason: str, state: JobState = JobState.RUNNABLE, *children: JobRecord) -> JobRecord:
    return JobRecord(name=name, id=f"id-{name}", state=state, status_reason=reason, created_at=0.0, children=children)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (CAPACITY, "no such instances free"),
        ("MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE", "maxvCpus"),
        (RESOURCES, "no instance type"),
        ("MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS", "service role"),
        ("MISCONFIGURATION:SOMETHING_NEW", "set up wrongly"),
        ("CAPACITY:SOMETHING_NEW", "no capacity"),
        (UNKNOWN, "does not know"),
        (f"{RESOURCES} - The job needs 129 vCPU", "no instance type"),
        (f"Canceled by JobStateTimeLimit action due to reason: {CAPACITY}", "no such instances"),
    ],
)
def test_reasons_in_words(reason: str, words: str) -> None:
    block = explain(reason)
    assert block is not None
    assert words in block.words and block.next_command


def test_first_sight_is_kept_while_the_reason_persists() -> None:
    seen = blocked_sightings([record("train", RESOURCES)], [], 100.0)
    assert [(one.job, one.reason, one.since) for one in seen] == [("train", RESOURCES, 100.0)]
    assert blocked_sightings([record("train", f"{RESOURCES} - more words")], seen, 200.0) == seen
    other = blocked_sightings([record("train", CAPACITY)], seen, 200.0)
    assert [(one.reason, one.since) for one in other] == [(CAPACITY, 200.0)]
    assert blocked_sightings([record("train", RESOURCES)], other, 300.0)[0].since == 300.0, (
        "it was another reason in between"
    )
    assert blocked_sightings([record("train", RESOURCES, JobState.STARTING)], seen, 200.0) == ()
    assert blocked_sightings([record("train", RESOURCES)], (), 300.0)[0].since == 300.0, "it had gone in between"


@pytest.mark.parametrize(
    ("reason", "age_s", "acts"),
    [
        (RESOURCES, 899.0, False),
        (RESOURCES, 900.0, True),
        (RESOURCES, 0.0, False),
        (CAPACITY, 9000.0, False),
        (UNKNOWN, 9000.0, False),
    ],
)
def test_what_never_starts_is_overdue_after_the_dwell_time(reason: str, age_s: float, acts: bool) -> None:
    seen = blocked_sightings([record("train", reason)], [], 1000.0)
    assert bool(overdue(seen, 1000.0 + age_s, 900.0)) is acts


def test_a_line_says_job_reason_age_and_next_command() -> None:
    (line,) = block_lines([Sighting(job="train", id="1", reason=CAPACITY, since=0.0)], 3600.0)
    assert line.startswith("train cannot start: EC2 has no such instances free")
    assert "(CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY, for 1h00m); next: wait" in line
