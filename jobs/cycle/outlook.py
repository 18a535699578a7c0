"""What a cycle will take, from what earlier ones took. Pure."""

import statistics
from collections.abc import Iterable, Mapping

from jobs.cycle.records import AttemptRecord, JobRecord
from jobs.plan.spec import CyclePlan


def run_seconds(record: JobRecord) -> float | None:
    """Of the try that succeeded; of an array the longest child. None when it did not succeed."""
    ends = [_seconds(leaf.attempts[-1]) for leaf in record.leaves() if leaf.attempts and leaf.state == "SUCCEEDED"]
    known = [seconds for seconds in ends if seconds is not None]
    return max(known) if known and len(known) == len([*record.leaves()]) else None


def expected_seconds(history: Iterable[Iterable[JobRecord]]) -> dict[str, float]:
    """Median seconds by job, over the cycles given; a job that never succeeded is missing."""
    seen: dict[str, list[float]] = {}
    for records in history:
        for record in records:
            if (seconds := run_seconds(record)) is not None:
                seen.setdefault(record.name, []).append(seconds)
    return {name: statistics.median(values) for name, values in seen.items()}


def critical_seconds(plan: CyclePlan, seconds: Mapping[str, float]) -> float | None:
    """From the first job to the end of the last, without waiting for machines; None when one is unknown."""
    ends: dict[str, float] = {}
    for job in plan.jobs:  # each after those it depends on
        if job.name not in seconds:
            return None
        ends[job.name] = seconds[job.name] + max((ends[one.job] for one in job.depends_on if one.job), default=0.0)
    return max(ends.values(), default=0.0)


def _seconds(attempt: AttemptRecord) -> float | None:
    if attempt.started_at is None or attempt.stopped_at is None:
        return None
    return attempt.stopped_at - attempt.started_at
