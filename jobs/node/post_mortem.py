"""The post-mortem of a failed attempt: one bounded JSON object without secrets. Pure."""

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
MAX_LINES = 400  # lines of the log, and half as many events
_SHORT: dict[str, Any] = {"events": (), "log": (), "stacks": {}, "processes": (), "settings": None, "environment": {}}
SHOWN_PREFIXES = ("TRN", "AWS_BATCH", "NEURON", "PJRT", "XLA", "CCOM_", "GLOO_", "FI_")


@dataclass(frozen=True)
class ProcessStatus:
    """A process of the command in a post-mortem."""

    pid: int
    words: tuple[str, ...]
    status: str
    cpu_s: float
    memory_bytes: int


class PostMortem(Record):
    """Report of one node on a failed attempt of a job."""

    schema_version: Literal[1] = 1
    job: str
    job_id: str
    attempt: int
    node: int
    num_nodes: int
    host: str
    command: tuple[str, ...]
    exit_code: int = Field(description="Exit code of the entry on this node")
    own_exit_code: int = Field(description="Exit code of the command on this node")
    returncode: int | None = Field(description="Return code of the process (minus a signal), None if it never ran")
    reason: str = Field(description="Why the command was stopped, empty if it ended by itself")
    killed: bool = Field(description="The command did not stop within the grace period")
    out_of_memory_kills: int | None = Field(description="Kills by the kernel in this container, None if unknown")
    started: datetime
    ended: datetime
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    settings: JsonValue
    nodes: tuple[NodeStatus, ...]
    processes: tuple[ProcessStatus, ...]
    stacks: Mapping[int, str]
    log: tuple[str, ...]
    events: tuple[str, ...] = Field(description="Last lines of the cycle's event log")
    unread: tuple[str, ...] = Field((), description="Items that could not be read, with the error")


def shown_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that configure the job, without any that has the name of a secret."""
    return {
        name: value for name, value in sorted(env.items()) if name.startswith(SHOWN_PREFIXES) and not is_secret(name)
    }


def as_bytes(report: PostMortem, secrets: Sequence[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Serialise to JSON without secrets in at most `max_bytes`, dropping the oldest lines first, then long fields."""
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
