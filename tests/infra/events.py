"""Events of EventBridge and patterns for them: the part of its pattern language that ours use.

Source: EventBridge user guide, "Event patterns": every field of the pattern must be there with one of the values in
its list, `{"exists": false}` fits a field that is not there, `prefix` and `anything-but` one that is, and what a
pattern does not name does not matter.
"""

from collections.abc import Mapping
from typing import Any


def matches(pattern: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Raises ValueError for a filter that is not understood here."""
    return all(_fits(wanted, event.get(name), name in event) for name, wanted in pattern.items())


def _fits(wanted: Any, found: Any, is_there: bool) -> bool:
    if isinstance(wanted, Mapping):
        return matches(wanted, found if isinstance(found, Mapping) else {})
    return any(_fits_one(one, found, is_there) for one in wanted)


def _fits_one(wanted: Any, found: Any, is_there: bool) -> bool:
    if isinstance(wanted, Mapping):
        match dict(wanted):
            case {"exists": there, **rest} if not rest:
                return bool(there) == is_there
            case {"prefix": str(start), **rest} if not rest:
                return is_there and str(found).startswith(start)
            case {"anything-but": {"prefix": [*starts]}, **rest} if not rest:
                return is_there and not str(found).startswith(tuple(starts))
        raise ValueError(f"filter {dict(wanted)}")
    return is_there and wanted in (found if isinstance(found, list) else [found])


def job_event(
    status: str, queue: str, *, kind: str = "Batch Job State Change", source: str = "aws.batch", **detail: Any
) -> dict[str, Any]:
    """As AWS Batch sends it (its user guide, "Job state change events"): `detail` is like DescribeJobs."""
    job_id = "4c7599ae-0a82-49aa-ba5a-4727fcce14a8"
    arn = f"arn:aws:batch:us-west-2:123456789012:job/{job_id}"
    return {
        "version": "0",
        "id": "c8f9c4b5-76e5-d76a-f980-7011e206042b",
        "detail-type": kind,
        "source": source,
        "account": "123456789012",
        "time": "2026-11-20T02:03:04Z",
        "region": "us-west-2",
        "resources": [arn],
        "detail": {
            "jobArn": arn,
            "jobName": "relevance-2026-11-20-train",
            "jobId": job_id,
            "jobQueue": f"arn:aws:batch:us-west-2:123456789012:job-queue/{queue}",
            "status": status,
            "statusReason": "Essential container in task exited",
            "attempts": [],
            "createdAt": 1_763_600_000_000,
            "dependsOn": [],
            "jobDefinition": "arn:aws:batch:us-west-2:123456789012:job-definition/relevance-train:1",
            "tags": {"pipeline": "relevance", "cycle": "2026-11-20", "job": "train"},
            **detail,
        },
    }
