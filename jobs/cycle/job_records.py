"""What is known of the jobs of a cycle, the same for this machine, AWS Batch and SageMaker."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from pipeline.core.record import Record


class JobState(StrEnum):
    """States of AWS Batch, in the order in which a job passes them. A retry goes back to RUNNABLE.

    CANCELLED is ours: AWS Batch and SageMaker report such a job as failed or stopped.
    """

    SUBMITTED = "SUBMITTED"
    PENDING = "PENDING"
    RUNNABLE = "RUNNABLE"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self is JobState.SUCCEEDED or self.is_failure

    @property
    def is_failure(self) -> bool:
        """Whether the job has ended without success."""
        return self in (JobState.FAILED, JobState.CANCELLED)

    @property
    def is_active(self) -> bool:
        """Whether a try is under way."""
        return self in (JobState.STARTING, JobState.RUNNING)


class AttemptRecord(Record):
    """One try of one job. Times are seconds since 1970; None where it has not come to that."""

    started_at: float | None = None
    stopped_at: float | None = None
    exit_code: int | None = Field(None, description="Of the container, or of the main node's; none: it never ran")
    status_reason: str = ""
    reason: str = Field("", description="Of the container, such as OutOfMemoryError")
    log_streams: tuple[str, ...] = Field((), description="One a node, in the order of nodes")
    error: str = Field("", description="What its log says went wrong, in a few lines; empty: not known")
    error_node: int = Field(0, description="Of which node that log is")
    billable_s: float | None = Field(
        None, description="Of each machine, where the platform tells; none: from its times"
    )

    @property
    def seconds(self) -> float | None:
        """None until it has ended, or when it never ran."""
        return None if self.started_at is None or self.stopped_at is None else self.stopped_at - self.started_at


class JobRecord(Record):
    """One job, or one child of an array."""

    name: str = Field(description="As in the plan; of a child: name:index")
    id: str
    state: JobState
    status_reason: str = ""
    created_at: float
    started_at: float | None = None
    stopped_at: float | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    children: tuple["JobRecord", ...] = Field((), description="Of an array, by index")
    num_nodes: int = Field(0, description="0: an ordinary container")

    def leaves(self) -> tuple["JobRecord", ...]:
        """Return what runs: the children of an array, else the job itself."""
        return self.children or (self,)

    def tries(self) -> list[AttemptRecord]:
        """Of all leaves."""
        return [attempt for leaf in self.leaves() for attempt in leaf.attempts]


Outcome = Literal["succeeded", "failed", "refused", "cancelled"]
"""Of a cycle. refused: the gate did its work, production stays as it is."""


class Submission(Record):
    """A job that was handed over. Written before the next one is submitted."""

    job: str
    id: str
    definition: str = ""
    submitted_at: float


class Cancel(Record):
    """Why a job is to end before its time. `at`: since when, in seconds since 1970."""

    reason: str
    at: float


class Closed(Record):
    """The end of a cycle: from then on the next one may start."""

    outcome: Outcome
    at: float
    reason: str = ""
    round: int | None = Field(None, description="Of submission, whose end it is; none: an earlier version wrote it")

    @property
    def text(self) -> str:
        return self.outcome + (f", {self.reason}" if self.reason else "")


class Sighting(Record):
    """A job that was seen blocked, at every look since `since` (seconds since 1970) for the same reason."""

    job: str = Field(description="Name of the record; of a child: name:index")
    id: str
    reason: str
    since: float
