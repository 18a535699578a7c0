"""Where the jobs of a plan run: queue, share, role and log of AWS Batch; network and capacity of SageMaker. Pure.

A plan holds the placement of every job, whatever target it is given to, so that its id is the same on all of them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from jobs.plan.spec import JobSpec, Plan
from jobs.settings import JobsConfig
from pipeline.core.record import Record

SAGEMAKER = "sagemaker"
"""Key of its placement within that of a job; plans of settings without `[jobs.sagemaker]` have none."""
SPOT_WAIT_S = 6 * 3600
"""Seconds that a job may wait for Spot capacity beyond its timeout."""


class BatchPlacement(Record):
    """As SubmitJob and RegisterJobDefinition need it."""

    queue: str = Field("", description="Name or ARN")
    share_identifier: str = ""
    priority: int = Field(0, description="Among the jobs of the same share")
    job_role: str = Field("", description="ARN of the credentials that the code sees; empty: none")
    log_group: str = "/aws/batch/job"


class SageMakerPlacement(Record):
    """As CreateTrainingJob needs it; the role is that of the placement in AWS Batch."""

    retired: ClassVar[Mapping[str, Any]] = {"output": "", "infra_check": True}
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    volume_gib: int = 100
    spot_wait_s: int = Field(0, description="Seconds that a job may wait for Spot capacity; 0: on demand")
    keep_alive_s: int = 0
    queue: str = Field("", description="Of service jobs of AWS Batch; empty: SageMaker's own calls")


def with_placements(plan: Plan, jobs: JobsConfig) -> Plan:
    """Return the plan with where each job runs, on AWS Batch and, if `[jobs.sagemaker]` is set, on SageMaker."""
    wanted = jobs.sagemaker
    fields = SageMakerPlacement.model_fields.keys()
    where = SageMakerPlacement.model_validate({k: v for k, v in wanted.model_dump().items() if k in fields})
    pools = {}
    for job in plan.jobs:
        needs = job.resources
        machine = (needs.instance_type,) if needs.instance_type else (needs.vcpus, needs.memory_mib)
        pools[job.name] = jobs.stage(job.name).role or jobs.role, machine, max(1, job.num_nodes), job.array_size
    # A job takes over the machines of the one before it: same role, machines and number of them. A warm pool without
    # such a job is paid for nothing. Source: SageMaker developer guide, managed warm pools.
    is_followed = {one.job for job in plan.jobs for one in job.depends_on if pools[one.job] == pools[job.name]}
    placements = {}
    for job in plan.jobs:
        stage = jobs.stage(job.name)
        placements[job.name] = BatchPlacement(
            queue=stage.queue or jobs.queue,
            share_identifier=jobs.share_identifier,
            priority=jobs.priority,
            job_role=stage.role or jobs.role,
            log_group=jobs.log_group,
        ).model_dump()
        said = where.model_copy(
            update={  # warm pools know no Spot capacity
                "spot_wait_s": SPOT_WAIT_S if wanted.spot else 0,
                "keep_alive_s": wanted.keep_alive_s if not wanted.spot and job.name in is_followed else 0,
            }
        ).model_dump(mode="json", exclude_defaults=True)
        if said:
            placements[job.name][SAGEMAKER] = said
    return plan.model_copy(update={"placements": placements})


def sagemaker_placement_of(plan: Plan, job: JobSpec) -> SageMakerPlacement:
    return SageMakerPlacement.model_validate(plan.placements.get(job.name, {}).get(SAGEMAKER, {}))


def placement_of(plan: Plan, job: JobSpec) -> BatchPlacement:
    where = plan.placements.get(job.name, {})  # another target may have its words beside ours
    return BatchPlacement.model_validate({name: where[name] for name in BatchPlacement.model_fields if name in where})
