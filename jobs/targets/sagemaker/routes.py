"""The two ways to a training job: SageMaker's own calls, or a queue of AWS Batch that teams share."""

from dataclasses import dataclass, field

from jobs.cycle.job_states import Leaf
from jobs.plan.dag import Plan
from jobs.targets.batch.account import queue_problems, refuse_account, share_warning
from jobs.targets.batch.client import Detail
from jobs.targets.placement import placement_of, sagemaker_placement_of
from jobs.targets.sagemaker.client import SageMakerClient, ServiceJobClient
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
from jobs.targets.sagemaker.requests import SERVICE_JOB_TYPE, Cycle, direct_request, service_job_request
from pipeline.core.progress import Say


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
