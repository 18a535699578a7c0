"""Who we are among the ranks, read from torchrun's environment, and which part of shared work is ours."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.core.errors import ConfigError

# The words of a place, on every platform the same: `trnjobs-entry` makes them of the platform's own.
JOB_ID = "TRNJOBS_JOB_ID"
ATTEMPT = "TRNJOBS_ATTEMPT"
NODE = "TRNJOBS_NODE"
NUM_NODES = "TRNJOBS_NODES"
"""Without it a process is one of a single machine."""
MAIN_ADDRESS = "TRNJOBS_MAIN"
ARRAY_INDEX = "TRNJOBS_INDEX"


@dataclass(frozen=True)
class World:
    """Ranks as in torch.distributed."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def node_from_env(env: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(node rank, number of nodes) of a multi-node job.

    (0, 1) elsewhere. Raises ConfigError when the variables do not fit together.
    """
    if NUM_NODES not in env:
        return 0, 1
    node, nodes = env.get(NODE, ""), env[NUM_NODES]
    if node.isdecimal() and nodes.isdecimal() and int(node) < int(nodes):
        return int(node), int(nodes)
    raise ConfigError(
        f"a multi-node job with {NODE}={node!r} and {NUM_NODES}={nodes!r}",
        expected=f"0 <= {NODE} < {NUM_NODES}, as trnjobs-entry sets them",
    )


def world_from_env(env: Mapping[str, str] = os.environ) -> World:
    """The world torchrun describes; without it, one process on each node. Raises ConfigError for a world in pieces."""
    if "WORLD_SIZE" not in env:
        node_rank, nodes = node_from_env(env)
        return World(rank=node_rank, world_size=nodes, node_rank=node_rank)
    try:
        world = World(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", "1")),
            node_rank=int(env.get("GROUP_RANK", "0")),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"WORLD_SIZE is set but the launch environment is not whole: {error}",
            expected="RANK, WORLD_SIZE and LOCAL_RANK as torchrun sets them",
            next_command="start through --launch.processes N or torchrun, or unset WORLD_SIZE",
        ) from error
    if not 0 <= world.rank < world.world_size:
        raise ConfigError(f"RANK {world.rank} of WORLD_SIZE {world.world_size}", expected="0 <= RANK < WORLD_SIZE")
    return world


def check_world(world: World, *, runtime_world_size: int, reduces_in_graph: bool, device: str) -> None:
    """Compare torchrun's world with what the device runtime believes.

    Two PJRT-CPU processes each report a world of one; then gradients go through gloo and that is right. Anywhere else a
    difference means every rank would train alone without a word. Raises ConfigError.
    """
    expected = world.world_size if reduces_in_graph else 1
    if runtime_world_size != expected:
        raise ConfigError(
            f"torchrun says world size {world.world_size}, the {device} runtime says {runtime_world_size}",
            expected=f"a runtime world size of {expected}",
            next_command="launch one process per device (--launch.processes, or torchrun --nproc-per-node), and unset"
            " CPU_NUM_DEVICES, NEURON_PJRT_WORLD_SIZE and NEURON_PJRT_PROCESSES_NUM_DEVICES; a runtime that still says"
            " 1 was asked for its world size before its replication was initialised",
        )


# The first compiles what a failed trial run collected; the second is for the tool to set, in the trial run alone.
TRACE_FILE = "TRN_TRACE_FILE"  # not TRNPIPE_: those are settings
"""Environment of a trial run that is driven: where rank 0 leaves its graph manifest instead of publishing it."""


RANK_REPORTS = "TRN_HEALTH_DIR"  # not TRNPIPE_: those are settings
"""Environment of the ranks that a node starts for its checks: where each leaves its report."""


# Which part of the work is ours: one of several jobs, one of several ranks in it.


def worker_of(jobs: int, world: World, env: Mapping[str, str], stage: str, job: int | None = None) -> tuple[int, int]:
    """Return (worker, workers) among the ranks of `jobs` jobs. Raises ConfigError if index and number do not fit."""
    index = job_index(jobs, env, stage, job)
    return index * world.world_size + world.rank, jobs * world.world_size


def job_index(jobs: int, env: Mapping[str, str], stage: str, job: int | None = None) -> int:
    """Return the index of this job among `jobs`: `job` if it is given, else that of the array. Raises ConfigError."""
    if job is not None:
        source, index = f"{stage}.worker", job
    elif given := env.get(ARRAY_INDEX):
        if not given.isdecimal():
            raise ConfigError(f"{ARRAY_INDEX} is {given!r}", expected="a number, as trnjobs-entry sets it")
        source, index = ARRAY_INDEX, int(given)
        if jobs == 1:
            raise ConfigError(
                f"{ARRAY_INDEX} is {given}, but {stage}.workers is 1: every job of the array would do all the work",
                expected="the size of the array",
                next_command=f"--{stage}.workers SIZE, in the command of the array job",
            )
    elif jobs > 1:
        raise ConfigError(
            f"{stage}.workers is {jobs}, and nothing says which of them this is",
            expected=f"an array job of that size, which sets {ARRAY_INDEX}",
            next_command=f"{ARRAY_INDEX}=INDEX in its environment, from 0",
        )
    else:
        return 0
    if index >= jobs:
        raise ConfigError(
            f"{source} is {index} of {jobs} workers",
            expected=f"0 to {jobs - 1}",
            next_command=f"--{stage}.workers SIZE, the size of the array",
        )
    return index
