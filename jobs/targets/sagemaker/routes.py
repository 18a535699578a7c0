"""The two ways to start a training job: call SageMaker directly, or submit to an AWS Batch queue that teams share.

The first part translates the states of both services to records. An unknown secondary status, which SageMaker may add
in the future, is treated as running. The second part sends the requests. These are safe to repeat because of the name
or the client token that they contain. The permissions that they require are listed in infra/modules/sagemaker/policies.

Sources: the API reference of SageMaker for DescribeTrainingJob (status, secondary status, failure reason), public
reports for the format of failure reasons (`AlgorithmError: <failure file>, exit code: 1`), and the API reference of AWS
Batch for DescribeServiceJob (timestamps in milliseconds).
"""

import math
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from jobs.cycle.job_states import EXITED, SERVICE_FAULT, TASK_NOT_STARTED, TIMED_OUT, AttemptEnd, Task
from jobs.plan.spec import JobPlan
from jobs.targets.base import placement_of, sagemaker_placement_of, seconds_of
from jobs.targets.batch.account import describe_queues, queue_problems, refuse_account, share_warnings
from jobs.targets.batch.client import AwsClient, BatchClient, Detail, is_missing, message_of, name_of
from jobs.targets.sagemaker.requests import (
    PLAN,
    RECEIVED,
    SERVICE_JOB_TYPE,
    CycleRun,
    direct_request,
    service_job_request,
)
from pipeline.core.errors import EXIT_BUG, ConfigError, Preempted
from pipeline.core.progress import Say

_BEFORE_START = frozenset(
    {"Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Downloading", "DownloadingTrainingImage"}
)
_REPORTED_STATUSES = frozenset({"Pending", "Interrupted", "Restarting"})
_ENTRY_CODE = re.compile(r"AlgorithmError:\s*exit (\d{1,3})\b")
_DOCKER_CODE = re.compile(r"exit code:\s*(\d{1,3})\W*$")
MAX_REASON = 300
QUEUED = "in queue"
"""Prefix of the reason while a job is waiting in an AWS Batch queue."""
QUOTA = "ResourceLimitExceeded"
"""Prefix of the reason while a job cannot start because it would exceed a quota of the account."""
_WITH_SAGEMAKER, _ENDED = frozenset({"SCHEDULED", "STARTING", "RUNNING"}), frozenset({"SUCCEEDED", "FAILED"})


@dataclass(frozen=True)
class ObservedAttempt:
    """The observed state of an attempt.

    `end` is None while the attempt runs. `note` is the reason why it is waiting, if any. `streams` contains the prefix
    of the log streams of each node, and is empty if they are not known yet. `will_retry` is whether the platform starts
    a further attempt, or None if we have to decide. `is_queued` is whether the attempt was submitted but does not have
    a machine yet.
    """

    started_at: float | None = None
    ended_at: float | None = None
    end: AttemptEnd | None = None
    billable_s: float | None = None
    note: str = ""
    streams: tuple[str, ...] = ()
    will_retry: bool | None = None
    is_queued: bool = False


def host_prefixes(training_job: str, num_nodes: int) -> tuple[str, ...]:
    """Return the prefix of the log streams of each node.

    Hosts are numbered from 1, and nodes are in the lexical order of the host names. The format of a name is
    `<training job>/algo-<number>-<seconds>` (SageMaker developer guide, log groups and streams).
    """
    return tuple(f"{training_job}/{host}-" for host in sorted(f"algo-{n + 1}" for n in range(max(1, num_nodes))))


def observe_training_job(detail: Detail, streams: tuple[str, ...] = ()) -> ObservedAttempt:
    """Convert the description of a training job. Times in the result are seconds since 1970."""
    status, secondary = str(detail["TrainingJobStatus"]), str(detail.get("SecondaryStatus", ""))
    has_ended = status in ("Completed", "Failed", "Stopped")
    started = _seconds(detail.get("TrainingStartTime"))
    if started is None and not has_ended and secondary not in _BEFORE_START:
        started = _seconds(detail.get("LastModifiedTime")) or _seconds(detail.get("CreationTime"))
    billable = detail.get("BillableTimeInSeconds")
    return ObservedAttempt(
        started_at=started,
        ended_at=_seconds(detail.get("TrainingEndTime")) or _seconds(detail.get("LastModifiedTime")),
        end=end_of(status, secondary, str(detail.get("FailureReason", ""))) if has_ended else None,
        billable_s=None if billable is None else float(billable),
        note=secondary if secondary in _REPORTED_STATUSES and not has_ended else "",
        streams=streams,
    )


def end_of(status: str, secondary: str, failure: str) -> AttemptEnd:
    """Convert the status of a training job that has ended."""
    if status == "Completed":
        return AttemptEnd(0, EXITED)
    if status != "Stopped":
        return failure_end(failure)
    if secondary == "MaxRuntimeExceeded":
        return AttemptEnd(Preempted.exit_code, TIMED_OUT)
    if secondary == "MaxWaitTimeExceeded":
        return AttemptEnd(None, TASK_NOT_STARTED, "no capacity within the maximum wait time (MaxWaitTimeExceeded)")
    return AttemptEnd(Preempted.exit_code, EXITED, "stopped from outside")


def failure_end(failure: str) -> AttemptEnd:
    """Parse a failure reason, which begins with the exit code of trnjobs-entry or ends with that of the container."""
    text = " ".join(failure.split())[:MAX_REASON]
    if match := _ENTRY_CODE.match(failure) or _DOCKER_CODE.search(failure):
        return AttemptEnd(int(match[1]), EXITED, text)
    cause = failure.partition(":")[0][:MAX_REASON] or "Failed without a reason"
    reasons = {"InternalServerError": SERVICE_FAULT, "CapacityError": TASK_NOT_STARTED, "AlgorithmError": EXITED}
    return AttemptEnd(EXIT_BUG if cause == "AlgorithmError" else None, reasons.get(cause, cause), text)


def _seconds(at: datetime | float | None) -> float | None:
    return at.timestamp() if isinstance(at, datetime) else at


PREEMPTED = "preempted"
"""Marks attempts that were preempted in a quota share."""


def attempts_of(detail: Detail) -> list[Detail]:
    """Return the attempts of a service job, including those that were preempted in a quota share.

    A training job for which there was no capacity does not count as an attempt, because Batch queues it again. Only the
    most recent preempted attempts are described, so earlier ones are empty.
    """
    summary, status = detail.get("preemptionSummary", {}), str(detail["status"])
    attempts, preempted = [*detail.get("attempts", ())], summary.get("recentPreemptedAttempts", ())
    known = [*map(training_job_of, attempts)]
    marks = [{**attempt, PREEMPTED: True} for attempt in preempted]
    if others := [attempt for attempt in marks if training_job_of(attempt) not in known]:
        attempts = sorted([*attempts, *others], key=lambda attempt: attempt.get("stoppedAt") or math.inf)
        attempts[:0] = [{PREEMPTED: True}] * (summary["preemptedAttemptCount"] - len(preempted))
    elif marks:  # it is not documented whether the other list contains them as well
        names = {*map(training_job_of, marks)}
        attempts = [{**attempt, PREEMPTED: training_job_of(attempt) in names} for attempt in attempts]
    latest = detail.get("latestAttempt", {})
    own = training_job_of(latest)
    if status in _WITH_SAGEMAKER | _ENDED and own and own not in map(training_job_of, attempts):
        reason = detail.get("statusReason", "") if status in _ENDED else ""
        attempts.append({**latest, "statusReason": reason, "stoppedAt": detail.get("stoppedAt")})
    return attempts


def training_job_of(attempt: Detail) -> str:
    """Return the name of the training job of an attempt, or an empty string if there is none yet.

    The name is taken from the ARN, which may be in lower case.
    """
    return str(attempt.get("serviceResourceId", {}).get("value", "")).rpartition("/")[2]


def observe_queued(detail: Detail) -> ObservedAttempt:
    """Convert the description of a service job that waits for its next attempt, or that ended without one."""
    reason = str(detail.get("statusReason") or "")
    if detail["status"] in _ENDED:
        why = reason.removeprefix(RECEIVED) or "ended before it had a machine"
        return ObservedAttempt(is_queued=True, ended_at=seconds_of(detail.get("stoppedAt")), end=AttemptEnd(None, why))
    queue = str(detail["jobQueue"]).rpartition("/")[2]
    return ObservedAttempt(is_queued=True, note=f"{QUEUED} {queue}{': ' if reason else ''}{reason}")


def observe_attempt(service_job: Detail, number: int, training: Detail | None, *, num_nodes: int) -> ObservedAttempt:
    """Convert one attempt (from 1) of a service job. `training` is the description of its training job, if any."""
    attempts, status = attempts_of(service_job), str(service_job["status"])
    attempt, is_last = attempts[number - 1], number == len(attempts)
    name = str(training["TrainingJobName"]) if training else training_job_of(attempt)
    streams = host_prefixes(name, num_nodes) if name else ()
    observed = ObservedAttempt(started_at=seconds_of(attempt.get("startedAt")), streams=streams)
    if training:
        observed = observe_training_job(training, streams)
    if is_last and status in _WITH_SAGEMAKER and not attempt.get("stoppedAt"):  # Batch has not decided about a retry
        return replace(observed, end=None, ended_at=None)
    reason, end = str(attempt.get("statusReason") or ""), observed.end
    is_from_batch, text = bool(reason) and not reason.startswith(RECEIVED), reason.removeprefix(RECEIVED)
    if is_last and status == "SUCCEEDED":
        end = AttemptEnd(0, EXITED)
    elif is_from_batch and end and end.exit_code != 0:  # Batch has ended the attempt
        end = AttemptEnd(end.exit_code, reason, end.reason)
    elif end is None:
        end = AttemptEnd(None, text) if is_from_batch else failure_end(text)
    if attempt.get(PREEMPTED):
        end = AttemptEnd(Preempted.exit_code, EXITED, text or "preempted")
    ended_at = observed.ended_at if observed.end else seconds_of(attempt.get("stoppedAt"))
    return replace(observed, end=end, ended_at=ended_at, note="", will_retry=not (is_last and status in _ENDED))


class DirectRoute(AwsClient):
    """The route that calls SageMaker directly and creates one training job per attempt."""

    def observe(self, cycle: CycleRun, task: Task, submission: int, attempt: int) -> ObservedAttempt | None:
        """Return the state of one attempt, or None if it does not exist."""
        name = cycle.training_job(task, submission, attempt)
        detail = self.describe(name)
        return None if detail is None else observe_training_job(detail, host_prefixes(name, task.spec.num_nodes))

    def start(self, cycle: CycleRun, task: Task, submission: int, attempt: int) -> ObservedAttempt:
        """Create the training job of an attempt, unless it already exists.

        `is_queued` is set in the result if the quota does not allow another machine. Raises ConfigError if SageMaker
        refuses the request, or if the existing training job belongs to a different plan.
        """
        name, plan_id = cycle.training_job(task, submission, attempt), cycle.plan.plan_id
        refused: list[BaseException] = []

        def is_expected(error: BaseException) -> bool:
            refused.append(error)
            return name_of(error) in (QUOTA, "ResourceInUse")

        request = direct_request(cycle, task, submission, attempt)
        self.call(f"creating training job {name}", "create_training_job", accepted=is_expected, **request)
        if refused and name_of(refused[0]) == QUOTA:
            return ObservedAttempt(is_queued=True, note=f"{QUOTA}: {message_of(refused[0])}")
        if refused and (detail := self.describe(name)):  # None if it cannot be described yet
            owner = detail.get("Environment", {}).get(PLAN, "no plan of trnjobs")
            if owner != plan_id:
                raise ConfigError(
                    f"training job {name} already exists and belongs to {owner}",
                    expected=f"a training job of plan {plan_id}",
                    next_command="choose a different jobs.name or --cycle",
                )
        return ObservedAttempt(streams=host_prefixes(name, task.spec.num_nodes))

    def stop(self, cycle: CycleRun, task: Task, submission: int, attempt: int, reason: str) -> bool:
        """Stop the training job of an attempt, unless it has ended. Returns False if it does not exist (yet).

        SageMaker sends SIGTERM, followed by SIGKILL after 120 s.
        """
        name = cycle.training_job(task, submission, attempt)
        refused: list[BaseException] = []

        def is_expected(error: BaseException) -> bool:
            refused.append(error)
            return is_missing(error) or "is in status" in message_of(error)

        self.call(f"stopping training job {name}", "stop_training_job", accepted=is_expected, TrainingJobName=name)
        return not any(map(is_missing, refused))

    def describe(self, name: str) -> Detail | None:
        """Return the description of a training job, or None if it does not exist (yet)."""
        doing, operation = f"describing training job {name}", "describe_training_job"
        return self.call(doing, operation, accepted=is_missing, TrainingJobName=name) or None


class QueueRoute(BatchClient):
    """The route through an AWS Batch fair-share queue, with one service job for all attempts of a task.

    `warn` prints a line for the user.
    """

    def __init__(self, raw: Any, training: DirectRoute, warn: Say, **more: Any) -> None:
        super().__init__(raw, **more)
        self._training, self._warn = training, warn

    def check(self, plan: JobPlan) -> None:
        """Check the queues that the plan uses. Raises ConfigError that lists all of their problems."""
        on_queue = [job for job in plan.jobs if sagemaker_placement_of(plan, job).queue]
        queues = dict.fromkeys(sagemaker_placement_of(plan, job).queue for job in on_queue)
        account, problems = describe_queues(self, queues), list[str]()
        for name in queues:
            problems += queue_problems(name, account, is_shared=True)
            kind = account[name].detail.get("jobQueueType") if name in account else SERVICE_JOB_TYPE
            if kind != SERVICE_JOB_TYPE:
                problems.append(f"queue {name}: has type {kind}, expected {SERVICE_JOB_TYPE}")
        refuse_account(problems, f"an enabled fair-share queue of type {SERVICE_JOB_TYPE} (jobs.sagemaker.queue)")
        uses = [
            (sagemaker_placement_of(plan, job).queue, placement_of(plan, job).share_identifier)
            for job in on_queue
            if not sagemaker_placement_of(plan, job).quota_share
        ]
        for line in share_warnings(uses, account):
            self._warn(line)

    def observe(self, cycle: CycleRun, task: Task, submission: int, attempt: int) -> ObservedAttempt | None:
        """Return the state of one attempt, or of the service job while it is waiting. None if it does not exist."""
        detail = self._find(cycle, task, submission)
        if detail is None:
            return None
        attempts = attempts_of(detail)
        if attempt > len(attempts):
            return observe_queued(detail)
        training_job = training_job_of(attempts[attempt - 1])
        training = self._training.describe(training_job) if training_job else None
        return observe_attempt(detail, attempt, training, num_nodes=task.spec.num_nodes)

    def start(self, cycle: CycleRun, task: Task, submission: int, attempt: int) -> ObservedAttempt:
        """Submit the service job of a task, for which Batch starts all attempts.

        This is safe to repeat because of the client token. The API reference does not specify whether an identical
        request is accepted or rejected, so both cases are handled.
        """
        request = service_job_request(cycle, task, submission)
        queue, name = request["jobQueue"], request["jobName"]

        def exists(error: BaseException) -> bool:
            is_token_used = name_of(error) == "Client" and "token" in message_of(error).casefold()
            return is_token_used or self._named(queue, name) is not None

        self.call(f"submitting {name}", "submit_service_job", accepted=exists, **request)
        return ObservedAttempt(is_queued=True, note=f"{QUEUED} {queue.rpartition('/')[2]}")

    def stop(self, cycle: CycleRun, task: Task, submission: int, attempt: int, reason: str) -> bool:
        """End the service job and its running attempt. Returns False if it does not exist (yet)."""
        if detail := self._find(cycle, task, submission):
            self.terminate_job(detail["jobId"], reason, "service_job")
        return detail is not None

    def _find(self, cycle: CycleRun, task: Task, submission: int) -> Detail | None:
        return self._named(sagemaker_placement_of(cycle.plan, task.spec).queue, cycle.task_id(task, submission))

    def _named(self, queue: str, name: str) -> Detail | None:
        """Return the description of the oldest service job with exactly this name, or None if there is none."""
        jobs = self.jobs_named(queue, name, "service_job")
        if not jobs:
            return None
        job_id = min(jobs, key=lambda job: (job["createdAt"], job["jobId"]))["jobId"]
        doing, operation = f"describing service job {job_id}", "describe_service_job"
        return self.call(doing, operation, accepted=is_missing, jobId=job_id) or None
