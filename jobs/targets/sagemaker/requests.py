"""From a job to a training job, with SageMaker's own calls or as a service job of AWS Batch; names, and what is refused
before anything is sent.

CreateTrainingJob refuses a name that exists, so the name of an attempt is all that has to be the same whoever makes it.

A service job is all attempts of one leaf in one round. Batch starts them, each as a training job of its own name. It
knows no exit codes: its rules look at the beginning of the reason, where `trnjobs-entry` has put the code.

Sources: API reference of AWS Batch (SubmitServiceJob), its user guide (service jobs: payload, retries; `AWSBatch`, the
name in the payload and 32 characters name a training job); botocore's model of SageMaker, which validates requests.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from jobs.cycle.job_states import Task, tasks_of
from jobs.node.environment import STARTS, job_variables
from jobs.plan.cycle import ENTRY
from jobs.plan.resources import has_accelerator, ml_machine
from jobs.plan.spec import JobPlan, JobSpec, Retry, refuse
from jobs.targets.base import placement_of, sagemaker_placement_of
from jobs.targets.batch.requests import SHARE
from pipeline.core.fingerprint import fingerprint
from pipeline.parallel.world import ARRAY_INDEX, ATTEMPT

Request = dict[str, Any]
PLAN = "TRNJOBS_PLAN"
"""In the environment of every job: whose it is."""
SERVICE_JOB_TYPE = "SAGEMAKER_TRAINING"
RECEIVED = "Received status from SageMaker: "
"""Begins what SageMaker has said of a service job; other reasons are Batch's own."""
MAX_NAME, MAX_PAYLOAD_NAME = 63, 23
HASH_CHARACTERS, MAX_FIRST = 8, 31
MAX_PAYLOAD_BYTES = 10 * 1024
MAX_VALUE, MAX_WORDS, MAX_WORD = 512, 100, 256


@dataclass(frozen=True)
class CycleRun:
    """A plan in one life of its cycle. `life`: when it was claimed; a workspace that was emptied begins another."""

    plan: JobPlan
    claimed_at: float

    def task_id(self, task: Task, submission: int) -> str:
        """Name all attempts of a leaf in a round: its service job, its starts, and the id in records."""
        return self._named(task, f"r{submission}", submission)

    def training_job(self, task: Task, submission: int, attempt: int) -> str:
        """Name one attempt: the same on every machine, and different for any other attempt of any cycle."""
        return self._named(task, f"r{submission}a{attempt}", submission, attempt)

    def _named(self, task: Task, last: str, *numbers: int) -> str:
        index = [] if task.index is None else [str(task.index)]
        words = [self.plan.pipeline, self.plan.cycle, task.spec.name, *index, last]
        return _name(words, [f"{self.plan.plan_id} {self.claimed_at!r}", task.name, *numbers], MAX_NAME)


def _name(words: list[str], content: list[str | int], limit: int) -> str:
    """Join words and a hash of the content, in letters, digits and single hyphens.

    Of too many words the first stays, by which rights are given, and the end: which attempt.
    """
    text, room = _dashed("-".join(words)), limit - HASH_CHARACTERS - 1
    if len(text) > room:
        first = _dashed(words[0])[:MAX_FIRST] + "-" if len(words) > 1 else ""
        text = first + text[-(room - len(first)) :].lstrip("-")
    return f"{text}-{fingerprint(content)[:HASH_CHARACTERS]}"


def _dashed(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def training_job_request(
    cycle: CycleRun, task: Task, *, name: str, attempt: int | None, starts: str = "", submission: int = 1
) -> Request:
    """Return CreateTrainingJob. `attempt`: from 1; None: the nodes count it. `starts`: where they count."""
    plan, job, where = cycle.plan, task.spec, sagemaker_placement_of(cycle.plan, task.spec)
    entry = len(ENTRY) if job.command[: len(ENTRY)] == ENTRY else 1
    nodes = max(1, job.num_nodes)
    variables = {**job.environment, PLAN: plan.plan_id, **job_variables(plan, job, submission)}
    variables |= {} if attempt is None else {ATTEMPT: str(attempt)}
    variables |= {STARTS: starts} if starts else {}
    variables |= {} if task.index is None else {ARRAY_INDEX: str(task.index)}
    request: Request = {
        "TrainingJobName": name,
        "RoleArn": placement_of(plan, job).job_role,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [*job.command[:entry]],
        },
        "OutputDataConfig": {"S3OutputPath": f"{plan.workspace.rstrip('/')}/sagemaker"},
        "ResourceConfig": {
            "InstanceType": ml_machine(job.resources),
            "InstanceCount": nodes,
            "VolumeSizeInGB": where.volume_gib,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": job.timeout_s},
        "Environment": dict(sorted(variables.items())),
        "Tags": [{"Key": key, "Value": value} for key, value in tags(plan, task).items()],
    }
    if job.command[entry:]:
        request["AlgorithmSpecification"]["ContainerArguments"] = [*job.command[entry:]]
    if where.keep_alive_s:
        request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = where.keep_alive_s
    if where.subnets or where.security_groups:  # botocore's model wants both
        request["VpcConfig"] = {"Subnets": [*where.subnets], "SecurityGroupIds": [*where.security_groups]}
    if where.spot_wait_s:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = job.timeout_s + where.spot_wait_s
    if nodes > 1 and has_accelerator(job.resources):
        request["InfraCheckConfig"] = {"EnableInfraCheck": True}
    return request


def direct_request(cycle: CycleRun, task: Task, submission: int, attempt: int) -> Request:
    """Return CreateTrainingJob of one attempt. With Spot capacity SageMaker starts it again by itself."""
    starts = cycle.task_id(task, submission) if sagemaker_placement_of(cycle.plan, task.spec).spot_wait_s else ""
    name = cycle.training_job(task, submission, attempt)
    return training_job_request(cycle, task, name=name, attempt=attempt, starts=starts, submission=submission)


def service_job_request(cycle: CycleRun, task: Task, submission: int) -> Request:
    """Return SubmitServiceJob. The same token for the same job: Batch makes it once."""
    plan, job, name = cycle.plan, task.spec, cycle.task_id(task, submission)
    of_batch = placement_of(plan, job)
    payload_name = _name([job.name], [name], MAX_PAYLOAD_NAME)  # Batch adds 40 characters for each training job
    payload = training_job_request(cycle, task, name=payload_name, attempt=None, starts=name, submission=submission)
    return {
        "jobName": name,
        "jobQueue": sagemaker_placement_of(plan, job).queue,
        "serviceJobType": SERVICE_JOB_TYPE,
        "serviceRequestPayload": json.dumps(payload, separators=(",", ":")),
        "shareIdentifier": of_batch.share_identifier,
        "schedulingPriority": of_batch.priority,
        "retryStrategy": {"attempts": job.retry.attempts, "evaluateOnExit": retry_rules(job.retry)},
        "tags": tags(plan, task),
        "clientToken": name,
    }


def sagemaker_requests(plan: JobPlan) -> list[Request]:
    """Return the first request of every leaf, as if the cycle were claimed at 1970."""
    cycle, shown = CycleRun(plan, 0.0), list[Request]()
    for task in (task for job in plan.jobs for task in tasks_of(job)):
        if sagemaker_placement_of(plan, task.spec).queue:
            shown.append({"SubmitServiceJob": service_job_request(cycle, task, 1)})
        else:
            shown.append({"CreateTrainingJob": direct_request(cycle, task, 1, 1)})
    return shown


def retry_rules(retry: Retry) -> list[Request]:
    """Return the rules; the first match decides. Without one Batch would try again, so the last matches everything."""
    causes = [*(f"AlgorithmError: exit {code} " for code in retry.exit_codes), "InternalServerError", "CapacityError"]
    again = [{"action": "RETRY", "onStatusReason": f"{RECEIVED}{cause}*"} for cause in causes]
    return [*again, {"action": "EXIT", "onStatusReason": "*"}]


def tags(plan: JobPlan, task: Task) -> dict[str, str]:
    return {"pipeline": plan.pipeline, "cycle": plan.cycle, "job": task.name}


def check_plan(plan: JobPlan) -> None:
    """Raises ConfigError with everything that would be refused, or taken and never run."""
    of_jobs = ((job, [*_job_problems(plan, job)] or _request_problems(plan, job)) for job in plan.jobs)
    problems = (f"{job.name}: {one}" for job, found in of_jobs for one in found)
    refuse(plan, problems, platform="SageMaker", next_command="trnjobs plan --target sagemaker")


def _job_problems(plan: JobPlan, job: JobSpec) -> Iterator[str]:
    """Check machine, workspace, role, shape, command and environment."""
    machine = ml_machine(job.resources)
    if not machine:
        yield f"{job.resources.vcpus} vCPU and {job.resources.memory_mib:,} MiB a node; expected an instance (jobs.*)"
    elif machine not in _model("sagemaker").shape_for("TrainingInstanceType").enum:
        yield f"instance type {machine}, which SageMaker does not have; expected one of its training instances"
    if not plan.workspace.startswith("s3://"):
        yield f"workspace {plan.workspace}; expected one on S3 (s3://...), which training jobs share"
    if not placement_of(plan, job).job_role or not job.image:
        yield "no role or no image; expected an execution role (jobs.role) and an image in Amazon ECR (jobs.image)"
    if len(job.command) > MAX_WORDS or any(len(word) > MAX_WORD or "\n" in word for word in job.command):
        seen = f"a command of {len(job.command)} words, the longest of {max(map(len, job.command)):,} characters"
        yield f"{seen}; expected at most {MAX_WORDS} of {MAX_WORD}, each on one line"
    for name, value in job.environment.items():
        if len(value) > MAX_VALUE:
            yield f"environment variable {name} of {len(value):,} characters; expected at most {MAX_VALUE}"


def _request_problems(plan: JobPlan, job: JobSpec) -> Iterator[str]:
    cycle, task = CycleRun(plan, 0.0), Task(job, job.array_size - 1 if job.array_size else None)
    yield from request_problems("sagemaker", "CreateTrainingJob", direct_request(cycle, task, 1, job.retry.attempts))
    if not sagemaker_placement_of(plan, job).queue:
        return
    queued = service_job_request(cycle, task, 1)
    share, payload = queued["shareIdentifier"], queued["serviceRequestPayload"]
    yield from request_problems("batch", "SubmitServiceJob", queued)
    # Batch does not look into the payload, and botocore has no bounds.
    if not SHARE.match(share):
        yield f"share identifier {share!r}; expected letters and digits only, 1 to 255 (jobs.share_identifier)"
    if (size := len(payload.encode())) > MAX_PAYLOAD_BYTES:
        yield f"a payload of {size:,} bytes; expected at most {MAX_PAYLOAD_BYTES:,} (command and environment)"


@cache
def _model(service: str) -> Any:
    from botocore.session import Session  # takes a while to import

    return Session().get_service_model(service)


def request_problems(service: str, operation: str, request: Request) -> Iterator[str]:
    """Yield what botocore says against a request: types, required fields and lower bounds."""
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(request, _model(service).operation_model(operation).input_shape)
    if report.has_errors():
        yield " ".join(report.generate_report().split())
