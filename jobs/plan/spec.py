"""Jobs and plans, independent of the target. A plan is a DAG of jobs, such as a cycle or a single command.

Queue, role, log group and the like are in the placement that the target adds to a job.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, model_serializer, model_validator

from pipeline.core.errors import EXIT_TABLE, ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record


class Retry(Record):
    """Retry policy: a job is retried after a lost machine, a container that did not start, and these exit codes.

    All other failures are final. Stored as the rules for AWS Batch (see `as_rules`).
    """

    attempts: int = Field(1, description="Maximum number of attempts, including the first")
    exit_codes: tuple[int, ...] = ()

    @classmethod
    def of(cls, attempts: int) -> Self:
        """Build the policy of a stage, with the retryable codes of the table of exit codes."""
        return cls(attempts=attempts, exit_codes=tuple(sorted(rule.exit_code for rule in EXIT_TABLE if rule.retry)))

    def as_rules(self) -> tuple[dict[str, str], ...]:
        """Return conditions with actions, of which the first match applies. A trailing * is a wildcard.

        Source: AWS Batch API reference, EvaluateOnExit. It retries without a match, so the last entry matches all.
        """
        retryable = [
            {"on_status_reason": "Host EC2*"},
            {"on_status_reason": "Task failed to start*"},  # images not pulled, containers not created
            *({"on_exit_code": str(code)} for code in self.exit_codes),
        ]
        empty = {"on_status_reason": "", "on_reason": "", "on_exit_code": ""}
        retries = ({"action": "RETRY"} | empty | condition for condition in retryable)
        return (*retries, {"action": "EXIT"} | empty | {"on_reason": "*"})

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
    """A job that must succeed first, including every task of an array."""

    job: str
    type: Literal["ALL"] = "ALL"  # The only type. It is part of stored plans and of their ids.


class Ulimit(Record):
    """A limit of a container, -1 for unlimited."""

    name: str
    soft: int
    hard: int


class Resources(Record):
    vcpus: int
    memory_mib: int
    shared_memory_mib: int = Field(64, description="Size of the tmpfs for shared memory")
    devices: tuple[str, ...] = Field((), description="Device files, such as /dev/neuron0")
    ulimits: tuple[Ulimit, ...] = ()
    instance_type: str = Field("", description="Instance type for prices and for placing multi-node jobs")
    processes_per_node: int = Field(1, description="Ranks to start on a node")


class JobSpec(Record):
    """A job: its command, resources and dependencies."""

    name: str = Field(description="Unique within the plan")
    stage: str = Field(description="Stage: jobs of the same stage share a job definition and a line of the ledger")
    command: tuple[str, ...]
    resources: Resources
    image: str = ""
    num_nodes: int = Field(0, description="Nodes of a node group (0: a single container)")
    array_size: int = Field(0, description="Tasks of an array (0: no array)")
    environment: Mapping[str, str] = Field(default={}, description="Must not contain secrets, shown in plans and logs")
    retry: Retry = Retry()
    timeout_s: int = Field(description="Time limit of one attempt")
    depends_on: tuple[Dependency, ...] = ()

    @property
    def vcpus(self) -> int:
        """Total vCPUs of all nodes or tasks."""
        return self.resources.vcpus * max(1, self.num_nodes, self.array_size)


class JobPlan(Record):
    """A DAG of jobs in topological order (see `ordered` in cycle.py).

    Placements are stored inside their jobs, so that cycles planned by earlier revisions are readable and keep their id.
    """

    pipeline: str = Field(description="Prefix of all job names on the platform")
    cycle: str
    workspace: str
    settings: str = Field("", description="Fingerprint of the pipeline settings of all jobs")
    jobs: tuple[JobSpec, ...]
    placements: Mapping[str, Mapping[str, JsonValue]] = Field(
        default={}, description="Placement of each job by name, with the fields of the target"
    )

    @property
    def plan_id(self) -> str:
        """Fingerprint of the content. Equal plans have equal ids on every machine."""
        return fingerprint(self.model_dump(mode="json"))

    def job(self, name: str) -> JobSpec:
        """Return a job by name. Raises StopIteration if there is none."""
        return next(job for job in self.jobs if job.name == name)

    @model_validator(mode="before")
    @classmethod
    def _split_placements(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "placements" in data:
            return data
        jobs = [job if isinstance(job, Mapping) else None for job in data.get("jobs", ())]
        if None in jobs:
            return data  # constructed in Python
        fields = JobSpec.model_fields.keys()
        return {
            **data,
            "jobs": [{key: value for key, value in job.items() if key in fields} for job in jobs if job],
            "placements": {
                job.get("name", ""): placement
                for job in jobs
                if job and (placement := {key: value for key, value in job.items() if key not in fields})
            },
        }

    @model_serializer(mode="wrap")
    def _stored(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = handler(self)
        placements = tree.pop("placements")
        return tree | {"jobs": [job | dict(placements.get(job["name"], {})) for job in tree["jobs"]]}


def refuse(plan: JobPlan, problems: Iterable[str], *, platform: str, next_command: str) -> None:
    """Raise ConfigError if there are problems (each `job: text`), listing each with all its jobs."""
    jobs_of: dict[str, list[str]] = {}
    for job, _, problem in (text.partition(": ") for text in problems):
        jobs_of.setdefault(problem, []).append(job)
    if jobs_of:
        lines = [
            f"{'every job' if len(jobs) == len(plan.jobs) > 1 else ', '.join(jobs)}: {problem}"
            for problem, jobs in jobs_of.items()
        ]
        raise ConfigError(
            "\n  ".join([f"{platform} cannot run this plan ({len(lines)} problems):", *lines]),
            expected=f"jobs within the limits of {platform}",
            next_command=f"correct the settings under [jobs], then {next_command}",
        )
