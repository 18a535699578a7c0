"""What a job is, whatever runs it: this machine or AWS Batch."""

from collections.abc import Mapping
from enum import StrEnum

from pydantic import Field

from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record


class Action(StrEnum):
    """What to do after an attempt that failed."""

    RETRY = "RETRY"
    EXIT = "EXIT"


class RetryRule(Record):
    """One entry of evaluateOnExit: all conditions given must hold. A trailing * matches any rest."""

    action: Action
    on_status_reason: str = ""
    on_reason: str = ""
    on_exit_code: str = ""


class RetryStrategy(Record):
    """How often, and after what, a job is tried again."""

    attempts: int = Field(1, description="Tries in all, the first included")
    rules: tuple[RetryRule, ...] = Field((), description="The first that matches decides; none: retry")


class DependencyType(StrEnum):
    """What a dependency waits for."""

    ALL = "ALL"
    """The whole of the other job. (AWS Batch: no type.)"""
    N_TO_N = "N_TO_N"
    """Child i of an array waits for child i of the other."""
    SEQUENTIAL = "SEQUENTIAL"
    """Child i of an array waits for its own child i - 1."""


class Dependency(Record):
    """A job that must succeed before. SEQUENTIAL names no job."""

    job: str = ""
    type: DependencyType = DependencyType.ALL


class Ulimit(Record):
    """A limit of a container; -1 is none."""

    name: str
    soft: int
    hard: int


class Resources(Record):
    """What one node of a job gets."""

    vcpus: int
    memory_mib: int
    shared_memory_mib: int = Field(64, description="Size of the tmpfs for shared memory")
    devices: tuple[str, ...] = Field((), description="Device files, such as /dev/neuron0")
    ulimits: tuple[Ulimit, ...] = ()
    instance_type: str = Field("", description="What it is meant for and priced as; told to multi-node jobs")
    processes_per_node: int = Field(1, description="Ranks to start on a node")


class JobSpec(Record):
    """One job of a cycle."""

    name: str = Field(description="Unique within the cycle")
    stage: str
    command: tuple[str, ...]
    resources: Resources
    image: str = ""
    num_nodes: int = Field(0, description="Nodes that run at once; 0: an ordinary container")
    array_size: int = Field(0, description="Children; 0: no array")
    environment: Mapping[str, str] = Field(default={}, description="Never a secret: it is shown in plans and logs")
    retry: RetryStrategy = RetryStrategy()
    timeout_s: int = Field(description="Of one attempt, over all nodes")
    queue: str = ""
    share_identifier: str = ""
    priority: int = 0
    depends_on: tuple[Dependency, ...] = ()
    job_role: str = Field("", description="ARN of the credentials that the code sees; empty: none")
    log_group: str = "/aws/batch/job"

    @property
    def vcpus(self) -> int:
        """Of all nodes or children together."""
        return self.resources.vcpus * max(1, self.num_nodes, self.array_size)


class CyclePlan(Record):
    """All jobs of one cycle, each after those it depends on."""

    pipeline: str
    cycle: str
    workspace: str
    settings: str = Field("", description="Fingerprint of the settings of the pipeline that all jobs share")
    jobs: tuple[JobSpec, ...]

    @property
    def plan_id(self) -> str:
        """Names the content: equal plans have equal ids on every machine."""
        return fingerprint(self.model_dump(mode="json"))

    def job(self, name: str) -> JobSpec:
        """One job by name. Raises KeyError."""
        return next(job for job in self.jobs if job.name == name)
