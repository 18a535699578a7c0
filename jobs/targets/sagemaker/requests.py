"""Build and check the requests for training jobs, either by CreateTrainingJob or as an AWS Batch service job.

CreateTrainingJob refuses a name that already exists. Because every process derives the same name for an attempt, no
attempt can be started twice.

A service job covers all attempts of one task in one submission, and Batch starts a training job for each of them. Batch
does not know the exit codes. Its retry rules match the beginning of the failure reason instead, which is where
`trnjobs-entry` writes the exit code.

Sources: the API reference of AWS Batch (SubmitServiceJob), its user guide (service jobs: payload, retries and the names
of training jobs, which consist of `AWSBatch`, the name in the payload and 32 characters), and botocore's model of
SageMaker, which validates requests.
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
from jobs.plan.resources import PREFIX, ml_machine
from jobs.plan.spec import JobPlan, JobSpec, Retry, refuse
from jobs.targets.base import placement_of, sagemaker_placement_of
from jobs.targets.batch.requests import SHARE, Request
from pipeline.core.fingerprint import fingerprint
from pipeline.parallel.world import ARRAY_INDEX, ATTEMPT

PLAN = "TRNJOBS_PLAN"
"""Environment variable of every job that contains the id of its plan."""
SERVICE_JOB_TYPE = "SAGEMAKER_TRAINING"
RECEIVED = "Received status from SageMaker: "
"""Prefix of the reasons of a service job that SageMaker has reported. Reasons without it were set by Batch."""
MAX_NAME, MAX_PAYLOAD_NAME = 63, 23
HASH_CHARACTERS, MAX_FIRST = 8, 31
MAX_PAYLOAD_BYTES = 10 * 1024
MAX_VALUE, MAX_ARGUMENTS, MAX_ARGUMENT = 512, 100, 256


@dataclass(frozen=True)
class CycleRun:
    """A claimed plan. `claimed_at` distinguishes it from an earlier claim, in case the workspace was emptied since."""

    plan: JobPlan
    claimed_at: float

    def task_id(self, task: Task, submission: int) -> str:
        """Return the name for a task in a submission, which its record, service job and count of starts all use."""
        return self._name(task, f"r{submission}", submission)

    def training_job(self, task: Task, submission: int, attempt: int) -> str:
        """Return the name of one attempt, which is unique over all cycles and the same on every machine."""
        return self._name(task, f"r{submission}a{attempt}", submission, attempt)

    def _name(self, task: Task, last: str, *numbers: int) -> str:
        index = [] if task.index is None else [str(task.index)]
        parts = [self.plan.pipeline, self.plan.cycle, task.spec.name, *index, last]
        return _hashed_name(parts, [f"{self.plan.plan_id} {self.claimed_at!r}", task.name, *numbers], MAX_NAME)


def _hashed_name(parts: list[str], content: list[str | int], limit: int) -> str:
    """Join the parts and a hash of the content to a name of letters, digits and single hyphens.

    If the name is too long, the middle is dropped. The first part is kept because IAM policies refer to it, and the end
    because it contains the number of the attempt.
    """
    text, max_length = _dashed("-".join(parts)), limit - HASH_CHARACTERS - 1
    if len(text) > max_length:
        first = _dashed(parts[0])[:MAX_FIRST] + "-" if len(parts) > 1 else ""
        text = first + text[-(max_length - len(first)) :].lstrip("-")
    return f"{text}-{fingerprint(content)[:HASH_CHARACTERS]}"


def _dashed(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def training_job_request(
    cycle: CycleRun, task: Task, *, name: str, attempt: int | None, starts: str = "", submission: int = 1
) -> Request:
    """Return the CreateTrainingJob request.

    If `attempt` is None, the nodes determine the attempt by counting starts under the name `starts`.
    """
    plan, job, placement = cycle.plan, task.spec, sagemaker_placement_of(cycle.plan, task.spec)
    entry = len(ENTRY) if job.command[: len(ENTRY)] == ENTRY else 1
    nodes = max(1, job.num_nodes)
    variables = {
        **job.environment,
        PLAN: plan.plan_id,
        **job_variables(plan, job, submission, is_batch=attempt is None),
    }
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
            "VolumeSizeInGB": placement.volume_gib,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": job.timeout_s},
        "Environment": dict(sorted(variables.items())),
        "Tags": [{"Key": key, "Value": value} for key, value in tags(plan, task).items()],
    }
    if job.command[entry:]:
        request["AlgorithmSpecification"]["ContainerArguments"] = [*job.command[entry:]]
    if placement.keep_alive_s:
        request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = placement.keep_alive_s
    if placement.subnets or placement.security_groups:  # both are required by botocore's model
        request["VpcConfig"] = {"Subnets": [*placement.subnets], "SecurityGroupIds": [*placement.security_groups]}
    if placement.spot_wait_s:
        request["EnableManagedSpotTraining"] = True
        request["StoppingCondition"]["MaxWaitTimeInSeconds"] = job.timeout_s + placement.spot_wait_s
    # An instance with accelerators has an infrastructure check.
    if nodes > 1 and re.match(r"(trn|inf|p|g|dl)\d", job.resources.instance_type.removeprefix(PREFIX)):
        request["InfraCheckConfig"] = {"EnableInfraCheck": True}
    return request


def direct_request(cycle: CycleRun, task: Task, submission: int, attempt: int) -> Request:
    """Return the CreateTrainingJob request for one attempt. On Spot capacity, SageMaker restarts it automatically."""
    starts = cycle.task_id(task, submission) if sagemaker_placement_of(cycle.plan, task.spec).spot_wait_s else ""
    name = cycle.training_job(task, submission, attempt)
    return training_job_request(cycle, task, name=name, attempt=attempt, starts=starts, submission=submission)


def service_job_request(cycle: CycleRun, task: Task, submission: int) -> Request:
    """Return the SubmitServiceJob request, which is idempotent because of its client token."""
    plan, job, name = cycle.plan, task.spec, cycle.task_id(task, submission)
    batch_placement, sagemaker_placement = placement_of(plan, job), sagemaker_placement_of(plan, job)
    payload_name = _hashed_name([job.name], [name], MAX_PAYLOAD_NAME)  # Batch adds 40 characters per training job
    payload = training_job_request(cycle, task, name=payload_name, attempt=None, starts=name, submission=submission)
    share: Request = {"shareIdentifier": batch_placement.share_identifier}
    if sagemaker_placement.quota_share:  # without a number of retries, Batch would requeue a preempted job forever
        preemption = {"preemptionRetriesBeforeTermination": job.retry.preemptions}
        share = {"quotaShareName": sagemaker_placement.quota_share, "preemptionConfiguration": preemption}
    return {
        "jobName": name,
        "jobQueue": sagemaker_placement.queue,
        "serviceJobType": SERVICE_JOB_TYPE,
        "serviceRequestPayload": json.dumps(payload, separators=(",", ":")),
        **share,
        "schedulingPriority": batch_placement.priority,
        "retryStrategy": {"attempts": job.retry.batch_attempts, "evaluateOnExit": retry_rules(job.retry)},
        "tags": tags(plan, task),
        "clientToken": name,
    }


def sagemaker_requests(plan: JobPlan) -> list[Request]:
    """Return the first request of every task, for display. The time of the claim is set to 0."""
    cycle, requests = CycleRun(plan, 0.0), list[Request]()
    for task in (task for job in plan.jobs for task in tasks_of(job)):
        if sagemaker_placement_of(plan, task.spec).queue:
            requests.append({"SubmitServiceJob": service_job_request(cycle, task, 1)})
        else:
            requests.append({"CreateTrainingJob": direct_request(cycle, task, 1, 1)})
    return requests


def retry_rules(retry: Retry) -> list[Request]:
    """Return the retry rules. The last rule matches everything, because Batch retries if no rule matches."""
    causes = [*(f"AlgorithmError: exit {code} " for code in retry.exit_codes), "InternalServerError", "CapacityError"]
    retries = [{"action": "RETRY", "onStatusReason": f"{RECEIVED}{cause}*"} for cause in causes]
    return [*retries, {"action": "EXIT", "onStatusReason": "*"}]


def tags(plan: JobPlan, task: Task) -> dict[str, str]:
    return {"pipeline": plan.pipeline, "cycle": plan.cycle, "job": task.name}


def check_plan(plan: JobPlan) -> None:
    """Check that SageMaker would accept and run all jobs of the plan. Raises a ConfigError that lists all problems."""
    by_job = ((job, [*_job_problems(plan, job)] or _request_problems(plan, job)) for job in plan.jobs)
    problems = (f"{job.name}: {problem}" for job, job_problems in by_job for problem in job_problems)
    refuse(plan, problems, platform="SageMaker", next_command="trnjobs plan --target sagemaker")


def _job_problems(plan: JobPlan, job: JobSpec) -> Iterator[str]:
    """Yield a line for each problem with the machine, workspace, role, command or environment of a job."""
    machine = ml_machine(job.resources)
    if not machine:
        needs = job.resources
        yield f"no m7i instance has {needs.vcpus} vCPU and {needs.memory_mib:,} MiB, expected jobs.*.instance to be set"
    elif machine not in _model("sagemaker").shape_for("TrainingInstanceType").enum:
        yield f"instance type {machine} does not exist on SageMaker, expected an instance type for training"
    if not plan.workspace.startswith("s3://"):
        yield f"workspace {plan.workspace} is not on S3, expected s3://..., which training jobs share"
    if not placement_of(plan, job).job_role or not job.image:
        yield "no role or no image, expected an execution role (jobs.role) and an image in Amazon ECR (jobs.image)"
    if len(job.command) > MAX_ARGUMENTS or any(len(text) > MAX_ARGUMENT or "\n" in text for text in job.command):
        yield (
            f"command has {len(job.command)} arguments of up to {max(map(len, job.command)):,} characters, "
            f"expected at most {MAX_ARGUMENTS} of {MAX_ARGUMENT}, without line breaks"
        )
    for name, value in job.environment.items():
        if len(value) > MAX_VALUE:
            yield f"environment variable {name} has {len(value):,} characters, expected at most {MAX_VALUE}"


def _request_problems(plan: JobPlan, job: JobSpec) -> Iterator[str]:
    cycle, task = CycleRun(plan, 0.0), Task(job, job.array_size - 1 if job.array_size else None)
    yield from request_problems("sagemaker", "CreateTrainingJob", direct_request(cycle, task, 1, job.retry.attempts))
    if not sagemaker_placement_of(plan, job).queue:
        return
    service_job = service_job_request(cycle, task, 1)
    share, payload = service_job.get("shareIdentifier"), service_job["serviceRequestPayload"]
    yield from request_problems("batch", "SubmitServiceJob", service_job)
    # These are checked here because Batch does not check the payload, and botocore's model has no upper bounds.
    if share is not None and not SHARE.match(share):
        yield f"share identifier {share!r}, expected 1 to 255 letters and digits (jobs.share_identifier)"
    if (size := len(payload.encode())) > MAX_PAYLOAD_BYTES:
        yield f"payload has {size:,} bytes, expected at most {MAX_PAYLOAD_BYTES:,} (command and environment)"


@cache
def _model(service: str) -> Any:
    from botocore.session import Session  # imported lazily, because importing it is slow

    return Session().get_service_model(service)


def request_problems(service: str, operation: str, request: Request) -> Iterator[str]:
    """Yield the errors that botocore finds in a request. It checks types, required fields and lower bounds."""
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(request, _model(service).operation_model(operation).input_shape)
    if report.has_errors():
        yield " ".join(report.generate_report().split())
