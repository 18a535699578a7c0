"""What a job is, whatever runs it. Where it runs (queue, role, log group, ...) is a placement of the target."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_serializer, model_validator

from pipeline.core.errors import EXIT_TABLE
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
