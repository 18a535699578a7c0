"""Build the AWS Batch requests for a job (RegisterJobDefinition and SubmitJob), and check them against the limits.

The definition of a multi-node job uses the open node range `0:`, so that it can be used with any number of nodes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jobs.node.environment import job_variables
from jobs.plan.spec import JobPlan, JobSpec, refuse
from jobs.targets.base import placement_of
from pipeline.core.fingerprint import fingerprint
from pipeline.core.machines import NODES

Request = dict[str, Any]


def definition_request(plan: JobPlan, job: JobSpec) -> Request:
    """Return the RegisterJobDefinition request. Its tag `content` is a hash of all other fields."""
    needs, placement = job.resources, placement_of(plan, job)
    container: Request = {
        "image": job.image,
        "command": ["trnpipe", "--version"],  # overridden by every SubmitJob
        "resourceRequirements": [
            {"type": "VCPU", "value": str(needs.vcpus)},
            {"type": "MEMORY", "value": str(needs.memory_mib)},
        ],
        "environment": [{"name": name, "value": value} for name, value in sorted(job.environment.items())],
        "linuxParameters": {
            "devices": [
                {"hostPath": path, "containerPath": path, "permissions": ["READ", "WRITE", "MKNOD"]}
                for path in needs.devices
            ],
            "sharedMemorySize": needs.shared_memory_mib,
            "initProcessEnabled": True,
        },
        "ulimits": [{"name": u.name, "softLimit": u.soft, "hardLimit": u.hard} for u in needs.ulimits],
        "privileged": False,
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {"awslogs-group": placement.log_group, "awslogs-stream-prefix": f"{plan.pipeline}-{job.stage}"},
        },
    }
    if placement.job_role:
        container["jobRoleArn"] = placement.job_role
    names = {"on_status_reason": "onStatusReason", "on_reason": "onReason", "on_exit_code": "onExitCode"}
    rules = [
        {names.get(name, name): pattern for name, pattern in rule.items() if pattern} for rule in job.retry.as_rules()
    ]
    request: Request = {
        "jobDefinitionName": f"{plan.pipeline}-{job.stage}",
        "type": "multinode" if job.num_nodes else "container",
        "schedulingPriority": placement.priority,
        "retryStrategy": {"attempts": job.retry.batch_attempts, "evaluateOnExit": rules},
        "timeout": {"attemptDurationSeconds": job.timeout_s},
        "propagateTags": True,
    }
    if job.num_nodes:
        nodes: Request = {"targetNodes": "0:", "container": container}
        request["nodeProperties"] = {"numNodes": job.num_nodes, "mainNode": 0, "nodeRangeProperties": [nodes]}
        if job.resources.instance_type:
            container["instanceType"] = job.resources.instance_type
    else:
        request["containerProperties"] = container
        request["platformCapabilities"] = ["EC2"]
    return request | {"tags": {"pipeline": plan.pipeline, "stage": job.stage, "content": fingerprint(request)}}


def submit_request(
    plan: JobPlan, job: JobSpec, *, definition: str, ids: Mapping[str, str], submission: int = 1
) -> Request:
    """Return the SubmitJob request.

    `definition` is the `name:revision` of the job definition. `ids` maps names of dependencies to job ids.
    """
    placement = placement_of(plan, job)
    request: Request = {
        "jobName": job_name(plan, job, submission),
        "jobQueue": placement.queue,
        "jobDefinition": definition,
        "shareIdentifier": placement.share_identifier,
        "schedulingPriorityOverride": placement.priority,
        "dependsOn": [{"jobId": ids[dependency.job]} for dependency in job.depends_on],
        "tags": {"pipeline": plan.pipeline, "cycle": plan.cycle, "job": job.name},
        "propagateTags": True,
    }
    # Values that differ between cycles are passed here, so that cycles can share a job definition.
    variables = job_variables(plan, job, submission, is_batch=True)
    environment = [{"name": name, "value": value} for name, value in sorted(variables.items())]
    override: Request = {"command": [*job.command], "environment": environment}
    if job.num_nodes:
        request["nodeOverrides"] = {
            "numNodes": job.num_nodes,
            "nodePropertyOverrides": [{"targetNodes": "0:", "containerOverrides": override}],
        }
    else:
        request["containerOverrides"] = override
    if job.array_size:
        request["arrayProperties"] = {"size": job.array_size}
    return request


def job_name(plan: JobPlan, job: JobSpec, submission: int) -> str:
    """Return the name of a job in a submission.

    The name is deterministic, which allows a restarted driver to find the jobs it has already submitted.
    """
    return f"{plan.pipeline}-{plan.cycle}-{job.name}" + (f"-round-{submission}" if submission > 1 else "")


# Limits of AWS Batch. They are checked before anything is sent, because a request that exceeds a limit would otherwise
# fail after a part of the plan was submitted, or would leave a job waiting forever. Sources: botocore's model of AWS
# Batch (bounds and patterns), and the user guide (quotas, multi-node parallel jobs, array jobs, job retries).

MAX_DEFINITION_BYTES, MAX_OVERRIDE_CHARACTERS = 24 * 1024, 8192
MAX_IMAGE_CHARACTERS = 255
SHARED = "s3://"  # start of the URI of a workspace that the containers of all jobs can use
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$")
MAX_SUBMISSION = 999
"""The largest submission number for which the job name, which contains it, is checked against the limit."""
SHARE = re.compile(r"^[A-Za-z0-9]{1,255}$")


def check_plan(plan: JobPlan) -> None:
    """Check the plan against the limits of AWS Batch. Raises ConfigError that lists the problems of all jobs."""
    problems = (f"{job.name}: {problem}" for job in plan.jobs for problem in _problems(plan, job))
    refuse(plan, problems, platform="AWS Batch", next_command="trnjobs plan")


def _problems(plan: JobPlan, job: JobSpec) -> Iterator[str]:
    name, placement = job_name(plan, job, MAX_SUBMISSION), placement_of(plan, job)
    if not _NAME.match(name):
        yield f"job name {name!r}, expected letters, digits, - and _, beginning with a letter or digit, at most 128"
    if not plan.workspace.startswith(SHARED):
        yield f"workspace {plan.workspace} is not on S3, expected {SHARED}..., which all jobs share"
    if not placement.queue:
        yield "no queue, expected its name or ARN (jobs.queue)"
    if not SHARE.match(placement.share_identifier):
        share = placement.share_identifier
        yield f"share identifier {share!r}, expected 1 to 255 letters and digits (jobs.share_identifier)"
    if not 0 < len(job.image) <= MAX_IMAGE_CHARACTERS:
        yield f"image name has {len(job.image)} characters, expected 1 to {MAX_IMAGE_CHARACTERS} (jobs.image)"
    if any(argument.startswith("Ref::") for argument in job.command):
        yield "command contains Ref::, which AWS Batch would replace"
    for variable in job.environment:
        if variable.startswith("AWS_BATCH"):
            yield f"environment variable {variable}, names may not begin with AWS_BATCH"
    needs, node = job.resources, NODES.get(job.resources.instance_type)
    if node and (needs.vcpus > node.vcpus or needs.memory_mib > node.memory_mib):
        yield (
            f"needs {needs.vcpus} vCPU and {needs.memory_mib:,} MiB per node, but {needs.instance_type} only has "
            f"{node.vcpus} and {node.memory_mib:,}, so it would never start"
        )
    definition = len(json.dumps(definition_request(plan, job)))
    if definition > MAX_DEFINITION_BYTES:
        yield f"job definition has {definition:,} bytes, expected at most {MAX_DEFINITION_BYTES:,}"
    request = submit_request(plan, job, definition="name:1", ids={d.job: "0" * 36 for d in job.depends_on})
    nodes = request.get("nodeOverrides", {}).get("nodePropertyOverrides", [{}])[0]
    override = len(json.dumps(request.get("containerOverrides") or nodes.get("containerOverrides")))
    if override > MAX_OVERRIDE_CHARACTERS:
        yield f"container overrides have {override:,} characters, expected at most {MAX_OVERRIDE_CHARACTERS:,}"
