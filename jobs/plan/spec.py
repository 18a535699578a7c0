"""Jobs and plans, which do not depend on where they run. A plan is a DAG of jobs, for example those of a cycle.

Everything that is specific to a target, such as queues, roles and log groups, is part of the placement that the target
adds to each job.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from pydantic import Field, JsonValue, SerializerFunctionWrapHandler, model_serializer, model_validator

from jobs.settings import PREEMPTIONS
from pipeline.core.errors import EXIT_TABLE, ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record

MAX_BATCH_ATTEMPTS = 10  # RetryStrategy.attempts in the API reference of AWS Batch


class Retry(Record):
    """A retry policy.

    A job is retried if its machine was lost, if its container did not start, or if it exited with one of `exit_codes`.
    It is not retried after any other failure. The first `preemptions` attempts that are ended by a preemption do not
    count towards `attempts`. Policies are stored in the form of AWS Batch rules (see `as_rules`).
    """

    attempts: int = Field(1, description="Maximum number of attempts, including the first")
    preemptions: int = Field(PREEMPTIONS, description="Number of preempted attempts that are not counted")
    exit_codes: tuple[int, ...] = ()

    @classmethod
    def of(cls, attempts: int, preemptions: int = PREEMPTIONS) -> Self:
        """Build a policy that retries all exit codes that are marked as retryable in the table of exit codes."""
        codes = tuple(sorted(rule.exit_code for rule in EXIT_TABLE if rule.retry))
        return cls(attempts=attempts, preemptions=preemptions, exit_codes=codes)

    @property
    def batch_attempts(self) -> int:
        """Return the number of attempts for AWS Batch, which counts preemptions too and allows at most 10."""
        return min(MAX_BATCH_ATTEMPTS, self.attempts + self.preemptions)

    def as_rules(self) -> tuple[dict[str, str], ...]:
        """Return the policy as rules of AWS Batch (see EvaluateOnExit in its API reference).

        The first rule that matches is applied, and a trailing * is a wildcard. AWS Batch retries a job if no rule
        matches, so we add a rule at the end that matches everything.
        """
        retryable = [
            {"on_status_reason": "Host EC2*"},
            {"on_status_reason": "Task failed to start*"},  # the image could not be pulled, for example
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
            return {key: value for key, value in data.items() if key != "rules"} | {"exit_codes": codes}
        return data

    @model_serializer
    def _stored(self) -> dict[str, Any]:
        # The default is not stored, so that plans keep the ids that they had before there was such a limit.
        preemptions = {"preemptions": self.preemptions} if self.preemptions != PREEMPTIONS else {}
        return {"attempts": self.attempts, **preemptions, "rules": self.as_rules()}


class Dependency(Record):
    """A job that must succeed first. If it is an array, all of its tasks must succeed."""

    job: str
    type: Literal["ALL"] = "ALL"  # There is no other type, but it is included in stored plans and their ids.


class Ulimit(Record):
    """A resource limit of a container, where -1 means unlimited."""

    name: str
    soft: int
    hard: int


class Resources(Record):
    vcpus: int
    memory_mib: int
    shared_memory_mib: int = Field(64, description="Size of /dev/shm")
    devices: tuple[str, ...] = Field((), description="Device files to expose, such as /dev/neuron0")
    ulimits: tuple[Ulimit, ...] = ()
    instance_type: str = Field("", description="Instance type, for prices and to place multi-node jobs")
    processes_per_node: int = Field(1, description="Number of ranks to start on each node")


class JobSpec(Record):
    """A job with its command, its resources, and the jobs it depends on."""

    name: str = Field(description="Name of the job, which is unique within the plan")
    stage: str = Field(description="Stage. Jobs of the same stage share a job definition and a line of the ledger")
    command: tuple[str, ...]
    resources: Resources
    image: str = ""
    num_nodes: int = Field(0, description="Number of nodes of a multi-node job (0: a single container)")
    array_size: int = Field(0, description="Number of tasks of an array (0: not an array)")
    environment: Mapping[str, str] = Field(
        default={}, description="Environment variables, which must not contain secrets because plans and logs show them"
    )
    retry: Retry = Retry()
    timeout_s: int = Field(description="Time limit of each attempt")
    depends_on: tuple[Dependency, ...] = ()


class JobPlan(Record):
    """A DAG of jobs, which are listed in topological order (see `ordered` in cycle.py).

    When a plan is stored, each placement is merged into its job. This ensures that we can still read the plans of
    earlier versions, and that their ids stay the same.
    """

    pipeline: str = Field(description="Prefix of the names of all jobs on the platform")
    cycle: str
    workspace: str
    settings: str = Field("", description="Fingerprint of the pipeline settings, which are the same for all jobs")
    jobs: tuple[JobSpec, ...]
    placements: Mapping[str, Mapping[str, JsonValue]] = Field(
        default={}, description="Placement of each job, by job name. Its fields depend on the target"
    )

    @property
    def plan_id(self) -> str:
        """Return a fingerprint of the content, which is the same for equal plans on any machine."""
        return fingerprint(self.model_dump(mode="json"))

    def job(self, name: str) -> JobSpec:
        """Return the job with the given name. Raises StopIteration if it does not exist."""
        return next(job for job in self.jobs if job.name == name)

    @model_validator(mode="before")
    @classmethod
    def _split_placements(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "placements" in data:
            return data
        jobs = [job if isinstance(job, Mapping) else None for job in data.get("jobs", ())]
        if None in jobs:
            return data  # the plan was constructed in Python rather than read from JSON
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
    """Raise ConfigError if a platform cannot run a plan.

    Each of `problems` has the form `job: text`. Problems with the same text are reported once, with all their jobs.
    """
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
