"""Training jobs through a fair-share queue of AWS Batch: one service job for all tries of a leaf.

Rights: batch:SubmitServiceJob, TerminateServiceJob and TagResource on the queue and its jobs; DescribeServiceJob,
ListServiceJobs, DescribeJobQueues, DescribeSchedulingPolicies and DescribeServiceEnvironments on *;
sagemaker:DescribeTrainingJob on training-job/AWSBatch*; iam:PassRole on the execution roles.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jobs.cycle.states import Leaf
from jobs.plan.dag import Plan
from jobs.targets.batch.account import queue_problems, share_warning
from jobs.targets.batch.client import (
    AWS_ERRORS,
    MAX_REASON_CHARACTERS,
    BatchClient,
    Detail,
    is_retryable,
    name_of,
    translate,
)
from jobs.targets.batch.placement import placement_of
from jobs.targets.sagemaker.client import SageMakerClient, is_missing, message_of
from jobs.targets.sagemaker.controller import QUEUED
from jobs.targets.sagemaker.describe import Seen
from jobs.targets.sagemaker.placement import sagemaker_placement_of
from jobs.targets.sagemaker.requests import Cycle, Request
from jobs.targets.sagemaker.service_jobs import TYPE, queued, seen_of_try, service_job_request, tries_of
from jobs.targets.sagemaker.target import Road
from pipeline.core.errors import ConfigError
from pipeline.core.progress import Say

RIGHTS = (
    "batch:SubmitServiceJob, DescribeServiceJob, ListServiceJobs, TerminateServiceJob, TagResource and iam:PassRole on"
    " the roles"
)


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
                raise translate(error, doing, rights=RIGHTS) from error

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
            raise translate(error, doing, rights=RIGHTS) from error
        return found

    def terminate_service_job(self, job_id: str, reason: str) -> None:
        """End it in whatever state; one that has ended stays as it is."""
        text = reason[:MAX_REASON_CHARACTERS]
        self._call(f"ending service job {job_id}", "terminate_service_job", jobId=job_id, reason=text)

    def service_environments(self, names: Sequence[str]) -> list[Detail]:
        doing, operation = "describing service environments", "describe_service_environments"
        return self._described(doing, operation, "serviceEnvironments", names)


@dataclass(frozen=True)
class QueueRoad:
    """Implements `Road`. `warn` takes one line."""

    client: ServiceJobClient
    training: SageMakerClient
    warn: Say
    _ids: dict[str, str] = field(default_factory=dict)
    """Of service jobs by name, once known."""

    def check(self, plan: Plan) -> None:
        """Raises ConfigError with everything for which this account would not run the jobs of the plan."""
        problems, warnings = list[str](), list[str]()
        for name in dict.fromkeys(where for job in plan.jobs if (where := sagemaker_placement_of(plan, job).queue)):
            queues = self.client.queues([name])
            names = [one["serviceEnvironment"] for queue in queues for one in queue.get("serviceEnvironmentOrder", ())]
            problems += _problems(plan, name, queues, self.client.service_environments(names))
            policies = [arn for queue in queues if (arn := queue.get("schedulingPolicyArn"))]
            for policy in self.client.scheduling_policies(policies):
                if "fairsharePolicy" not in policy:
                    problems.append(f"queue {name}: its scheduling policy has no fair shares")
                for job in plan.jobs:
                    warnings += share_warning(name, placement_of(plan, job).share_identifier, policy)
        if problems:
            raise ConfigError(
                "\n  ".join(["AWS Batch in this account would not run this plan:", *dict.fromkeys(problems)]),
                expected="an enabled fair-share queue of type SAGEMAKER_TRAINING that can hold every job",
                next_command="aws batch describe-job-queues; correct jobs.sagemaker.queue, then trnjobs plan",
            )
        for line in dict.fromkeys(warnings):
            self.warn(line)

    def look(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen | None:
        detail = self._find(cycle, leaf, round_)
        if detail is None:
            return None
        tries = tries_of(detail)
        if attempt > len(tries):
            return queued(detail)
        one = tries[attempt - 1]
        training = self.training.describe(one.training_job) if one.training_job else None
        return seen_of_try(one, training, num_nodes=leaf.spec.num_nodes)

    def start(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen:
        """All its tries: Batch starts them."""
        request = service_job_request(cycle, leaf, round_)
        self.client.submit_service_job(request)
        return Seen(is_queued=True, note=f"{QUEUED} {request['jobQueue'].rpartition('/')[2]}")

    def stop(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int, reason: str) -> None:
        if detail := self._find(cycle, leaf, round_):
            self.client.terminate_service_job(detail["jobId"], reason)

    def _find(self, cycle: Cycle, leaf: Leaf, round_: int) -> Detail | None:
        name = cycle.leaf_id(leaf, round_)
        if known := self._ids.get(name):
            return self.client.describe_service_job(known)
        found = self.client.service_job_named(sagemaker_placement_of(cycle.plan, leaf.spec).queue, name)
        if found is not None:
            self._ids[name] = str(found["jobId"])
        return found


@dataclass(frozen=True)
class ByPlacement:
    """Implements `Road`: each job goes the way that its plan says, whatever the settings of whoever follows it."""

    direct: Road
    queue: Road

    def check(self, plan: Plan) -> None:
        self.direct.check(plan)
        self.queue.check(plan)

    def look(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen | None:
        return self._of(cycle, leaf).look(cycle, leaf, round_, attempt)

    def start(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Seen:
        return self._of(cycle, leaf).start(cycle, leaf, round_, attempt)

    def stop(self, cycle: Cycle, leaf: Leaf, round_: int, attempt: int, reason: str) -> None:
        self._of(cycle, leaf).stop(cycle, leaf, round_, attempt, reason)

    def _of(self, cycle: Cycle, leaf: Leaf) -> Road:
        return self.queue if sagemaker_placement_of(cycle.plan, leaf.spec).queue else self.direct


def _problems(plan: Plan, name: str, queues: Sequence[Detail], environments: Sequence[Detail]) -> Iterator[str]:
    if not queues:
        yield f"queue {name}: does not exist in this account and region"
        return
    (queue,) = queues
    yield from queue_problems(name, queue, is_shared=True)
    if queue.get("jobQueueType") != TYPE:
        yield f"queue {name}: of type {queue.get('jobQueueType', 'EC2')}; training jobs need one of {TYPE}"
    usable = [one for one in environments if one.get("state") != "DISABLED" and one.get("status") != "INVALID"]
    if not usable:
        yield f"queue {name}: no enabled service environment"
        return
    limits = [limit for one in usable for limit in one["capacityLimits"] if limit["capacityUnit"] == "NUM_INSTANCES"]
    most = max((int(limit["maxCapacity"]) for limit in limits), default=None)
    for job in plan.jobs:
        if most is not None and job.num_nodes > most and sagemaker_placement_of(plan, job).queue == name:
            yield f"{job.name}: {job.num_nodes} nodes at once; the service environment of {name} has {most:,}"
