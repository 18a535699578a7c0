"""The post-mortem of a failed attempt, a JSON object of bounded size that does not contain secrets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import Field, JsonValue

from jobs.node.group import NodeStatus
from pipeline.core.record import Record
from pipeline.core.secrets import is_secret, without_secrets

MAX_BYTES = 2**20
MAX_LINES = 400  # maximum number of log lines to include, and twice the maximum number of events
_SHORT: dict[str, Any] = {"events": (), "log": (), "stacks": {}, "processes": (), "settings": None, "environment": {}}
SHOWN_PREFIXES = ("TRN", "AWS_BATCH", "NEURON", "PJRT", "XLA", "CCOM_", "GLOO_", "FI_")


@dataclass(frozen=True)
class ProcessStatus:
    """The status of a process of the command, as included in a post-mortem."""

    pid: int
    words: tuple[str, ...]
    status: str
    cpu_s: float
    memory_bytes: int


class PostMortem(Record):
    """A node's report about a failed attempt of a job."""

    schema_version: Literal[1] = 1
    job: str
    job_id: str
    attempt: int
    node: int
    num_nodes: int
    host: str
    command: tuple[str, ...]
    exit_code: int = Field(description="Exit code of trnjobs-entry on this node")
    own_exit_code: int = Field(description="Exit code of the command on this node")
    returncode: int | None = Field(
        description="Return code of the process (negative for a signal), None if it never ran"
    )
    reason: str = Field(description="Why the command was stopped, empty if it was not")
    killed: bool = Field(description="Whether the command had to be killed, because it did not stop in time")
    out_of_memory_kills: int | None = Field(description="Processes killed by the kernel for lack of memory, if known")
    started: datetime
    ended: datetime
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    settings: JsonValue
    nodes: tuple[NodeStatus, ...]
    processes: tuple[ProcessStatus, ...]
    stacks: Mapping[int, str]
    log: tuple[str, ...]
    events: tuple[str, ...] = Field(description="Last events of the cycle")
    unread: tuple[str, ...] = Field((), description="Parts of the report that could not be collected, with the error")


def shown_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that configure the job, except those whose name suggests a secret."""
    return {
        name: value for name, value in sorted(env.items()) if name.startswith(SHOWN_PREFIXES) and not is_secret(name)
    }


def as_bytes(report: PostMortem, secrets: Sequence[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Serialise a report to JSON, with secrets removed.

    If the result is larger than `max_bytes`, the oldest lines are dropped first, followed by other long fields.
    """
    data = b""
    for lines in (MAX_LINES, 100, 20, 0):
        recent = {"events": report.events[-lines // 2 :], "log": report.log[-lines:]}
        report = report.model_copy(update=recent if lines else _SHORT)
        if not lines:
            report = report.model_copy(
                update={"command": report.command[:1], "nodes": report.nodes[:32], "reason": report.reason[:1000]}
            )
        data = json.dumps(without_secrets(report.model_dump(mode="json"), secrets), indent=1).encode() + b"\n"
        if len(data) <= max_bytes:
            break
    return data[:max_bytes]
