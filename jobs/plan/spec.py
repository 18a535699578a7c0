"""What a job is, whatever runs it. Where it runs (queue, role, log group, ...) is a placement of the target."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from jobs.plan.retry import Retry
from pipeline.core.record import Record


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
