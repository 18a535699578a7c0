"""What SageMaker refuses, checked before anything is sent.

Sources: the model of SageMaker in botocore, which validates every request here (bounds, required fields, patterns and
enumerations); its documentation for what that model does not hold.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from botocore.model import ListShape, MapShape, Shape, StringShape, StructureShape
from botocore.session import Session
from botocore.validate import ParamValidator

from jobs.cycle.job_states import Leaf
from jobs.plan.dag import Plan, refuse
from jobs.plan.resources import ml_machine
from jobs.plan.spec import JobSpec
from jobs.targets.batch.limits import MAX_SUBMIT_BYTES, SHARE
from jobs.targets.placement import placement_of, sagemaker_placement_of
from jobs.targets.sagemaker.requests import (
    MAX_NAME,
    MAX_PAYLOAD_NAME,
    Cycle,
    Request,
    direct_request,
    service_job_request,
)

MAX_CHILDREN = 50
"""Of an array: each is a training job of its own."""
MAX_RUNTIME_S = 28 * 86_400
MAX_PAYLOAD_BYTES = 10 * 1024
MAX_VALUE, MAX_WORDS, MAX_WORD = 512, 100, 256


def check_plan(plan: Plan) -> None:
    """Raises ConfigError with every problem of every job."""
    refuse(plan, plan_problems(plan), platform="SageMaker", next_command="trnjobs plan --target sagemaker")


def plan_problems(plan: Plan) -> Iterator[str]:
    for job in plan.jobs:
        for problem in [*_words(plan, job)] or _requests(plan, job):
            yield f"{job.name}: {problem}"


def _words(plan: Plan, job: JobSpec) -> Iterator[str]:
    """Machine, place, shape, command and environment."""
    where, machine = sagemaker_placement_of(plan, job), ml_machine(job.resources)
    if not machine:
        yield f"{job.resources.vcpus} vCPU and {job.resources.memory_mib:,} MiB a node; expected an instance (jobs.*)"
    elif machine not in instance_types():
        yield f"instance type {machine}, which SageMaker does not have; expected one of its training instances"
    if not plan.workspace.startswith("s3://"):
        yield f"workspace {plan.workspace}; expected one on S3 (s3://...), which training jobs share"
    if not placement_of(plan, job).job_role:
        yield "no role; expected the ARN of an execution role (jobs.role)"
    if job.array_size > MAX_CHILDREN:
        yield f"an array of {job.array_size}; expected at most {MAX_CHILDREN}, each is a training job"
    if job.timeout_s > MAX_RUNTIME_S:
        yield f"a timeout of {job.timeout_s:,} s; expected at most {MAX_RUNTIME_S:,}"
    if bool(where.subnets) != bool(where.security_groups):
        yield "subnets or security groups alone; expected both (jobs.sagemaker), or neither"
    if not job.image:
        yield "no image; expected one in Amazon ECR (jobs.image)"
    if len(job.command) > MAX_WORDS:
        yield f"a command of {len(job.command)} words; expected at most {MAX_WORDS}"
    for word in job.command:
        if len(word) > MAX_WORD:
            yield f"a word of {len(word):,} characters in its command ({word[:20]}...); expected at most {MAX_WORD}"
        if "\n" in word:
            yield f"a word of several lines in its command ({word[:20].splitlines()[0]}...); expected one line"
    for name, value in job.environment.items():
        if len(value) > MAX_VALUE:
            yield f"environment variable {name} of {len(value):,} characters; expected at most {MAX_VALUE}"


def _requests(plan: Plan, job: JobSpec) -> Iterator[str]:
    """The requests themselves, as botocore knows them."""
    cycle = Cycle(plan, 0.0)
    leaf = Leaf(job, job.array_size - 1 if job.array_size else None)
    request = direct_request(cycle, leaf, 1, job.retry.attempts)
    name = request["TrainingJobName"]
    yield from request_problems("sagemaker", "CreateTrainingJob", request)
    if len(name) > MAX_NAME:
        yield f"training job name {name} of {len(name)} characters; expected at most {MAX_NAME}"
    if not sagemaker_placement_of(plan, job).queue:
        return
    queued = service_job_request(cycle, leaf, 1)
    share, payload = queued["shareIdentifier"], queued["serviceRequestPayload"]
    name = json.loads(payload)["TrainingJobName"]
    yield from request_problems("sagemaker", "CreateTrainingJob", json.loads(payload))
    yield from request_problems("batch", "SubmitServiceJob", queued)
    # What Batch refuses, or takes and never runs: it does not look into the payload, and botocore has no bounds.
    if not SHARE.match(share):
        yield f"share identifier {share!r}; expected letters and digits only, 1 to 255 (jobs.share_identifier)"
    if (size := len(payload.encode())) > MAX_PAYLOAD_BYTES:
        yield f"a payload of {size:,} bytes; expected at most {MAX_PAYLOAD_BYTES:,} (command and environment)"
    if (size := len(json.dumps(queued).encode())) > MAX_SUBMIT_BYTES:
        yield f"a SubmitServiceJob request of {size:,} bytes; expected at most {MAX_SUBMIT_BYTES:,}"
    if len(name) > MAX_PAYLOAD_NAME:
        yield f"training job name {name} of {len(name)} characters; expected at most {MAX_PAYLOAD_NAME}"


@cache
def instance_types() -> frozenset[str]:
    """Of training jobs, as this version of botocore knows them."""
    shape = _model("sagemaker").shape_for("TrainingInstanceType")
    return frozenset(shape.enum) if isinstance(shape, StringShape) else frozenset()


@cache
def _model(service: str) -> Any:
    return Session().get_service_model(service)


def request_problems(service: str, operation: str, request: Request) -> Iterator[str]:
    """What the model of the service says against a request: types and required fields, then lengths and patterns."""
    shape = _model(service).operation_model(operation).input_shape
    report = ParamValidator().validate(request, shape)
    if report.has_errors():
        yield " ".join(report.generate_report().split())
        return
    yield from _beyond(shape, request, operation)


def _beyond(shape: Shape, value: Any, path: str) -> Iterator[str]:
    """Bounds and patterns, which botocore itself leaves to the service."""
    match shape:
        case StructureShape():
            for name, member in value.items():
                yield from _beyond(shape.members[name], member, f"{path}.{name}")
        case ListShape():
            for member in value:
                yield from _beyond(shape.member, member, path)
        case MapShape():
            yield from _size(shape.metadata, len(value), path, "entries")
            for name, member in value.items():
                yield from _beyond(shape.key, name, f"{path} name")
                yield from _beyond(shape.value, member, f"{path}.{name}")
            return
    if isinstance(value, str | list):
        yield from _size(shape.metadata, len(value), path, "characters" if isinstance(value, str) else "entries")
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from _size(shape.metadata, value, path, "")
    pattern = shape.metadata.get("pattern")
    if isinstance(value, str) and pattern and "\\p{" not in pattern and not re.fullmatch(pattern, value):
        yield f"{path} is {value!r}; expected what matches {pattern}"
    if isinstance(shape, StringShape) and shape.enum and value not in shape.enum:
        yield f"{path} is {value!r}; expected one of the values of this version of the API"


def _size(metadata: Mapping[str, Any], number: int, path: str, unit: str) -> Iterator[str]:
    least, most = metadata.get("min", number), metadata.get("max", number)
    if not least <= number <= most:
        yield f"{path}: {number:,} {unit}".rstrip() + f"; expected {least:,} to {most:,}"
