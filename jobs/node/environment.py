"""Which job this is, and which node of it, in the words of jobs/node/words.py; and how long things may take."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

from pipeline.core.errors import ConfigError
from pipeline.parallel.network import MASTER_PORT
from pipeline.parallel.world import ARRAY_INDEX, ATTEMPT, JOB_ID, MAIN_ADDRESS, node_from_env
from pipeline.proc.children import COMMAND_S

LOOPBACK = ("127.0.0.1", "localhost")  # of a gang on one machine, which may have no network


@dataclass(frozen=True)
class Place:
    workspace: str
    cycle: str
    job: str
    """As in the plan; of a child of an array: name-index."""
    job_id: str
    """The same on all nodes."""
    attempt: int
    node: int
    """0 is the main node."""
    num_nodes: int
    main_address: str
    """Empty on the main node, which then listens on all interfaces, unless MASTER_ADDR says where it is to listen."""
    port: int
    """Where the main node listens."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Raises ConfigError when the variables do not fit together."""
        node, num_nodes = node_from_env(env)
        address = env.get("MASTER_ADDR") or (env.get(MAIN_ADDRESS, "") if node > 0 else "")  # as for torchrun
        if node > 0 and not address:
            raise ConfigError(
                f"node {node} of {num_nodes} does not know the main node",
                expected=f"its address in {MAIN_ADDRESS}",
            )
        index = env.get(ARRAY_INDEX, "")
        return cls(
            workspace=env.get("TRNPIPE_WORKSPACE", ""),
            cycle=env.get("TRNPIPE_CYCLE", ""),
            job=env.get("TRNJOBS_JOB", "job") + (f"-{index}" if index else ""),
            job_id=env.get(JOB_ID, "local"),
            attempt=_whole(env, ATTEMPT, 1),
            node=node,
            num_nodes=num_nodes,
            main_address=address,
            port=_whole(env, "MASTER_PORT", MASTER_PORT) + 1,  # beside torchrun's
        )

    @property
    def token(self) -> str:
        """Known to the nodes of this try alone: a node left over from an earlier one has another."""
        return hashlib.sha256(f"{self.job_id}\n{self.attempt}".encode()).hexdigest()

    @property
    def is_in_cycle(self) -> bool:
        return bool(self.workspace and self.cycle)


@dataclass(frozen=True)
class Timing:
    """How long things may take, in seconds. `TRNJOBS_GATHER_S` in the environment sets `gather_s`, and so on."""

    heartbeat_s: float = 5.0
    lost_after_s: float = 30.0
    """A node that has not been heard of for so long is lost."""
    gather_s: float = 900.0
    """For all nodes to come: AWS Batch starts them in any order, minutes apart."""
    grace_s: float = COMMAND_S
    """From SIGTERM to SIGKILL of the command; AWS Batch kills the container after 30."""
    bundle_s: float = 10.0
    """For the post-mortem."""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Raises ConfigError for what is no positive number."""
        names = {field.name: f"TRNJOBS_{field.name.upper()}" for field in fields(cls)}
        return cls(**{name: _seconds(env, variable) for name, variable in names.items() if variable in env})


def _whole(env: Mapping[str, str], variable: str, default: int) -> int:
    text = env.get(variable, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{variable}={text!r}", expected="a whole number")
    return int(text)


def _seconds(env: Mapping[str, str], variable: str) -> float:
    try:
        seconds = float(env[variable])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{variable}={env[variable]!r}", expected="a number of seconds above 0")
    return seconds
