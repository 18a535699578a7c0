"""A plan: any DAG of jobs, of which a cycle is one and a single command another."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, model_serializer, model_validator

from jobs.plan.spec import JobSpec
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record


class Plan(Record):
    """Jobs that belong together, each after those it depends on (see `ordered` in script.py).

    Stored with each placement beside the fields of its job: so cycles that an earlier revision planned are read, and
    keep their id.
    """

    pipeline: str = Field(description="First word of all names of jobs")
    cycle: str
    workspace: str
    settings: str = Field("", description="Fingerprint of the settings of the pipeline that all jobs share")
    jobs: tuple[JobSpec, ...]
    placements: Mapping[str, Mapping[str, JsonValue]] = Field(
        default={}, description="Where a job runs, by its name, in the words of the target that made the placement"
    )

    @property
    def plan_id(self) -> str:
        """Names the content: equal plans have equal ids on every machine."""
        return fingerprint(self.model_dump(mode="json"))

    def job(self, name: str) -> JobSpec:
        """One job by name. Raises KeyError."""
        return next(job for job in self.jobs if job.name == name)

    @model_validator(mode="before")
    @classmethod
    def _split_placements(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "placements" in data:
            return data
        jobs = [one if isinstance(one, Mapping) else None for one in data.get("jobs", ())]
        if None in jobs:
            return data  # made in Python
        known = JobSpec.model_fields.keys()
        return {
            **data,
            "jobs": [{key: value for key, value in job.items() if key in known} for job in jobs if job],
            "placements": {
                job.get("name", ""): placement
                for job in jobs
                if job and (placement := {key: value for key, value in job.items() if key not in known})
            },
        }

    @model_serializer(mode="wrap")
    def _stored(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = handler(self)
        placements = tree.pop("placements")
        return tree | {"jobs": [job | dict(placements.get(job["name"], {})) for job in tree["jobs"]]}


def refuse(plan: Plan, problems: Iterable[str], *, platform: str, next_command: str) -> None:
    """Raises ConfigError with every problem (`job: what`), and the jobs that share one; nothing where there is none."""
    jobs_of: dict[str, list[str]] = {}
    for job, _, problem in (one.partition(": ") for one in problems):
        jobs_of.setdefault(problem, []).append(job)
    if jobs_of:
        lines = [
            f"{'every job' if len(jobs) == len(plan.jobs) > 1 else ', '.join(jobs)}: {problem}"
            for problem, jobs in jobs_of.items()
        ]
        raise ConfigError(
            "\n  ".join([f"{platform} would not run this plan ({len(lines)} problems):", *lines]),
            expected=f"jobs within the limits of {platform}",
            next_command=f"correct the settings under [jobs], then {next_command}",
        )
