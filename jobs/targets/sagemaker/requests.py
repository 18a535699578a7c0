"""From a job to a training job, with SageMaker's own calls or as a service job of AWS Batch, and their names. Pure.

CreateTrainingJob refuses a name that exists, so the name of a try is all that has to be the same whoever makes it.

A service job is all tries of one leaf in one round. Batch starts them, each as a training job of its own name. It knows
no exit codes: its rules look at the beginning of the reason, where `trnjobs-entry` has put the code.

Sources: API reference of AWS Batch (SubmitServiceJob), its user guide (service jobs: payload, retries; `AWSBatch`, the
name in the payload and 32 characters name a training job).
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from jobs.cycle.job_states import Leaf, leaves_of
from jobs.node.environment import STARTS, job_variables
from jobs.plan.dag import Plan
from jobs.plan.resources import has_accelerator, ml_machine
from jobs.plan.retry import Retry
from jobs.plan.script import ENTRY
from jobs.targets.placement import placement_of, sagemaker_placement_of
from jobs.targets.sagemaker.describe import RECEIVED
from pipeline.core.fingerprint import fingerprint
from pipeline.parallel.world import ARRAY_INDEX, ATTEMPT

Request = dict[str, Any]
PLAN = "TRNJOBS_PLAN"
"""In the environment of every job: whose it is."""
SERVICE_JOB_TYPE = "SAGEMAKER_TRAINING"
MAX_NAME, MAX_PAYLOAD_NAME = 63, 23
HASH_CHARACTERS, MAX_FIRST = 8, 31


@dataclass(frozen=True)
class Cycle:
    """A plan in one life of its cycle. `life`: when it was claimed; a workspace that was emptied begins another."""

    plan: Plan
    life: float

    def leaf_id(self, leaf: Leaf, round_: int) -> str:
        """Of all tries of a leaf in a round: the name of its service job, where its starts are counted, and the id in
        records (of an array that of the whole job)."""
        return self._named(leaf, f"r{round_}", round_)

    def training_job(self, leaf: Leaf, round_: int, attempt: int) -> str:
        """The name of one try, the same on every machine and different for any other try of any cycle."""
        return self._named(leaf, f"r{round_}a{attempt}", round_, attempt)

    def _named(self, leaf: Leaf, last: str, *numbers: int) -> str:
        index = [] if leaf.index is None else [str(leaf.index)]
        words = [self.plan.pipeline, self.plan.cycle, leaf.spec.name, *index, last]
        return _name(words, [f"{self.plan.plan_id} {self.life!r}", leaf.name, *numbers], MAX_NAME)


def _name(words: list[str], content: list[str | int], limit: int) -> str:
    """Words and a hash of the content, in letters, digits and single hyphens.

    Of too many words the first stays, by which rights are given, and the end: which try.
    """
    text, room = _dashed("-".join(words)), limit - HASH_CHARACTERS - 1
    if len(text) > room:
        first = _dashed(words[0])[:MAX_FIRST] + "-" if len(words) > 1 else ""
        text = first + text[-(room - len(first)) :].lstrip("-")
    return f"{text}-{fingerprint(content)[:HASH_CHARACTERS]}"


def _dashed(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def training_job_request(
    cycle: Cycle, leaf: Leaf, *, name: str, attempt: int | None, starts: str = "", round_: int = 1
) -> Request:
    """CreateTrainingJob. `attempt`: which try, from 1; None: the nodes count it. `starts`: where they count."""
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
        "RoleArn": placement_of(plan, job).job_role,
        "AlgorithmSpecification": algorithm,
        "OutputDataConfig": {"S3OutputPath": where.output or f"{plan.workspace.rstrip('/')}/sagemaker"},
        "ResourceConfig": resources,
        "StoppingCondition": {"MaxRuntimeInSeconds": job.timeout_s},
        "Environment": environment(plan, leaf, attempt, starts, round_),
        "Tags": [{"Key": key, "Value": value} for key, value in tags(plan, leaf).items()],
    }
    if where.subnets:
        request["VpcConfig"] = {"Subnets": [*where.subnets], "SecurityGroupIds": [*where.security_groups]}
    if where.spot_wait_s:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = job.timeout_s + where.spot_wait_s
    if nodes > 1 and where.infra_check and has_accelerator(job.resources):
        request["InfraCheckConfig"] = {"EnableInfraCheck": True}
    return request


def direct_request(cycle: Cycle, leaf: Leaf, round_: int, attempt: int) -> Request:
    """CreateTrainingJob of one try. With Spot capacity SageMaker starts it again by itself, as often as it likes."""
    starts = cycle.leaf_id(leaf, round_) if sagemaker_placement_of(cycle.plan, leaf.spec).spot_wait_s else ""
    name = cycle.training_job(leaf, round_, attempt)
    return training_job_request(cycle, leaf, name=name, attempt=attempt, starts=starts, round_=round_)


def service_job_request(cycle: Cycle, leaf: Leaf, round_: int) -> Request:
    """SubmitServiceJob. The same token for the same job: Batch makes it once.

    The time limit of a try is in the payload, and so SageMaker's, as without a queue.
    """
    plan, job, name = cycle.plan, leaf.spec, cycle.leaf_id(leaf, round_)
    where, of_batch = sagemaker_placement_of(plan, job), placement_of(plan, job)
    # What Batch makes names of training jobs of: it needs 40 of their characters for itself.
    payload_name = _name([job.name], [name], MAX_PAYLOAD_NAME)
    payload = training_job_request(cycle, leaf, name=payload_name, attempt=None, starts=name, round_=round_)
    return {
        "jobName": name,
        "jobQueue": where.queue,
        "serviceJobType": SERVICE_JOB_TYPE,
        "serviceRequestPayload": json.dumps(payload, separators=(",", ":")),
        "shareIdentifier": of_batch.share_identifier,
        "schedulingPriority": of_batch.priority,
        "retryStrategy": {"attempts": job.retry.attempts, "evaluateOnExit": retry_rules(job.retry)},
        "tags": tags(plan, leaf),
        "clientToken": name,
    }


def sagemaker_requests(plan: Plan) -> list[Request]:
    """The first request of every job of a cycle, of an array that of each child, as if it were claimed at 1970."""
    cycle, shown = Cycle(plan, 0.0), list[Request]()
    for leaf in (leaf for job in plan.jobs for leaf in leaves_of(job)):
        if sagemaker_placement_of(plan, leaf.spec).queue:
            shown.append({"SubmitServiceJob": service_job_request(cycle, leaf, 1)})
        else:
            shown.append({"CreateTrainingJob": direct_request(cycle, leaf, 1, 1)})
    return shown


def retry_rules(retry: Retry) -> list[Request]:
    """The first that matches decides; without a match Batch would try again, so the last matches everything."""
    causes = [*(f"AlgorithmError: exit {code} " for code in retry.exit_codes), "InternalServerError", "CapacityError"]
    again = [{"action": "RETRY", "onStatusReason": f"{RECEIVED}{cause}*"} for cause in causes]
    return [*again, {"action": "EXIT", "onStatusReason": "*"}]


def environment(plan: Plan, leaf: Leaf, attempt: int | None, starts: str, round_: int) -> dict[str, str]:
    variables = {
        **leaf.spec.environment,
        PLAN: plan.plan_id,
        **job_variables(plan, leaf.spec, round_),
    }
    if attempt is not None:
        variables[ATTEMPT] = str(attempt)
    if starts:
        variables[STARTS] = starts
    if leaf.index is not None:
        variables[ARRAY_INDEX] = str(leaf.index)
    return dict(sorted(variables.items()))


def tags(plan: Plan, leaf: Leaf) -> dict[str, str]:
    return {"pipeline": plan.pipeline, "cycle": plan.cycle, "job": leaf.name}
