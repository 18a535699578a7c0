"""Jobs at the head of a queue that cannot start: why, in words, and since when.

AWS Batch writes the reason into statusReason of a RUNNABLE job (API reference, JobDetail.statusReason). While a compute
environment grows from nothing it may say for minutes that no instance fits, although one is booting; so nothing is done
on first sight.
"""

from collections.abc import Collection, Sequence

from jobs.cycle.job_records import JobRecord, JobState, Sighting
from pipeline.core.format import format_duration

NEVER_STARTS = "MISCONFIGURATION:"
"""Begins what waiting does not cure. Capacity comes back."""
_REASONS = {  # in our words, and what to do
    "CAPACITY:": ("there is no capacity for it", "wait; or add a zone, a reservation or a capacity block"),
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": (
        "it needs more vCPU than maxvCpus of any compute environment of the queue",
        "aws batch update-compute-environment --compute-resources maxvCpus=N, or fewer nodes in [jobs]",
    ),
    "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE": (
        "it needs more instances than the service environment of the queue has",
        "aws batch update-service-environment, or fewer nodes in [jobs]",
    ),
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": (
        "no instance type of the compute environments has the vCPU and memory it asks for",
        "ask for less in [jobs] (the agent keeps 4 % of the memory), then trnjobs submit",
    ),
    NEVER_STARTS: ("the queue or its compute environments are set up wrongly", "aws batch describe-job-queues"),
    "UNDETERMINED": ("AWS Batch does not know why it cannot start", "aws batch describe-job-queues"),
}


def reason_in(status_reason: str) -> str:
    """Return the word of the table in a status reason; empty if it tells of no block."""
    return next((word for word in _REASONS if word in status_reason), "")


def next_command(reason: str) -> str:
    return _REASONS[reason][1]


def blocked_sightings(records: Sequence[JobRecord], before: Collection[Sighting], now: float) -> tuple[Sighting, ...]:
    """Return the blocked jobs. The time of first sight is kept while the same job has the same reason."""
    since = {(one.id, one.reason): one.since for one in before}
    return tuple(
        Sighting(job=leaf.name, id=leaf.id, reason=reason, since=since.get((leaf.id, reason), now))
        for record in records
        for leaf in record.leaves()
        if leaf.state is JobState.RUNNABLE and (reason := reason_in(leaf.status_reason))
    )


def block_line(one: Sighting, now: float) -> str:
    words, command = _REASONS.get(one.reason) or ("its queue is blocked", "trnjobs status")
    return f"{one.job} cannot start: {words} ({one.reason}, for {format_duration(now - one.since)}); next: {command}"
