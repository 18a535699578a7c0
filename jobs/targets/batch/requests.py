"""From a job to the requests of AWS Batch: RegisterJobDefinition and SubmitJob.

A multi-node definition is one open range of nodes (`0:`), so that one definition serves any number of them.
"""

from collections.abc import Mapping
from typing import Any

from jobs.node.environment import job_variables
from jobs.plan.dag import Plan
from jobs.plan.spec import JobSpec
from jobs.targets.placement import placement_of
from pipeline.core.fingerprint import fingerprint

Request = dict[str, Any]


def definition_request(plan: Plan, job: JobSpec) -> Request:
    """RegisterJobDefinition. The tag `content` names everything else of it, so that equal ones are registered once."""
    container = _container(plan, job)
    names = {"on_status_reason": "onStatusReason", "on_reason": "onReason", "on_exit_code": "onExitCode"}
    rules = [
        {names.get(name, name): pattern for name, pattern in rule.items() if pattern} for rule in job.retry.as_rules()
    ]
    request: Request = {
        "jobDefinitionName": f"{plan.pipeline}-{job.stage}",  # its revisions are its contents
        "type": "multinode" if job.num_nodes else "container",
        "schedulingPriority": placement_of(plan, job).priority,
        "retryStrategy": {"attempts": job.retry.attempts, "evaluateOnExit": rules},
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


def submit_request(plan: Plan, job: JobSpec, *, definition: str, ids: Mapping[str, str], round_: int = 1) -> Request:
    """SubmitJob of a pinned `definition` (name:revision). `ids`: of the jobs it depends on, by name."""
    where = placement_of(plan, job)
    request: Request = {
        "jobName": job_name(plan, job, round_),
        "jobQueue": where.queue,
        "jobDefinition": definition,
        "shareIdentifier": where.share_identifier,
        "schedulingPriorityOverride": where.priority,
        "dependsOn": [{"jobId": ids[one.job]} for one in job.depends_on],
        "tags": {"pipeline": plan.pipeline, "cycle": plan.cycle, "job": job.name},
        "propagateTags": True,
    }
    # What differs between cycles is not part of the definition.
    of_cycle = job_variables(plan, job, round_)
    environment = [{"name": name, "value": value} for name, value in sorted(of_cycle.items())]
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


def job_name(plan: Plan, job: JobSpec, round_: int) -> str:
    """Another one in every round, and the same on every try to submit it: a driver that died finds its jobs again."""
    return f"{plan.pipeline}-{plan.cycle}-{job.name}" + (f"-round-{round_}" if round_ > 1 else "")


def _container(plan: Plan, job: JobSpec) -> Request:
    needs, where = job.resources, placement_of(plan, job)
    container: Request = {
        "image": job.image,
        "command": ["trnpipe", "--version"],  # every submission says what to run
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
            "options": {"awslogs-group": where.log_group, "awslogs-stream-prefix": f"{plan.pipeline}-{job.stage}"},
        },
    }
    if where.job_role:
        container["jobRoleArn"] = where.job_role
    return container
