"""From a job to the requests of SageMaker, and the names that make them idempotent. Pure.

CreateTrainingJob refuses a name that exists, so the name of a try is all that has to be the same whoever makes it.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from jobs.cycle.states import Leaf, leaves_of
from jobs.plan.dag import Plan
from jobs.plan.ml_machines import ml_machine
from jobs.plan.script import ENTRY
from jobs.plan.spec import Retry
from jobs.targets.batch.placement import placement_of
from jobs.targets.sagemaker.placement import role_of, sagemaker_placement_of
from pipeline.core.fingerprint import fingerprint
from pipeline.parallel.world import ARRAY_INDEX, ATTEMPT

Request = dict[str, Any]
PLAN = "TRNJOBS_PLAN"
"""In the environment of every job: whose it is."""
MAX_NAME, MAX_QUEUED_NAME = 63, 23
"""Of a training job. Through a queue AWS Batch puts 40 characters around ours."""
HASH_CHARACTERS = 8


@dataclass(frozen=True)
class Cycle:
    """A plan in one life of its cycle. `life`: when it was claimed; a workspace that was emptied begins another."""

    plan: Plan
    life: float

    def job_id(self, job: str, round_: int) -> str:
        """How records name a job of a round: as its training jobs begin."""
        return _name([self.plan.pipeline, self.plan.cycle, job, f"r{round_}"], [self._key, job, round_], MAX_NAME)

    def training_job(self, leaf: Leaf, round_: int, attempt: int) -> str:
        """The name of one try, the same on every machine and different for any other try of any cycle."""
        index = [] if leaf.index is None else [str(leaf.index)]
        words = [self.plan.pipeline, self.plan.cycle, leaf.spec.name, *index, f"r{round_}a{attempt}"]
        return _name(words, [self._key, leaf.name, round_, attempt], MAX_NAME)

    def queued_job(self, leaf: Leaf, round_: int) -> str:
        """The name of all tries together, where AWS Batch makes them."""
        index = [] if leaf.index is None else [str(leaf.index)]
        return _name([leaf.spec.name, *index], [self._key, leaf.name, round_], MAX_QUEUED_NAME)

    @property
    def _key(self) -> str:
        return f"{self.plan.plan_id} {self.life!r}"


def _name(words: list[str], content: list[str | int], limit: int) -> str:
    """Words and a hash of the content, in letters, digits and single hyphens; of the words the end stays: which try."""
    text = re.sub(r"[^A-Za-z0-9]+", "-", "-".join(words)).strip("-")
    kept = text if len(text) <= limit - HASH_CHARACTERS - 1 else text[-(limit - HASH_CHARACTERS - 1) :].lstrip("-")
    return f"{kept}-{fingerprint(content)[:HASH_CHARACTERS]}"


def training_job_request(cycle: Cycle, leaf: Leaf, *, name: str, attempt: int | None) -> Request:
    """CreateTrainingJob. `attempt`: which try, from 1; None where AWS Batch repeats the request."""
    plan, job, where = cycle.plan, leaf.spec, sagemaker_placement_of(cycle.plan, leaf.spec)
    entry = len(ENTRY) if job.command[: len(ENTRY)] == ENTRY else 1
    nodes = max(1, job.num_nodes)
    resources: Request = {
        "InstanceType": ml_machine(job.resources),
        "InstanceCount": nodes,
        "VolumeSizeInGB": where.volume_gib,
    }
    if where.keep_alive_s:
        resources["KeepAlivePeriodInSeconds"] = where.keep_alive_s
    algorithm: Request = {
        "TrainingImage": job.image,
        "TrainingInputMode": "File",
        "ContainerEntrypoint": [*job.command[:entry]],
    }
    if job.command[entry:]:
        algorithm["ContainerArguments"] = [*job.command[entry:]]
    request: Request = {
        "TrainingJobName": name,
        "RoleArn": role_of(plan, job),
        "AlgorithmSpecification": algorithm,
        "OutputDataConfig": {"S3OutputPath": where.output or f"{plan.workspace.rstrip('/')}/sagemaker"},
        "ResourceConfig": resources,
        "StoppingCondition": {"MaxRuntimeInSeconds": job.timeout_s},
        "Environment": environment(plan, leaf, attempt),
        "Tags": [{"Key": key, "Value": value} for key, value in tags(plan, leaf).items()],
    }
    if where.subnets:
        request["VpcConfig"] = {"Subnets": [*where.subnets], "SecurityGroupIds": [*where.security_groups]}
    if where.spot_wait_s:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = job.timeout_s + where.spot_wait_s
    if nodes > 1 and where.infra_check:
        request["InfraCheckConfig"] = {"EnableInfraCheck": True}
    return request


def environment(plan: Plan, leaf: Leaf, attempt: int | None) -> dict[str, str]:
    variables = {
        **leaf.spec.environment,
        "TRNPIPE_CYCLE": plan.cycle,
        "TRNPIPE_WORKSPACE": plan.workspace,
        "TRNJOBS_JOB": leaf.spec.name,
        PLAN: plan.plan_id,
    }
    if attempt is not None:
        variables[ATTEMPT] = str(attempt)
    if leaf.index is not None:
        variables[ARRAY_INDEX] = str(leaf.index)
    return dict(sorted(variables.items()))


def tags(plan: Plan, leaf: Leaf) -> dict[str, str]:
    return {"pipeline": plan.pipeline, "cycle": plan.cycle, "job": leaf.name}


def sagemaker_requests(plan: Plan) -> list[Request]:
    """The first request of every job of a cycle, of an array that of each child, as if it were claimed at 1970."""
    cycle, shown = Cycle(plan, 0.0), list[Request]()
    for leaf in (leaf for job in plan.jobs for leaf in leaves_of(job)):
        if sagemaker_placement_of(plan, leaf.spec).via == "queue":
            shown.append({"SubmitServiceJob": service_job_request(cycle, leaf, 1)})
        else:
            name = cycle.training_job(leaf, 1, 1)
            shown.append({"CreateTrainingJob": training_job_request(cycle, leaf, name=name, attempt=1)})
    return shown


# Service jobs of AWS Batch: the same request as text, and when AWS Batch is to repeat it.

SERVICE_TYPE = "SAGEMAKER_TRAINING"
REASON = "Received status from SageMaker: "
"""Begins the status reason of an attempt that SageMaker has ended. Source: user guide of AWS Batch, service jobs."""


def retry_rules(retry: Retry) -> list[dict[str, str]]:
    """EvaluateOnExit of service jobs, which match the beginning of a status reason alone; the first decides.

    The exit code is there because trnjobs-entry begins the failure file with it (jobs/node/sagemaker.py).
    """
    again = [f"AlgorithmError: exit {code}" for code in retry.exit_codes]
    patterns = [f"{REASON}{reason}*" for reason in (*again, "InternalServerError", "CapacityError")]
    return [{"action": "RETRY", "onStatusReason": one} for one in patterns] + [
        {"action": "EXIT", "onStatusReason": "*"}
    ]


def service_job_request(cycle: Cycle, leaf: Leaf, round_: int) -> Request:
    """SubmitServiceJob. The client token is that of the name: sent twice, it makes one job."""
    plan, job = cycle.plan, leaf.spec
    name, where = cycle.queued_job(leaf, round_), sagemaker_placement_of(plan, leaf.spec)
    share = placement_of(plan, job)
    payload = training_job_request(cycle, leaf, name=name, attempt=None)
    request: Request = {
        "jobName": name,
        "jobQueue": where.queue,
        "serviceJobType": SERVICE_TYPE,
        "serviceRequestPayload": json.dumps(payload, separators=(",", ":")),
        "schedulingPriority": share.priority,
        "retryStrategy": {"attempts": job.retry.attempts, "evaluateOnExit": retry_rules(job.retry)},
        "timeoutConfig": {"attemptDurationSeconds": job.timeout_s},
        "tags": tags(plan, leaf) | {"plan": plan.plan_id},
        "clientToken": fingerprint([name, plan.plan_id, repr(cycle.life)]),
    }
    if share.share_identifier:
        request["shareIdentifier"] = share.share_identifier
    return request
