"""The two ways to a training job: SageMaker's own calls, or a queue of AWS Batch that teams share.

First what both services say, in the words of our records; values that SageMaker may add later are allowed for: an
unknown secondary status is one of a job that runs. Then the calls: a name or a token makes each safe to repeat. The
rights they need: infra/modules/sagemaker/policies.

Sources: API reference of SageMaker, DescribeTrainingJob (status, secondary status, failure reason); the form of a
failure reason as it is found in public reports (`AlgorithmError: <failure file>, exit code: 1`); API reference of AWS
Batch, DescribeServiceJob (milliseconds).
"""

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

_BEFORE_THE_CODE = frozenset(
    {"Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Downloading", "DownloadingTrainingImage"}
)
_WORTH_SAYING = frozenset({"Pending", "Interrupted", "Restarting"})
_OUR_CODE = re.compile(r"AlgorithmError:\s*exit (\d{1,3})\b")
_DOCKERS_CODE = re.compile(r"exit code:\s*(\d{1,3})\W*$")
MAX_WORDS = 300
QUEUED = "in queue"
"""Begins the reason of a job that was handed over to a queue and waits there."""
QUOTA = "ResourceLimitExceeded"
"""Begins the reason of a job that may start and for which the account has no machine left."""
_WITH_SAGEMAKER, _OVER = frozenset({"SCHEDULED", "STARTING", "RUNNING"}), frozenset({"SUCCEEDED", "FAILED"})


@dataclass(frozen=True)
class ObservedAttempt:
    """One attempt. `end`: None while it is under way. `note`: what it waits for, if it does.

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
    """Return one by node: hosts are numbered from 1, and nodes follow the order of their names as text.

    Source: SageMaker developer guide, log groups and streams: `<training job>/algo-<number>-<seconds>`.
    """
    return tuple(f"{training_job}/{host}-" for host in sorted(f"algo-{n + 1}" for n in range(max(1, num_nodes))))


def observe_training_job(detail: Detail, streams: tuple[str, ...] = ()) -> ObservedAttempt:
    """Read a training job; times are seconds since 1970."""
    status, secondary = str(detail["TrainingJobStatus"]), str(detail.get("SecondaryStatus", ""))
    is_over = status in ("Completed", "Failed", "Stopped")
    started = _seconds(detail.get("TrainingStartTime"))
    if started is None and not is_over and secondary not in _BEFORE_THE_CODE:
        started = _seconds(detail.get("LastModifiedTime")) or _seconds(detail.get("CreationTime"))
    billable = detail.get("BillableTimeInSeconds")
    return ObservedAttempt(
        started_at=started,
        ended_at=_seconds(detail.get("TrainingEndTime")) or _seconds(detail.get("LastModifiedTime")),
        end=end_of(status, secondary, str(detail.get("FailureReason", ""))) if is_over else None,
        billable_s=None if billable is None else float(billable),
        note=secondary if secondary in _WORTH_SAYING and not is_over else "",
        streams=streams,
    )


def end_of(status: str, secondary: str, failure: str) -> AttemptEnd:
    """Return the end of a training job in the words of our records."""
    if status == "Completed":
        return AttemptEnd(0, EXITED)
    if status != "Stopped":
        return failure_end(failure)
    if secondary == "MaxRuntimeExceeded":
        return AttemptEnd(Preempted.exit_code, TIMED_OUT)
    if secondary == "MaxWaitTimeExceeded":
        return AttemptEnd(None, TASK_NOT_STARTED, "no capacity within the time to wait for it (MaxWaitTimeExceeded)")
    return AttemptEnd(Preempted.exit_code, EXITED, "stopped from outside")


def failure_end(failure: str) -> AttemptEnd:
    """Read SageMaker's failure reason. The exit code of the entry begins its failure file; without the file there is
    the one that docker saw, at the end."""
    words = " ".join(failure.split())[:MAX_WORDS]
    if found := _OUR_CODE.match(failure) or _DOCKERS_CODE.search(failure):
        return AttemptEnd(int(found[1]), EXITED, words)
    cause = failure.partition(":")[0][:MAX_WORDS] or "Failed without a reason"
    known = {"InternalServerError": SERVICE_FAULT, "CapacityError": TASK_NOT_STARTED, "AlgorithmError": EXITED}
    return AttemptEnd(EXIT_BUG if cause == "AlgorithmError" else None, known.get(cause, cause), words)


def _seconds(at: datetime | float | None) -> float | None:
    return at.timestamp() if isinstance(at, datetime) else at


def attempts_of(detail: Detail) -> list[Detail]:
    """Return those of a service job. A training job without capacity is none: Batch drops it and waits again."""
    told, status = [*detail.get("attempts", ())], str(detail["status"])
    latest = detail.get("latestAttempt", {})
    own = training_job_of(latest)
    if status in _WITH_SAGEMAKER | _OVER and own and own not in map(training_job_of, told):
        reason = detail.get("statusReason", "") if status in _OVER else ""
        told.append({**latest, "statusReason": reason, "stoppedAt": detail.get("stoppedAt")})
    return told


def training_job_of(attempt: Detail) -> str:
    """Return its name, from the ARN, which may be in small letters; empty while it has none."""
    return str(attempt.get("serviceResourceId", {}).get("value", "")).rpartition("/")[2]


def observe_queued(detail: Detail) -> ObservedAttempt:
    """Read a service job between two tries, before the first, or one that ended without any."""
    reason = str(detail.get("statusReason") or "")
    if detail["status"] in _OVER:
        why = reason.removeprefix(RECEIVED) or "ended before it had a machine"
        return ObservedAttempt(is_queued=True, ended_at=seconds_of(detail.get("stoppedAt")), end=AttemptEnd(None, why))
    queue = str(detail["jobQueue"]).rpartition("/")[2]
    return ObservedAttempt(is_queued=True, note=f"{QUEUED} {queue}{': ' if reason else ''}{reason}")


def observe_attempt(service_job: Detail, number: int, training: Detail | None, *, num_nodes: int) -> ObservedAttempt:
    """Read one try, from 1. `training`: its training job, None if SageMaker does not describe it (yet, or no more)."""
    told, status = attempts_of(service_job), str(service_job["status"])
    one, is_last = told[number - 1], number == len(told)
    name = str(training["TrainingJobName"]) if training else training_job_of(one)
    streams = host_prefixes(name, num_nodes) if name else ()
    seen = ObservedAttempt(started_at=seconds_of(one.get("startedAt")), streams=streams)
    if training:
        seen = observe_training_job(training, streams)
    if is_last and status in _WITH_SAGEMAKER and not one.get("stoppedAt"):  # whether it was the last is Batch's to say
        return replace(seen, end=None, ended_at=None)
    reason, end = str(one.get("statusReason") or ""), seen.end
    is_batchs, said = bool(reason) and not reason.startswith(RECEIVED), reason.removeprefix(RECEIVED)
    if is_last and status == "SUCCEEDED":
        end = AttemptEnd(0, EXITED)
    elif is_batchs and end and end.exit_code != 0:  # Batch has ended it
        end = AttemptEnd(end.exit_code, reason, end.reason)
    elif end is None:
        end = AttemptEnd(None, said) if is_batchs else failure_end(said)
    ended_at = seen.ended_at if seen.end else seconds_of(one.get("stoppedAt"))
    return replace(seen, end=end, ended_at=ended_at, note="", again=not (is_last and status in _OVER))


class DirectRoute(AwsClient):
    """SageMaker's own calls: one training job for each attempt."""

    def look(self, cycle: CycleRun, task: Task, submission: int, attempt: int) -> ObservedAttempt | None:
        """Describe one attempt; None if it does not exist."""
        name = cycle.training_job(task, submission, attempt)
        detail = self.describe(name)
        return None if detail is None else observe_training_job(detail, host_prefixes(name, task.spec.num_nodes))

    def start(self, cycle: CycleRun, task: Task, submission: int, attempt: int) -> ObservedAttempt:
        """Make a training job unless it is there. Return what is known of it: `is_queued` if there is no machine now.

        Raises ConfigError for a request that SageMaker refuses, and for a name that somebody else has taken.
        """
        name, ours = cycle.training_job(task, submission, attempt), cycle.plan.plan_id
        refused: list[BaseException] = []

        def is_known(error: BaseException) -> bool:
            refused.append(error)
            return name_of(error) in (QUOTA, "ResourceInUse")

        request = direct_request(cycle, task, submission, attempt)
        self.call(f"creating training job {name}", "create_training_job", accepted=is_known, **request)
        if refused and name_of(refused[0]) == QUOTA:
            return ObservedAttempt(is_queued=True, note=f"{QUOTA}: {message_of(refused[0])}")
        if refused and (detail := self.describe(name)):  # None: not described yet
            theirs = detail.get("Environment", {}).get(PLAN, "no plan of trnjobs")
            if theirs != ours:
                raise ConfigError(
                    f"training job {name} exists and belongs to {theirs}",
                    expected=f"that of plan {ours}",
                    next_command="another jobs.name or --cycle",
                )
        return ObservedAttempt(streams=host_prefixes(name, task.spec.num_nodes))

    def stop(self, cycle: CycleRun, task: Task, submission: int, attempt: int, reason: str) -> None:
        """Ask it to end: SIGTERM, and SIGKILL after 120 s. One that has ended, or does not exist, stays as it is."""
        name = cycle.training_job(task, submission, attempt)

        def is_over(error: BaseException) -> bool:
            return is_missing(error) or "is in status" in message_of(error)

        self.call(f"stopping training job {name}", "stop_training_job", accepted=is_over, TrainingJobName=name)

    def describe(self, name: str) -> Detail | None:
        """Return None for a training job that does not exist, or not yet."""
        doing, operation = f"describing training job {name}", "describe_training_job"
        return self.call(doing, operation, accepted=is_missing, TrainingJobName=name) or None


class QueueRoute(BatchClient):
    """A fair-share queue of AWS Batch: one service job for all attempts of a leaf. `warn` takes one line."""

    def __init__(self, raw: Any, training: DirectRoute, warn: Say, **more: Any) -> None:
        super().__init__(raw, **more)
        self._training, self._warn = training, warn

    def check(self, plan: JobPlan) -> None:
        """Raises ConfigError with everything for which this account would not run the jobs of the plan."""
        uses = [
            (sagemaker_placement_of(plan, job).queue, placement_of(plan, job).share_identifier) for job in plan.jobs
        ]
        uses = [(queue, share) for queue, share in uses if queue]
        account, problems = describe_queues(self, [queue for queue, _ in uses]), list[str]()
        for name in dict(uses):
            problems += queue_problems(name, account, is_shared=True)
            kind = account[name].detail.get("jobQueueType") if name in account else SERVICE_JOB_TYPE
            if kind != SERVICE_JOB_TYPE:
                problems.append(f"queue {name}: of type {kind}; expected {SERVICE_JOB_TYPE}")
        refuse_account(problems, f"an enabled fair-share queue of type {SERVICE_JOB_TYPE} (jobs.sagemaker.queue)")
        for line in share_warnings(uses, account):
            self._warn(line)

    def look(self, cycle: CycleRun, task: Task, submission: int, attempt: int) -> ObservedAttempt | None:
        """Describe one attempt, or the service job while it waits; None if there is none."""
        detail = self._find(cycle, task, submission)
        if detail is None:
            return None
        tries = attempts_of(detail)
        if attempt > len(tries):
            return observe_queued(detail)
        training_job = training_job_of(tries[attempt - 1])
        training = self._training.describe(training_job) if training_job else None
        return observe_attempt(detail, attempt, training, num_nodes=task.spec.num_nodes)

    def start(self, cycle: CycleRun, task: Task, submission: int, attempt: int) -> ObservedAttempt:
        """Submit all its attempts, which Batch starts, unless they are there.

        Repeated freely: the token of the request makes one job of any number of them. The API reference says both that
        equal requests are the same and that the second is rejected; either is fine.
        """
        request = service_job_request(cycle, task, submission)
        queue, name = request["jobQueue"], request["jobName"]

        def is_there(error: BaseException) -> bool:
            is_known = name_of(error) == "Client" and "token" in message_of(error).casefold()
            return is_known or self._named(queue, name) is not None

        self.call(f"submitting {name}", "submit_service_job", accepted=is_there, **request)
        return ObservedAttempt(is_queued=True, note=f"{QUEUED} {queue.rpartition('/')[2]}")

    def stop(self, cycle: CycleRun, task: Task, submission: int, attempt: int, reason: str) -> None:
        """End the service job, and with it the attempt under way."""
        if detail := self._find(cycle, task, submission):
            self.terminate_job(detail["jobId"], reason, "service_job")

    def _find(self, cycle: CycleRun, task: Task, submission: int) -> Detail | None:
        return self._named(sagemaker_placement_of(cycle.plan, task.spec).queue, cycle.task_id(task, submission))

    def _named(self, queue: str, name: str) -> Detail | None:
        """Return the oldest of exactly this name in any state; None if there is none, or it is not described yet."""
        ours = self.jobs_named(queue, name, "service_job")
        if not ours:
            return None
        job_id = min(ours, key=lambda one: (one["createdAt"], one["jobId"]))["jobId"]
        doing, operation = f"describing service job {job_id}", "describe_service_job"
        return self.call(doing, operation, accepted=is_missing, jobId=job_id) or None
