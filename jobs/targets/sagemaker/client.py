"""The calls to SageMaker, and to AWS Batch for service jobs. A name or a token makes each one safe to repeat.

Rights, without a queue: sagemaker:CreateTrainingJob, DescribeTrainingJob, StopTrainingJob, AddTags on the cycle's
training jobs, and iam:PassRole on their execution roles.

With one: batch:SubmitServiceJob, TerminateServiceJob and TagResource on the queue and its jobs; DescribeServiceJob,
ListServiceJobs, DescribeJobQueues, DescribeSchedulingPolicies and DescribeServiceEnvironments on *;
sagemaker:DescribeTrainingJob on training-job/AWSBatch*; iam:PassRole on the execution roles.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from botocore import exceptions as boto

from jobs.targets.batch.client import (
    AWS_ERRORS,
    MAX_REASON_CHARACTERS,
    AwsClient,
    BatchClient,
    Detail,
    is_retryable,
    name_of,
    translate,
)
from jobs.targets.sagemaker.requests import PLAN, Request
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy

RIGHTS = "sagemaker:CreateTrainingJob, DescribeTrainingJob, StopTrainingJob, AddTags and iam:PassRole on the roles"
SERVICE_RIGHTS = (
    "batch:SubmitServiceJob, DescribeServiceJob, ListServiceJobs, TerminateServiceJob, TagResource and iam:PassRole on"
    " the roles"
)
QUOTA = "ResourceLimitExceeded"
"""Begins the reason of a job that may start and for which the account has no machine left."""
CALLS_PER_S = 2.0  # what AWS allows is not published; a cycle needs no more


class SageMakerClient(AwsClient):
    """`raw` is boto3's client, or what answers like it."""

    def __init__(
        self,
        raw: Any,
        *,
        policy: RetryPolicy | None = None,
        stop: StopSignal | None = None,
        calls_per_s: float = CALLS_PER_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(raw, policy=policy, stop=stop)
        self._pause_s, self._monotonic, self._next_at = 1 / calls_per_s, monotonic, 0.0

    def create(self, request: Request) -> str:
        """Make a training job, unless it is there already; empty, or why the account has no machine for it now.

        Raises ConfigError for a request that SageMaker refuses, and for a name that somebody else has taken.
        """
        name = request["TrainingJobName"]
        try:
            self._call("create_training_job", **request)
        except AWS_ERRORS as error:
            if name_of(error) == QUOTA:
                return f"{QUOTA}: {message_of(error)}"
            if name_of(error) != "ResourceInUse":
                raise translate(error, f"creating training job {name}", rights=RIGHTS) from error
            detail, ours = self.describe(name), request["Environment"][PLAN]
            theirs = detail.get("Environment", {}).get(PLAN, "no plan of trnjobs") if detail else ours  # not yet there
            if theirs != ours:
                raise ConfigError(
                    f"training job {name} exists and belongs to {theirs}",
                    expected=f"that of plan {ours}",
                    next_command="another jobs.name or --cycle",
                ) from error
        return ""

    def describe(self, name: str) -> Detail | None:
        """None for a training job that does not exist, or not yet."""
        try:
            return self._call("describe_training_job", TrainingJobName=name)
        except AWS_ERRORS as error:
            if is_missing(error):
                return None
            raise translate(error, f"describing training job {name}", rights=RIGHTS) from error

    def stop(self, name: str) -> None:
        """Ask it to end: SIGTERM, and SIGKILL after 120 s. One that has ended, or does not exist, stays as it is."""
        try:
            self._call("stop_training_job", TrainingJobName=name)
        except AWS_ERRORS as error:
            if not (is_missing(error) or "is in status" in message_of(error)):
                raise translate(error, f"stopping training job {name}", rights=RIGHTS) from error

    def _call(self, operation: str, **request: Any) -> Detail:
        call: Callable[..., Detail] = getattr(self._raw, operation)

        def paced() -> Detail:
            wait_s = self._next_at - self._monotonic()
            if wait_s > 0:
                self._stop.wait(wait_s)
            self._next_at = self._monotonic() + self._pause_s
            return call(**request)

        return self.repeat(paced, doing=operation, retryable=is_retryable)


class ServiceJobClient(BatchClient):
    """`raw` is boto3's client of AWS Batch, or what answers like it."""

    def submit_service_job(self, request: Request) -> None:
        """Make it, unless it is there. Repeated freely: the token of the request makes one job of any number of them.

        The API reference says both that equal requests are the same and that the second is rejected; either is fine.
        """
        doing = f"submitting {request['jobName']}"
        try:
            self.repeat(lambda: self._raw.submit_service_job(**request), doing=doing, retryable=is_retryable)
        except AWS_ERRORS as error:
            is_known = name_of(error) == "Client" and "token" in message_of(error).casefold()
            if not (is_known or self.service_job_named(request["jobQueue"], request["jobName"])):
                raise translate(error, doing, rights=SERVICE_RIGHTS) from error

    def service_job_named(self, queue: str, name: str) -> Detail | None:
        """The oldest of exactly this name in any state; None while there is none, or it is not described yet."""
        wanted = {"jobQueue": queue, "filters": [{"name": "JOB_NAME", "values": [name]}]}
        listed = self._pages("listing service jobs", "list_service_jobs", "jobSummaryList", wanted)
        ours = [one for one in listed if one["jobName"] == name]  # the filter ignores case
        oldest = min(ours, key=lambda one: (one["createdAt"], one["jobId"]), default=None)
        return oldest and self.describe_service_job(oldest["jobId"])

    def describe_service_job(self, job_id: str) -> Detail | None:
        """None for one that does not exist, or not yet."""
        doing = f"describing service job {job_id}"
        try:
            found: Detail = self.repeat(
                lambda: self._raw.describe_service_job(jobId=job_id), doing=doing, retryable=is_retryable
            )
        except AWS_ERRORS as error:
            if is_missing(error):
                return None
            raise translate(error, doing, rights=SERVICE_RIGHTS) from error
        return found

    def terminate_service_job(self, job_id: str, reason: str) -> None:
        """End it in whatever state; one that has ended stays as it is."""
        text = reason[:MAX_REASON_CHARACTERS]
        self._call(f"ending service job {job_id}", "terminate_service_job", jobId=job_id, reason=text)

    def service_environments(self, names: Sequence[str]) -> list[Detail]:
        doing, operation = "describing service environments", "describe_service_environments"
        return self._described(doing, operation, "serviceEnvironments", names)


def is_missing(error: BaseException) -> bool:
    """Neither SageMaker nor AWS Batch has a code of its own for it everywhere. The text: reports of users; that of an
    emulator differs."""
    text = message_of(error).casefold()
    return name_of(error) == "ResourceNotFound" or any(
        words in text for words in ("not found", "could not find", "does not exist")
    )


def message_of(error: BaseException) -> str:
    return str(error.response.get("Error", {}).get("Message", "")) if isinstance(error, boto.ClientError) else ""
