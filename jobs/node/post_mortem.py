"""The post-mortem of a failed attempt: one bounded JSON object without secrets. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import Field, JsonValue

from jobs.node.group import NodeSeen
from pipeline.core.record import Record
from pipeline.core.secrets import is_secret, without_secrets

MAX_BYTES = 2**20
MAX_LINES = 400  # of the log; half as many events
_SHORT: dict[str, Any] = {"events": (), "log": (), "stacks": {}, "processes": (), "settings": None, "environment": {}}
SHOWN_PREFIXES = ("TRN", "AWS_BATCH", "NEURON", "PJRT", "XLA", "CCOM_", "GLOO_", "FI_")


@dataclass(frozen=True)
class ProcessSeen:
    pid: int
    words: tuple[str, ...]
    status: str
    cpu_s: float
    memory_bytes: int


class PostMortem(Record):
    """Why one node's try of a job failed, as far as that node can tell."""

    schema_version: Literal[1] = 1
    job: str
    job_id: str
    attempt: int
    node: int
    num_nodes: int
    host: str
    command: tuple[str, ...]
    exit_code: int = Field(description="Of this node's entry")
    own_exit_code: int = Field(description="Of this node's command")
    returncode: int | None = Field(description="Of the process: minus a signal; none: it never ran")
    reason: str = Field(description="Why it was stopped; empty when it ended by itself")
    killed: bool = Field(description="It did not stop within the grace")
    out_of_memory_kills: int | None = Field(description="By the kernel in this container during the try; none: unknown")
    started: datetime
    ended: datetime
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    settings: JsonValue
    nodes: tuple[NodeSeen, ...]
    processes: tuple[ProcessSeen, ...]
    stacks: Mapping[int, str]
    log: tuple[str, ...]
    events: tuple[str, ...] = Field(description="Last lines of the cycle's event log")
    unread: tuple[str, ...] = Field((), description="What could not be read, and why")


def shown_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that say how the job was run; never one whose name tells of a secret."""
    return {
        name: value for name, value in sorted(env.items()) if name.startswith(SHOWN_PREFIXES) and not is_secret(name)
    }


def as_bytes(one: PostMortem, secrets: Sequence[str], max_bytes: int = MAX_BYTES) -> bytes:
    """Return JSON without secrets, of at most `max_bytes`: the oldest lines go first, then what else is long."""
    data = b""
    for lines in (MAX_LINES, 100, 20, 0):
        one = one.model_copy(update={"events": one.events[-lines // 2 :], "log": one.log[-lines:]} if lines else _SHORT)
        if not lines:
            one = one.model_copy(
                update={"command": one.command[:1], "nodes": one.nodes[:32], "reason": one.reason[:1000]}
            )
        data = json.dumps(without_secrets(one.model_dump(mode="json"), secrets), indent=1).encode() + b"\n"
        if len(data) <= max_bytes:
            break
    return data[:max_bytes]
