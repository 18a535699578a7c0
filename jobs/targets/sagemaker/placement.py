"""How SageMaker runs the jobs of a plan: in which network, on machines of which kind. Pure.

The role of a job is that of its placement in AWS Batch: the same rights.
"""

from pydantic import Field

from jobs.config import JobsConfig, SageMakerConfig
from jobs.plan.dag import Plan
from jobs.plan.spec import JobSpec
from pipeline.core.record import Record

KEY = "sagemaker"
"""Of this placement within that of a job. Plans of settings without it are as they were."""


class SageMakerPlacement(Record):
    """As CreateTrainingJob needs it."""

    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    volume_gib: int = 100
    output: str = ""
    spot_wait_s: int = 0
    infra_check: bool = True
    keep_alive_s: int = 0
    queue: str = Field("", description="Of service jobs of AWS Batch; empty: SageMaker's own calls")


def placed_on_sagemaker(plan: Plan, jobs: JobsConfig) -> Plan:
    """The plan with what `[jobs.sagemaker]` says beside each placement; the plan itself where that says nothing."""
    wanted = jobs.sagemaker
    if wanted == SageMakerConfig():
        return plan
    fields = SageMakerPlacement.model_fields.keys()
    where = SageMakerPlacement.model_validate({k: v for k, v in wanted.model_dump().items() if k in fields})
    placements = {
        job.name: {
            **plan.placements.get(job.name, {}),
            KEY: where.model_copy(update=_of_job(plan, job, wanted)).model_dump(mode="json", exclude_defaults=True),
        }
        for job in plan.jobs
    }
    return plan.model_copy(update={"placements": placements})


def sagemaker_placement_of(plan: Plan, job: JobSpec) -> SageMakerPlacement:
    return SageMakerPlacement.model_validate(plan.placements.get(job.name, {}).get(KEY, {}))


def role_of(plan: Plan, job: JobSpec) -> str:
    """ARN of the execution role; empty where the settings name none."""
    return str(plan.placements.get(job.name, {}).get("job_role", ""))


def _of_job(plan: Plan, job: JobSpec, wanted: SageMakerConfig) -> dict[str, int]:
    """What differs between jobs. Warm pools know no Spot capacity."""
    return {
        "spot_wait_s": wanted.spot_wait_s if wanted.spot else 0,
        "keep_alive_s": 0 if wanted.spot or not _is_followed_by_its_like(plan, job) else wanted.keep_alive_s,
    }


def _is_followed_by_its_like(plan: Plan, job: JobSpec) -> bool:
    """Whether a job right after this one takes over its machines: same role, machines and number of them.

    Source: SageMaker developer guide, managed warm pools. A pool that nobody takes over is paid for nothing.
    """
    return any(
        _pool(plan, job) == _pool(plan, other) for other in plan.jobs if job.name in [d.job for d in other.depends_on]
    )


def _pool(plan: Plan, job: JobSpec) -> tuple[object, ...]:
    needs = job.resources
    machine = (needs.instance_type,) if needs.instance_type else (needs.vcpus, needs.memory_mib)
    return role_of(plan, job), machine, max(1, job.num_nodes), job.array_size
