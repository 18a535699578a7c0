"""Blocked queues: the reason in words, and since when. What is done about it: test_records.py."""

from jobs.cycle.job_records import JobRecord, JobState
from jobs.targets.batch.blocked import blocked_sightings

RESOURCES = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
CAPACITY = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"


def record(reason: str, state: JobState = JobState.RUNNABLE, job_id: str = "1") -> JobRecord:
    return JobRecord(name="train", id=job_id, state=state, status_reason=reason, created_at=0.0)


def test_first_sight_is_kept_while_the_same_job_has_the_same_reason() -> None:
    seen = blocked_sightings([record(RESOURCES)], [], 100.0)
    assert blocked_sightings([record(f"{RESOURCES} - more words")], seen, 200.0) == seen
    other = blocked_sightings([record(CAPACITY)], seen, 200.0)
    for one, before in ((record(RESOURCES), other), (record(RESOURCES, job_id="2"), seen), (record(RESOURCES), ())):
        assert blocked_sightings([one], before, 300.0)[0].since == 300.0
    assert blocked_sightings([record(RESOURCES, JobState.STARTING)], seen, 200.0) == ()
