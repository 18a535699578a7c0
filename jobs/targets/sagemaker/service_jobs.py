"""Training jobs as service jobs of AWS Batch: requests, the rules by which Batch tries again, and what it tells. Pure.

A service job is all tries of one leaf in one round. Batch starts them, each as a training job of its own name. It knows
no exit codes: its rules look at the beginning of the reason, where `trnjobs-entry` has put the code.

Sources: API reference of AWS Batch (SubmitServiceJob, DescribeServiceJob: milliseconds), its user guide (service jobs:
states, payload, retries; `AWSBatch`, the name in the payload and 32 characters name a training job).
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jobs.cycle.states import EXITED, AttemptEnd, Leaf, leaves_of
from jobs.plan.dag import Plan
from jobs.plan.spec import Retry
from jobs.targets.batch.limits import MAX_ATTEMPTS, MAX_RULES, MAX_SUBMIT_BYTES, SHARE
from jobs.targets.batch.placement import placement_of
from jobs.targets.sagemaker.controller import QUEUED
from jobs.targets.sagemaker.describe import Detail, Seen, failure_end, host_prefixes, seen_of
from jobs.targets.sagemaker.placement import sagemaker_placement_of
from jobs.targets.sagemaker.requests import MAX_PAYLOAD_NAME, Cycle, Request, direct_request, tags, training_job_request

TYPE = "SAGEMAKER_TRAINING"
RECEIVED = "Received status from SageMaker: "
"""Begins what SageMaker has said; other reasons are Batch's own."""
MAX_PAYLOAD_BYTES = 10 * 1024
_WITH_SAGEMAKER, _OVER = frozenset({"SCHEDULED", "STARTING", "RUNNING"}), frozenset({"SUCCEEDED", "FAILED"})


def service_job_request(cycle: Cycle, leaf: Leaf, round_: int) -> Request:
    """SubmitServiceJob. The same token for the same job: Batch makes it once.

    The time limit of a try is in the payload, and so SageMaker's, as without a queue.
    """
    plan, job, name = cycle.plan, leaf.spec, cycle.leaf_id(leaf, round_)
    where, of_batch = sagemaker_placement_of(plan, job), placement_of(plan, job)
    payload = training_job_request(cycle, leaf, name=cycle.payload_name(leaf, round_), attempt=None, starts=name)
    return {
        "jobName": name,
        "jobQueue": where.queue,
        "serviceJobType": TYPE,
        "serviceRequestPayload": json.dumps(payload, separators=(",", ":")),
        "shareIdentifier": of_batch.share_identifier,
        "schedulingPriority": of_batch.priority,
        "retryStrategy": {"attempts": job.retry.attempts, "evaluateOnExit": retry_rules(job.retry)},
        "tags": tags(plan, leaf),
        "clientToken": name,
    }


def sagemaker_requests(plan: Plan) -> list[Request]:
    """The first request of every job of a cycle, of an array that of each child, as if it were claimed at 1970."""
    cycle, shown = Cycle(plan, 0.0), list[Request]()
    for leaf in (leaf for job in plan.jobs for leaf in leaves_of(job)):
        if sagemaker_placement_of(plan, leaf.spec).queue:
            shown.append({"SubmitServiceJob": service_job_request(cycle, leaf, 1)})
        else:
            shown.append({"CreateTrainingJob": direct_request(cycle, leaf, 1, 1)})
    return shown


def retry_rules(retry: Retry) -> list[Request]:
    """The first that matches decides; without a match Batch would try again, so the last matches everything."""
    causes = [*(f"AlgorithmError: exit {code} " for code in retry.exit_codes), "InternalServerError", "CapacityError"]
    again = [{"action": "RETRY", "onStatusReason": f"{RECEIVED}{cause}*"} for cause in causes]
    return [*again, {"action": "EXIT", "onStatusReason": "*"}]


def service_job_problems(request: Request) -> Iterator[str]:
    """What Batch refuses, or takes and never runs; it does not look into the payload, and botocore has no bounds."""
    share, retry, payload = request["shareIdentifier"], request["retryStrategy"], request["serviceRequestPayload"]
    if not SHARE.match(share):
        yield f"share identifier {share!r}; expected letters and digits only, 1 to 255 (jobs.share_identifier)"
    if not 1 <= retry["attempts"] <= MAX_ATTEMPTS:
        yield f"{retry['attempts']} attempts; expected 1 to {MAX_ATTEMPTS}"
    if (number := len(retry["evaluateOnExit"])) > MAX_RULES:
        yield f"{number} retry rules; expected at most {MAX_RULES}"
    if (size := len(payload.encode())) > MAX_PAYLOAD_BYTES:
        yield f"a payload of {size:,} bytes; expected at most {MAX_PAYLOAD_BYTES:,} (command and environment)"
    if (size := len(json.dumps(request).encode())) > MAX_SUBMIT_BYTES:
        yield f"a SubmitServiceJob request of {size:,} bytes; expected at most {MAX_SUBMIT_BYTES:,}"
    name = json.loads(payload)["TrainingJobName"]
    if len(name) > MAX_PAYLOAD_NAME:
        yield f"training job name {name} of {len(name)} characters; expected at most {MAX_PAYLOAD_NAME}"


@dataclass(frozen=True)
class ServiceTry:
    """One try, as a service job tells of it. `again`: Batch goes on after it. Times are seconds since 1970."""

    training_job: str
    reason: str
    is_over: bool
    is_good: bool
    again: bool
    started_at: float | None
    stopped_at: float | None


def tries_of(detail: Detail) -> list[ServiceTry]:
    """In order. A training job that found no capacity is none: Batch drops it and waits again."""
    told, status = [*detail.get("attempts", ())], str(detail["status"])
    latest = detail.get("latestAttempt", {})
    if status in _WITH_SAGEMAKER | _OVER and _arn(latest) and _arn(latest) not in map(_arn, told):
        reason = detail.get("statusReason", "") if status in _OVER else ""
        told.append({**latest, "statusReason": reason, "stoppedAt": detail.get("stoppedAt")})
    made = []
    for number, one in enumerate(told, start=1):
        is_last = number == len(told)
        made.append(
            ServiceTry(
                training_job=_arn(one).rpartition("/")[2],
                reason=str(one.get("statusReason") or ""),
                is_over=not is_last or status not in _WITH_SAGEMAKER or bool(one.get("stoppedAt")),
                is_good=is_last and status == "SUCCEEDED",
                again=not (is_last and status in _OVER),
                started_at=_seconds(one.get("startedAt")),
                stopped_at=_seconds(one.get("stoppedAt")),
            )
        )
    return made


def queued(detail: Detail) -> Seen:
    """A service job between two tries, before the first, or one that ended without any."""
    reason = str(detail.get("statusReason") or "")
    if detail["status"] in _OVER:
        why = reason.removeprefix(RECEIVED) or "ended before it had a machine"
        return Seen(is_queued=True, ended_at=_seconds(detail.get("stoppedAt")), end=AttemptEnd(None, why))
    queue = str(detail["jobQueue"]).rpartition("/")[2]
    return Seen(is_queued=True, note=f"{QUEUED} {queue}{': ' if reason else ''}{reason}")


def seen_of_try(one: ServiceTry, training: Detail | None, *, num_nodes: int) -> Seen:
    """`training`: its training job, as SageMaker describes it; None where it does not (yet, or no more)."""
    name = str(training["TrainingJobName"]) if training else one.training_job  # an ARN may be in small letters
    streams = host_prefixes(name, num_nodes) if name else ()
    seen = seen_of(training, streams) if training else Seen(started_at=one.started_at, streams=streams)
    if not one.is_over:  # whether it was the last is Batch's to say
        return replace(seen, end=None, ended_at=None)
    ended_at = seen.ended_at if seen.end else one.stopped_at
    return replace(seen, end=_end(one, seen.end), ended_at=ended_at, note="", again=one.again)


def _end(one: ServiceTry, of_training: AttemptEnd | None) -> AttemptEnd:
    if one.is_good:
        return AttemptEnd(0, EXITED)
    is_batchs = bool(one.reason) and not one.reason.startswith(RECEIVED)
    if is_batchs and of_training and of_training.exit_code != 0:  # Batch has ended it
        return AttemptEnd(of_training.exit_code, one.reason, of_training.reason)
    if of_training:
        return of_training
    said = one.reason.removeprefix(RECEIVED)
    return AttemptEnd(None, said) if is_batchs else failure_end(said, said)


def _arn(one: Detail) -> str:
    return str(one.get("serviceResourceId", {}).get("value", ""))


def _seconds(milliseconds: float | None) -> float | None:
    return milliseconds / 1000 if milliseconds else None
