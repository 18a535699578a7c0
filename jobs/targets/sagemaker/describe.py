"""What SageMaker says of a training job, and AWS Batch of a service job, in the words of our records. Pure.

Values that SageMaker may add later are allowed for: an unknown secondary status is one of a job that runs.

Sources: API reference of SageMaker, DescribeTrainingJob (status, secondary status, failure reason); the form of a
failure reason as it is found in public reports (`AlgorithmError: <failure file>, exit code: 1`); API reference of AWS
Batch, DescribeServiceJob (milliseconds).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jobs.cycle.job_states import EXITED, SERVICE_FAULT, TASK_NOT_STARTED, TIMED_OUT, AttemptEnd
from jobs.targets.base import seconds_of
from pipeline.core.errors import EXIT_BUG, Preempted

Detail = Mapping[str, Any]
"""One training job as SageMaker describes it."""

_BEFORE_THE_CODE = frozenset(
    {"Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Downloading", "DownloadingTrainingImage"}
)
_WORTH_SAYING = frozenset({"Pending", "Interrupted", "Restarting"})
_OUR_CODE = re.compile(r"AlgorithmError:\s*exit (\d{1,3})\b")
_DOCKERS_CODE = re.compile(r"exit code:\s*(\d{1,3})\W*$")
MAX_WORDS = 300
QUEUED = "in queue"
"""Begins the reason of a job that was handed over to a queue and waits there."""
RECEIVED = "Received status from SageMaker: "
"""Begins what SageMaker has said of a service job; other reasons are Batch's own."""
_WITH_SAGEMAKER, _OVER = frozenset({"SCHEDULED", "STARTING", "RUNNING"}), frozenset({"SUCCEEDED", "FAILED"})


@dataclass(frozen=True)
class Seen:
    """One try. `end`: None while it is under way. `note`: what it waits for, if it does.

    `streams`: what the names of its log streams begin with, by node; none: not known (yet). `again`: whether the
    platform tries again by itself; None: we decide. `is_queued`: it was handed over, and no machine has it (yet).
    """

    started_at: float | None = None
    ended_at: float | None = None
    end: AttemptEnd | None = None
    billable_s: float | None = None
    note: str = ""
    streams: tuple[str, ...] = ()
    again: bool | None = None
    is_queued: bool = False


def host_prefixes(training_job: str, num_nodes: int) -> tuple[str, ...]:
    """By node: hosts are numbered from 1, and nodes follow the order of their names as text (jobs/node/sagemaker.py).

    Source: SageMaker developer guide, log groups and streams: `<training job>/algo-<number>-<seconds>`.
    """
    return tuple(f"{training_job}/{host}-" for host in sorted(f"algo-{n + 1}" for n in range(max(1, num_nodes))))


def seen_of(detail: Detail, streams: tuple[str, ...] = ()) -> Seen:
    """Times are seconds since 1970."""
    status, secondary = str(detail["TrainingJobStatus"]), str(detail.get("SecondaryStatus", ""))
    is_over = status in ("Completed", "Failed", "Stopped")
    started = _seconds(detail.get("TrainingStartTime"))
    if started is None and not is_over and secondary not in _BEFORE_THE_CODE:
        started = _seconds(detail.get("LastModifiedTime")) or _seconds(detail.get("CreationTime"))
    billable = detail.get("BillableTimeInSeconds")
    return Seen(
        started_at=started,
        ended_at=_seconds(detail.get("TrainingEndTime")) or _seconds(detail.get("LastModifiedTime")),
        end=end_of(status, secondary, str(detail.get("FailureReason", ""))) if is_over else None,
        billable_s=None if billable is None else float(billable),
        note=secondary if secondary in _WORTH_SAYING and not is_over else "",
        streams=streams,
    )


def end_of(status: str, secondary: str, failure: str) -> AttemptEnd:
    words = " ".join(failure.split())[:MAX_WORDS]
    if status == "Completed":
        return AttemptEnd(0, EXITED)
    if status == "Stopped":
        if secondary == "MaxRuntimeExceeded":
            return AttemptEnd(Preempted.exit_code, TIMED_OUT)
        if secondary == "MaxWaitTimeExceeded":
            return AttemptEnd(
                None, TASK_NOT_STARTED, "no capacity within the time to wait for it (MaxWaitTimeExceeded)"
            )
        return AttemptEnd(Preempted.exit_code, EXITED, "stopped from outside")
    return failure_end(failure, words)


def failure_end(failure: str, words: str) -> AttemptEnd:
    """From the failure reason of SageMaker. The exit code of the entry begins its failure file; without the file there
    is the one that docker saw, at the end."""
    if found := _OUR_CODE.match(failure) or _DOCKERS_CODE.search(failure):
        return AttemptEnd(int(found[1]), EXITED, words)
    if failure.startswith("InternalServerError"):
        return AttemptEnd(None, SERVICE_FAULT, words)
    if failure.startswith("CapacityError"):
        return AttemptEnd(None, TASK_NOT_STARTED, words)
    if failure.startswith("AlgorithmError"):
        return AttemptEnd(EXIT_BUG, EXITED, words)
    return AttemptEnd(None, failure.partition(":")[0][:MAX_WORDS] or "Failed without a reason", words)


def _seconds(at: datetime | float | None) -> float | None:
    return at.timestamp() if isinstance(at, datetime) else at


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
                started_at=seconds_of(one.get("startedAt")),
                stopped_at=seconds_of(one.get("stoppedAt")),
            )
        )
    return made


def queued(detail: Detail) -> Seen:
    """A service job between two tries, before the first, or one that ended without any."""
    reason = str(detail.get("statusReason") or "")
    if detail["status"] in _OVER:
        why = reason.removeprefix(RECEIVED) or "ended before it had a machine"
        return Seen(is_queued=True, ended_at=seconds_of(detail.get("stoppedAt")), end=AttemptEnd(None, why))
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
