"""From a job to the requests of AWS Batch: RegisterJobDefinition and SubmitJob.

A multi-node definition is one open range of nodes (`0:`), so that one definition serves any number of them.
"""

from collections.abc import Mapping
from typing import Any

from jobs.plan.spec import CyclePlan, DependencyType, JobSpec, Resources, RetryStrategy
from pipeline.core.fingerprint import fingerprint

Request = dict[str, Any]


def definition_name(plan: CyclePlan, job: JobSpec) -> str:
    """One definition a pipeline and kind of job; its revisions are its contents."""
    return f"{plan.pipeline}-{job.stage}"


def definition_request(plan: CyclePlan, job: JobSpec) -> Request:
    """RegisterJobDefinition. The tag `content` names everything else of it, so that equal ones are registered once."""
    container = _container(plan, job)
    request: Request = {
        "jobDefinitionName": definition_name(plan, job),
        "type": "multinode" if job.num_nodes else "container",
        "schedulingPriority": job.priority,
        "retryStrategy": _retry(job.retry),
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


def submit_request(plan: CyclePlan, job: JobSpec, *, definition: str, ids: Mapping[str, str]) -> Request:
    """SubmitJob of a pinned `definition` (name:revision). `ids`: of the jobs it depends on, by name."""
    request: Request = {
        "jobName": job_name(plan, job),
        "jobQueue": job.queue,
        "jobDefinition": definition,
        "shareIdentifier": job.share_identifier,
        "schedulingPriorityOverride": job.priority,
        "dependsOn": [_dependency(one.job, one.type, ids) for one in job.depends_on],
        "tags": {"pipeline": plan.pipeline, "cycle": plan.cycle, "job": job.name},
        "propagateTags": True,
    }
    words = [*job.command]
    environment = [{"name": name, "value": value} for name, value in sorted(_of_cycle(plan, job).items())]
    override: Request = {"command": words, "environment": environment}
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


def job_name(plan: CyclePlan, job: JobSpec) -> str:
    """Deterministic, so that a driver that died finds its jobs again."""
    return f"{plan.pipeline}-{plan.cycle}-{job.name}"


def _of_cycle(plan: CyclePlan, job: JobSpec) -> dict[str, str]:
    """What differs between cycles is not part of the definition."""
    return {"TRNPIPE_CYCLE": plan.cycle, "TRNPIPE_WORKSPACE": plan.workspace, "TRNJOBS_JOB": job.name}


def _container(plan: CyclePlan, job: JobSpec) -> Request:
    needs = job.resources
    container: Request = {
        "image": job.image,
        "command": ["trnpipe", "--version"],  # every submission says what to run
        "resourceRequirements": [
            {"type": "VCPU", "value": str(needs.vcpus)},
            {"type": "MEMORY", "value": str(needs.memory_mib)},
        ],
        "environment": [{"name": name, "value": value} for name, value in sorted(job.environment.items())],
        "linuxParameters": _linux(needs),
        "ulimits": [{"name": u.name, "softLimit": u.soft, "hardLimit": u.hard} for u in needs.ulimits],
        "privileged": False,
        "logConfiguration": {
            "logDriver": "awslogs",
            "options": {"awslogs-group": job.log_group, "awslogs-stream-prefix": f"{plan.pipeline}-{job.stage}"},
        },
    }
    if job.job_role:
        container["jobRoleArn"] = job.job_role
    return container


def _linux(needs: Resources) -> Request:
    permissions = ["READ", "WRITE", "MKNOD"]
    return {
        "devices": [{"hostPath": path, "containerPath": path, "permissions": permissions} for path in needs.devices],
        "sharedMemorySize": needs.shared_memory_mib,
        "initProcessEnabled": True,
    }


def _retry(strategy: RetryStrategy) -> Request:
    rules = []
    for rule in strategy.rules:
        entry = {"action": rule.action.value}
        fields = {"onStatusReason": rule.on_status_reason, "onReason": rule.on_reason, "onExitCode": rule.on_exit_code}
        rules.append(entry | {name: pattern for name, pattern in fields.items() if pattern})
    return {"attempts": strategy.attempts, "evaluateOnExit": rules}


def _dependency(name: str, kind: DependencyType, ids: Mapping[str, str]) -> Request:
    if kind is DependencyType.SEQUENTIAL:
        return {"type": kind.value}
    return {"jobId": ids[name]} | ({} if kind is DependencyType.ALL else {"type": kind.value})
