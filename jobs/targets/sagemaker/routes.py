"""The two ways to a training job: SageMaker's own calls, or a queue of AWS Batch that teams share.

A name or a token makes each call safe to repeat. Rights, without a queue: sagemaker:CreateTrainingJob,
DescribeTrainingJob, StopTrainingJob, AddTags on the cycle's training jobs, and iam:PassRole on their execution roles.

With one: batch:SubmitServiceJob, TerminateServiceJob and TagResource on the queue and its jobs; DescribeServiceJob,
ListServiceJobs, DescribeJobQueues and DescribeSchedulingPolicies on *; sagemaker:DescribeTrainingJob on
training-job/AWSBatch*; iam:PassRole on the execution roles.
"""

from dataclasses import dataclass, field

from jobs.cycle.job_states import Leaf
from jobs.plan.dag import Plan
from jobs.targets.batch.account import queue_problems, refuse_account, share_warning
from jobs.targets.batch.client import AwsClient, BatchClient, Detail, is_missing, message_of, name_of
from jobs.targets.placement import placement_of, sagemaker_placement_of
from jobs.targets.sagemaker.describe import (
    QUEUED,
    Seen,
    host_prefixes,
    queued,
    seen_of,
    seen_of_try,
    training_job_of,
    tries_of,
)
from jobs.targets.sagemaker.requests import (
    PLAN,
    SERVICE_JOB_TYPE,
    Cycle,
    Request,
    direct_request,
    service_job_request,
)
from pipeline.core.errors import ConfigError
from pipeline.core.progress import Say

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


@dataclass(frozen=True)
class DirectRoute:
    """SageMaker's own calls: one training job for each attempt."""

    client: SageMakerClient

    def look(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen | None:
        """Describe one attempt; None if it does not exist."""
        name = cycle.training_job(leaf, round_, attempt)
        detail = self.client.describe(name)
        return None if detail is None else seen_of(detail, host_prefixes(name, leaf.spec.num_nodes))

    def start(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen:
        """Make it unless it is there. Return what is known of it, or why that is not possible now (`is_queued`)."""
        name = cycle.training_job(leaf, round_, attempt)
        refused = self.client.create(direct_request(cycle, leaf, round_, attempt))
        if refused:
            return Seen(is_queued=True, note=refused)
        return Seen(streams=host_prefixes(name, leaf.spec.num_nodes))

    def stop(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int, reason: str) -> None:
        """End it if it runs or waits."""
        self.client.stop(cycle.training_job(leaf, round_, attempt))


@dataclass(frozen=True)
class QueueRoute:
    """A fair-share queue of AWS Batch: one service job for all attempts of a leaf. `warn` takes one line."""

    client: ServiceJobClient
    training: SageMakerClient
    warn: Say
    _ids: dict[str, str] = field(default_factory=dict)
    """Of service jobs by name, once known."""

    def check(self, plan: Plan) -> None:
        """Raises ConfigError with everything for which this account would not run the jobs of the plan."""
        problems, warnings = list[str](), list[str]()
        for name in dict.fromkeys(where for job in plan.jobs if (where := sagemaker_placement_of(plan, job).queue)):
            jobs = [job for job in plan.jobs if sagemaker_placement_of(plan, job).queue == name]
            queue = next(iter(self.client.described("queues", [name])), None)
            if queue is None:
                problems.append(f"queue {name}: does not exist in this account and region")
                continue
            problems += queue_problems(name, queue, is_shared=True)
            if queue.get("jobQueueType") != SERVICE_JOB_TYPE:
                problems.append(f"queue {name}: of type {queue.get('jobQueueType')}; expected {SERVICE_JOB_TYPE}")
            arns = [arn] if (arn := queue.get("schedulingPolicyArn")) else []
            for policy in self.client.described("scheduling policies", arns):
                if "fairsharePolicy" not in policy:
                    problems.append(f"queue {name}: its scheduling policy has no fair shares")
                for job in jobs:
                    warnings += share_warning(name, placement_of(plan, job).share_identifier, policy)
        refuse_account(problems, f"an enabled fair-share queue of type {SERVICE_JOB_TYPE} (jobs.sagemaker.queue)")
        for line in dict.fromkeys(warnings):
            self.warn(line)

    def look(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen | None:
        detail = self._find(cycle, leaf, round_)
        if detail is None:
            return None
        tries = tries_of(detail)
        if attempt > len(tries):
            return queued(detail)
        training_job = training_job_of(tries[attempt - 1])
        training = self.training.describe(training_job) if training_job else None
        return seen_of_try(detail, attempt, training, num_nodes=leaf.spec.num_nodes)

    def start(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen:
        """Submit all its attempts: Batch starts them."""
        request = service_job_request(cycle, leaf, round_)
        self.client.submit_service_job(request)
        return Seen(is_queued=True, note=f"{QUEUED} {request['jobQueue'].rpartition('/')[2]}")

    def stop(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int, reason: str) -> None:
        if detail := self._find(cycle, leaf, round_):
            self.client.terminate_job(detail["jobId"], reason, "service_job")

    def _find(self, cycle: Cycle, leaf: Leaf, round_: int) -> Detail | None:
        name = cycle.leaf_id(leaf, round_)
        if known := self._ids.get(name):
            return self.client.describe_service_job(known)
        found = self.client.service_job_named(sagemaker_placement_of(cycle.plan, leaf.spec).queue, name)
        if found is not None:
            self._ids[name] = str(found["jobId"])
        return found
