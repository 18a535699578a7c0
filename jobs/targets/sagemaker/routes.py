"""The two ways to a training job: SageMaker's own calls, or a queue of AWS Batch that teams share.

A name or a token makes each call safe to repeat. Rights, without a queue: sagemaker:CreateTrainingJob,
DescribeTrainingJob, StopTrainingJob, AddTags on the cycle's training jobs, and iam:PassRole on their execution roles.

With one: batch:SubmitServiceJob, TerminateServiceJob and TagResource on the queue and its jobs; DescribeServiceJob,
ListServiceJobs, DescribeJobQueues and DescribeSchedulingPolicies on *; sagemaker:DescribeTrainingJob on
training-job/AWSBatch*; iam:PassRole on the execution roles.
"""

from typing import Any

from jobs.cycle.job_states import Leaf
from jobs.plan.spec import Plan
from jobs.targets.batch.account import queue_problems, refuse_account, share_warning
from jobs.targets.batch.client import AwsClient, BatchClient, Detail, is_missing, message_of, name_of
from jobs.targets.placement import placement_of, sagemaker_placement_of
from jobs.targets.sagemaker import describe
from jobs.targets.sagemaker.describe import QUEUED, Seen, host_prefixes
from jobs.targets.sagemaker.requests import PLAN, SERVICE_JOB_TYPE, Cycle, direct_request, service_job_request
from pipeline.core.errors import ConfigError
from pipeline.core.progress import Say

QUOTA = "ResourceLimitExceeded"
"""Begins the reason of a job that may start and for which the account has no machine left."""


class DirectRoute(AwsClient):
    """SageMaker's own calls: one training job for each attempt."""

    rights = "sagemaker:CreateTrainingJob, DescribeTrainingJob, StopTrainingJob, AddTags and iam:PassRole on the roles"

    def look(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen | None:
        """Describe one attempt; None if it does not exist."""
        name = cycle.training_job(leaf, round_, attempt)
        detail = self.describe(name)
        return None if detail is None else describe.seen_of(detail, host_prefixes(name, leaf.spec.num_nodes))

    def start(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen:
        """Make a training job unless it is there. Return what is known of it: `is_queued` if there is no machine now.

        Raises ConfigError for a request that SageMaker refuses, and for a name that somebody else has taken.
        """
        name, ours = cycle.training_job(leaf, round_, attempt), cycle.plan.plan_id
        refused: list[BaseException] = []

        def is_known(error: BaseException) -> bool:
            refused.append(error)
            return name_of(error) in (QUOTA, "ResourceInUse")

        request = direct_request(cycle, leaf, round_, attempt)
        self.call(f"creating training job {name}", "create_training_job", accepted=is_known, **request)
        if refused and name_of(refused[0]) == QUOTA:
            return Seen(is_queued=True, note=f"{QUOTA}: {message_of(refused[0])}")
        if refused and (detail := self.describe(name)):  # None: not described yet
            theirs = detail.get("Environment", {}).get(PLAN, "no plan of trnjobs")
            if theirs != ours:
                raise ConfigError(
                    f"training job {name} exists and belongs to {theirs}",
                    expected=f"that of plan {ours}",
                    next_command="another jobs.name or --cycle",
                )
        return Seen(streams=host_prefixes(name, leaf.spec.num_nodes))

    def stop(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int, reason: str) -> None:
        """Ask it to end: SIGTERM, and SIGKILL after 120 s. One that has ended, or does not exist, stays as it is."""
        name = cycle.training_job(leaf, round_, attempt)

        def is_over(error: BaseException) -> bool:
            return is_missing(error) or "is in status" in message_of(error)

        self.call(f"stopping training job {name}", "stop_training_job", accepted=is_over, TrainingJobName=name)

    def describe(self, name: str) -> Detail | None:
        """Return None for a training job that does not exist, or not yet."""
        doing, operation = f"describing training job {name}", "describe_training_job"
        return self.call(doing, operation, accepted=is_missing, TrainingJobName=name) or None


class QueueRoute(BatchClient):
    """A fair-share queue of AWS Batch: one service job for all attempts of a leaf. `warn` takes one line."""

    rights = (
        "batch:SubmitServiceJob, DescribeServiceJob, ListServiceJobs, TerminateServiceJob, TagResource and"
        " iam:PassRole on the roles"
    )

    def __init__(self, raw: Any, training: DirectRoute, warn: Say, **more: Any) -> None:
        super().__init__(raw, **more)
        self._training, self._warn = training, warn
        self._ids = dict[str, str]()
        """Of service jobs by name, once known."""

    def check(self, plan: Plan) -> None:
        """Raises ConfigError with everything for which this account would not run the jobs of the plan."""
        problems, warnings = list[str](), list[str]()
        for name in dict.fromkeys(where for job in plan.jobs if (where := sagemaker_placement_of(plan, job).queue)):
            jobs = [job for job in plan.jobs if sagemaker_placement_of(plan, job).queue == name]
            queue = next(iter(self.described("queues", [name])), None)
            if queue is None:
                problems.append(f"queue {name}: does not exist in this account and region")
                continue
            problems += queue_problems(name, queue, is_shared=True)
            if queue.get("jobQueueType") != SERVICE_JOB_TYPE:
                problems.append(f"queue {name}: of type {queue.get('jobQueueType')}; expected {SERVICE_JOB_TYPE}")
            arns = [arn] if (arn := queue.get("schedulingPolicyArn")) else []
            for policy in self.described("scheduling policies", arns):
                if "fairsharePolicy" not in policy:
                    problems.append(f"queue {name}: its scheduling policy has no fair shares")
                for job in jobs:
                    warnings += share_warning(name, placement_of(plan, job).share_identifier, policy)
        refuse_account(problems, f"an enabled fair-share queue of type {SERVICE_JOB_TYPE} (jobs.sagemaker.queue)")
        for line in dict.fromkeys(warnings):
            self._warn(line)

    def look(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen | None:
        """Describe one attempt, or the service job while it waits; None if there is none."""
        detail = self._find(cycle, leaf, round_)
        if detail is None:
            return None
        tries = describe.tries_of(detail)
        if attempt > len(tries):
            return describe.queued(detail)
        training_job = describe.training_job_of(tries[attempt - 1])
        training = self._training.describe(training_job) if training_job else None
        return describe.seen_of_try(detail, attempt, training, num_nodes=leaf.spec.num_nodes)

    def start(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen:
        """Submit all its attempts, which Batch starts, unless they are there.

        Repeated freely: the token of the request makes one job of any number of them. The API reference says both that
        equal requests are the same and that the second is rejected; either is fine.
        """
        request = service_job_request(cycle, leaf, round_)
        queue, name = request["jobQueue"], request["jobName"]

        def is_there(error: BaseException) -> bool:
            is_known = name_of(error) == "Client" and "token" in message_of(error).casefold()
            return is_known or self._named(queue, name) is not None

        self.call(f"submitting {name}", "submit_service_job", accepted=is_there, **request)
        return Seen(is_queued=True, note=f"{QUEUED} {queue.rpartition('/')[2]}")

    def stop(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int, reason: str) -> None:
        """End the service job, and with it the attempt under way."""
        if detail := self._find(cycle, leaf, round_):
            self.terminate_job(detail["jobId"], reason, "service_job")

    def _find(self, cycle: Cycle, leaf: Leaf, round_: int) -> Detail | None:
        name = cycle.leaf_id(leaf, round_)
        if known := self._ids.get(name):
            return self._describe(known)
        found = self._named(sagemaker_placement_of(cycle.plan, leaf.spec).queue, name)
        if found is not None:
            self._ids[name] = str(found["jobId"])
        return found

    def _named(self, queue: str, name: str) -> Detail | None:
        """Return the oldest of exactly this name in any state; None if there is none, or it is not described yet."""
        ours = self.jobs_named(queue, name, "service_job")
        oldest = min(ours, key=lambda one: (one["createdAt"], one["jobId"]), default=None)
        return oldest and self._describe(oldest["jobId"])

    def _describe(self, job_id: str) -> Detail | None:
        doing, operation = f"describing service job {job_id}", "describe_service_job"
        return self.call(doing, operation, accepted=is_missing, jobId=job_id) or None
