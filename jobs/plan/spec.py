"""Jobs and plans, whatever runs them: a plan is any DAG of jobs, of which a cycle is one and a single command another.

Where a job runs (queue, role, log group, ...) is a placement of the target.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, model_serializer, model_validator

from pipeline.core.errors import EXIT_TABLE, ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record


class Retry(Record):
    """When a job is tried again: after a lost machine, a container that did not start, and these exit codes.

    Everything else is final. Stored as the rules that AWS Batch gets of it (see `as_rules`).
    """

    attempts: int = Field(1, description="Tries in all, the first included")
    exit_codes: tuple[int, ...] = ()

    @classmethod
    def of(cls, attempts: int) -> Self:
        """For any stage: the codes that the table of exit codes calls worth another try."""
        return cls(attempts=attempts, exit_codes=tuple(sorted(rule.exit_code for rule in EXIT_TABLE if rule.retry)))

    def as_rules(self) -> tuple[dict[str, str], ...]:
        """Conditions and what follows: the first that matches decides. A trailing * matches any rest.

        Source: the API reference of AWS Batch, EvaluateOnExit. Without a matching entry it would try again, so the last
        entry matches everything.
        """
        again = [
            {"on_status_reason": "Host EC2*"},
            {"on_status_reason": "Task failed to start*"},  # images not pulled, containers not created
            *({"on_exit_code": str(code)} for code in self.exit_codes),
        ]
        none = {"on_status_reason": "", "on_reason": "", "on_exit_code": ""}
        return (*({"action": "RETRY"} | none | one for one in again), {"action": "EXIT"} | none | {"on_reason": "*"})

    @model_validator(mode="before")
    @classmethod
    def _from_rules(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "rules" in data:
            codes = [int(rule["on_exit_code"]) for rule in data["rules"] if rule["on_exit_code"]]
            return {"attempts": data["attempts"], "exit_codes": codes}
        return data

    @model_serializer
    def _stored(self) -> dict[str, Any]:
        return {"attempts": self.attempts, "rules": self.as_rules()}


class Dependency(Record):
    """A job that must succeed before: the whole of it, every child of an array."""

    job: str
    type: Literal["ALL"] = "ALL"
    """The only one; part of stored plans and of their ids."""


class Ulimit(Record):
    """A limit of a container; -1 is none."""

    name: str
    soft: int
    hard: int


class Resources(Record):
    vcpus: int
    memory_mib: int
    shared_memory_mib: int = Field(64, description="Size of the tmpfs for shared memory")
    devices: tuple[str, ...] = Field((), description="Device files, such as /dev/neuron0")
    ulimits: tuple[Ulimit, ...] = ()
    instance_type: str = Field("", description="What it is meant for and priced as; told to multi-node jobs")
    processes_per_node: int = Field(1, description="Ranks to start on a node")


class JobSpec(Record):
    """One job: what to run, with how much, and after what."""

    name: str = Field(description="Unique within the plan")
    stage: str = Field(description="Kind of job: jobs of one kind share a definition and a line of the ledger")
    command: tuple[str, ...]
    resources: Resources
    image: str = ""
    num_nodes: int = Field(0, description="Nodes that run at once; 0: an ordinary container")
    array_size: int = Field(0, description="Children; 0: no array")
    environment: Mapping[str, str] = Field(default={}, description="Never a secret: it is shown in plans and logs")
    retry: Retry = Retry()
    timeout_s: int = Field(description="Of one attempt, over all nodes")
    depends_on: tuple[Dependency, ...] = ()

    @property
    def vcpus(self) -> int:
        """Of all nodes or children together."""
        return self.resources.vcpus * max(1, self.num_nodes, self.array_size)


class JobPlan(Record):
    """Jobs that belong together, each after those it depends on (see `ordered` in cycle.py).

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


def refuse(plan: JobPlan, problems: Iterable[str], *, platform: str, next_command: str) -> None:
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
