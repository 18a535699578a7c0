"""Jobs at the head of a queue that cannot start: why, in words, and since when.

AWS Batch writes the reason into statusReason of a RUNNABLE job. While a compute environment grows from nothing it may
say for minutes that no instance fits, although one is booting; so nothing is done on first sight.
Source of the reasons: the API reference of AWS Batch, JobDetail.statusReason.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from jobs.cycle.job_records import JobRecord, JobState, Sighting
from pipeline.core.format import format_duration


@dataclass(frozen=True)
class Block:
    """A reason of AWS Batch, known by a part of its text, in our words."""

    word: str
    words: str
    next_command: str


_NEVER_STARTS = "MISCONFIGURATION:"
"""What waiting does not cure. Capacity comes back."""
_QUEUE = "aws batch describe-job-queues --job-queues QUEUE"
_REASONS = (
    Block(
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
        "EC2 has no such instances free in the zone of the compute environment",
        "wait; or add a zone, a reservation or a capacity block to the compute environment",
    ),
    Block(
        "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
        "it needs more vCPU than maxvCpus of any compute environment of the queue",
        "aws batch update-compute-environment --compute-resources maxvCpus=N, or fewer nodes in [jobs]",
    ),
    Block(
        "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE",
        "it needs more instances than the service environment of the queue has",
        "aws batch update-service-environment, or fewer nodes in [jobs]",
    ),
    Block(
        "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
        "no instance type of the compute environments has the vCPU and memory it asks for",
        "ask for less in [jobs] (the agent keeps 4 % of the memory), then trnjobs submit",
    ),
    Block(
        "MISCONFIGURATION:SERVICE_ROLE_PERMISSIONS",
        "the service role of the compute environment lacks rights to start instances",
        "use the service-linked role AWSServiceRoleForBatch",
    ),
    Block(_NEVER_STARTS, "the queue or its compute environments are set up wrongly", _QUEUE),
    Block("CAPACITY:", "there is no capacity for it", "wait, or use another queue"),
    Block("UNDETERMINED", "AWS Batch does not know why it cannot start", _QUEUE),
)


def explain(status_reason: str) -> Block | None:
    """What a status reason says of a blocked queue; None when it says nothing of it."""
    return next((block for block in _REASONS if block.word in status_reason), None)


def blocked_sightings(records: Sequence[JobRecord], before: Collection[Sighting], now: float) -> tuple[Sighting, ...]:
    """Who is blocked now. The time of first sight is kept while the same job has the same reason."""
    since = {(one.id, one.reason): one.since for one in before}
    return tuple(
        # The word of the table, without the rest of the text, which may change from look to look.
        Sighting(job=leaf.name, id=leaf.id, reason=block.word, since=since.get((leaf.id, block.word), now))
        for record in records
        for leaf in record.leaves()
        if leaf.state is JobState.RUNNABLE and (block := explain(leaf.status_reason))
    )


def overdue(sightings: Sequence[Sighting], now: float, dwell_s: float) -> tuple[Sighting, ...]:
    """Those that never start, and have been seen for `dwell_s`."""
    return tuple(one for one in sightings if one.reason.startswith(_NEVER_STARTS) and now - one.since >= dwell_s)


def block_lines(sightings: Sequence[Sighting], now: float) -> Iterator[str]:
    for one in sightings:
        if block := explain(one.reason):
            yield (
                f"{one.job} cannot start: {block.words} ({one.reason}, for {format_duration(now - one.since)}); "
                f"next: {block.next_command}"
            )
