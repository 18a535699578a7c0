"""Where AWS Batch runs a job: which queue, whose share of it, with which rights, and where its log goes.

A plan holds the placement of every job, whatever target it is given to, so that its id is the same on all of them.
"""

from pydantic import Field

from jobs.config import JobsConfig
from jobs.plan.dag import Plan
from jobs.plan.spec import JobSpec
from pipeline.core.record import Record


class BatchPlacement(Record):
    """As SubmitJob and RegisterJobDefinition need it."""

    queue: str = Field("", description="Name or ARN")
    share_identifier: str = ""
    priority: int = Field(0, description="Among the jobs of the same share")
    job_role: str = Field("", description="ARN of the credentials that the code sees; empty: none")
    log_group: str = "/aws/batch/job"


def placed(plan: Plan, jobs: JobsConfig) -> Plan:
    """The plan of a cycle with the placements that the settings say."""
    placements = {}
    for job in plan.jobs:
        wanted = jobs.stage(job.name)
        placements[job.name] = BatchPlacement(
            queue=wanted.queue or jobs.queue,
            share_identifier=jobs.share_identifier,
            priority=jobs.priority,
            job_role=wanted.role or jobs.role,
            log_group=jobs.log_group,
        ).model_dump()
    return plan.model_copy(update={"placements": placements})


def placement_of(plan: Plan, job: JobSpec) -> BatchPlacement:
    where = plan.placements.get(job.name, {})  # another target may have its words beside ours
    return BatchPlacement.model_validate({name: where[name] for name in BatchPlacement.model_fields if name in where})
