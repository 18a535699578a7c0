"""The calls to SageMaker, and to AWS Batch for service jobs. A name or a token makes each one safe to repeat.

Rights, without a queue: sagemaker:CreateTrainingJob, DescribeTrainingJob, StopTrainingJob, AddTags on the cycle's
training jobs, and iam:PassRole on their execution roles.

With one: batch:SubmitServiceJob, TerminateServiceJob and TagResource on the queue and its jobs; DescribeServiceJob,
ListServiceJobs, DescribeJobQueues and DescribeSchedulingPolicies on *;
sagemaker:DescribeTrainingJob on training-job/AWSBatch*; iam:PassRole on the execution roles.
"""

from jobs.targets.batch.client import AwsClient, BatchClient, Detail, is_missing, message_of, name_of
from jobs.targets.sagemaker.requests import PLAN, Request
from pipeline.core.errors import ConfigError

QUOTA = "ResourceLimitExceeded"
"""Begins the reason of a job that may start and for which the account has no machine left."""


class SageMakerClient(AwsClient):
    """`raw` is boto3's client, or what answers like it."""

    rights = "sagemaker:CreateTrainingJob, DescribeTrainingJob, StopTrainingJob, AddTags and iam:PassRole on the roles"

    def create(self, request: Request) -> str:
        """Make a training job unless it is there. Return why the account has no machine for it now, else nothing.

        Raises ConfigError for a request that SageMaker refuses, and for a name that somebody else has taken.
        """
        name = request["TrainingJobName"]
        refused: list[BaseException] = []

        def is_known(error: BaseException) -> bool:
            refused.append(error)
            return name_of(error) in (QUOTA, "ResourceInUse")

        self.call(f"creating training job {name}", "create_training_job", accepted=is_known, **request)
        if not refused:
            return ""
        if name_of(refused[0]) == QUOTA:
            return f"{QUOTA}: {message_of(refused[0])}"
        detail, ours = self.describe(name), request["Environment"][PLAN]
        theirs = detail.get("Environment", {}).get(PLAN, "no plan of trnjobs") if detail else ours  # not described yet
        if theirs != ours:
            raise ConfigError(
                f"training job {name} exists and belongs to {theirs}",
                expected=f"that of plan {ours}",
                next_command="another jobs.name or --cycle",
            )
        return ""

    def describe(self, name: str) -> Detail | None:
        """None for a training job that does not exist, or not yet."""
        doing, operation = f"describing training job {name}", "describe_training_job"
        return self.call(doing, operation, accepted=is_missing, TrainingJobName=name) or None

    def stop(self, name: str) -> None:
        """Ask it to end: SIGTERM, and SIGKILL after 120 s. One that has ended, or does not exist, stays as it is."""

        def is_over(error: BaseException) -> bool:
            return is_missing(error) or "is in status" in message_of(error)

        self.call(f"stopping training job {name}", "stop_training_job", accepted=is_over, TrainingJobName=name)


class ServiceJobClient(BatchClient):
    """`raw` is boto3's client of AWS Batch, or what answers like it."""

    rights = (
        "batch:SubmitServiceJob, DescribeServiceJob, ListServiceJobs, TerminateServiceJob, TagResource and"
        " iam:PassRole on the roles"
    )

    def submit_service_job(self, request: Request) -> None:
        """Make it, unless it is there. Repeated freely: the token of the request makes one job of any number of them.

        The API reference says both that equal requests are the same and that the second is rejected; either is fine.
        """

        def is_there(error: BaseException) -> bool:
            is_known = name_of(error) == "Client" and "token" in message_of(error).casefold()
            return is_known or self.service_job_named(request["jobQueue"], request["jobName"]) is not None

        self.call(f"submitting {request['jobName']}", "submit_service_job", accepted=is_there, **request)

    def service_job_named(self, queue: str, name: str) -> Detail | None:
        """The oldest of exactly this name in any state; None while there is none, or it is not described yet."""
        ours = self.jobs_named(queue, name, "service_job")
        oldest = min(ours, key=lambda one: (one["createdAt"], one["jobId"]), default=None)
        return oldest and self.describe_service_job(oldest["jobId"])

    def describe_service_job(self, job_id: str) -> Detail | None:
        """None for one that does not exist, or not yet."""
        doing, operation = f"describing service job {job_id}", "describe_service_job"
        return self.call(doing, operation, accepted=is_missing, jobId=job_id) or None
