"""The nodes of one run wait for each other through small objects in the workspace.

No node trains while another compiles: a compile in the middle of a collective looks like a hang to its peers. Each
node leaves `node-<rank>.ok` or `node-<rank>.failed` (with its error as text); one listing shows who is there.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeline.core.errors import Preempted, TransientError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.io.keys import join_key
from pipeline.io.storage import Storage

FIRST_POLL_S, MAX_POLL_S = 0.5, 10.0


def wait_for_nodes(
    storage: Storage,
    prefix: str,
    node_rank: int,
    num_nodes: int,
    attempt: str,
    timeout_s: float,
    stop: StopSignal,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Say that this node is ready and return when all are. Alone it returns at once and writes nothing.

    `attempt` must differ for every try of every job (Batch: job id and attempt number), or markers of an earlier one
    would be taken for this one's. Raises TransientError when a node failed or is not there after `timeout_s`, and
    Preempted when stopped, which the others then hear of too.
    """
    if num_nodes == 1:
        return
    folder = join_key(prefix, attempt)
    storage.write_bytes(join_key(folder, f"node-{node_rank}.ok"), b"")
    deadline, poll_s = clock() + timeout_s, FIRST_POLL_S
    while missing := _missing(storage, folder, node_rank, num_nodes):
        if clock() > deadline:
            raise TransientError(
                f"node {', '.join(map(str, missing))} of {num_nodes} not ready after {format_duration(timeout_s)}",
                expected=f"a marker of each in {storage.uri(folder)}",
                next_command="look at the log of that node; then run the job again",
            )
        if stop.wait(min(poll_s, max(0.0, timeout_s))):
            try:
                stop.raise_if_set(f"waiting for node {', '.join(map(str, missing))}")
            except Preempted as error:
                report_failure(storage, prefix, node_rank, attempt, error)
                raise
        poll_s = min(MAX_POLL_S, poll_s * 1.5)


def report_failure(storage: Storage, prefix: str, node_rank: int, attempt: str, error: BaseException) -> None:
    """Tell the other nodes that this one will not come."""
    text = f"{type(error).__name__}: {error}"
    storage.write_bytes(join_key(join_key(prefix, attempt), f"node-{node_rank}.failed"), text.encode())


@contextmanager
def all_nodes(
    storage: Storage,
    prefix: str,
    node_rank: int,
    num_nodes: int,
    attempt: str,
    timeout_s: float,
    stop: StopSignal,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Do the block on every node and leave it when all have; an error in one of them ends the wait of all others."""
    try:
        yield
    except BaseException as error:
        if num_nodes > 1:
            try:
                report_failure(storage, prefix, node_rank, attempt, error)
            except Exception as second:
                error.add_note(f"and the other nodes could not be told: {second}")
        raise
    wait_for_nodes(storage, prefix, node_rank, num_nodes, attempt, timeout_s, stop, clock=clock)


def _missing(storage: Storage, folder: str, node_rank: int, num_nodes: int) -> list[int]:
    """Ranks that have left no marker yet. Raises TransientError when one has failed."""
    names = {stat.key.rpartition("/")[2] for stat in storage.list(folder)}
    for rank in range(num_nodes):
        if rank != node_rank and f"node-{rank}.failed" in names:
            reason = storage.read_bytes(join_key(folder, f"node-{rank}.failed")).decode(errors="replace")
            raise TransientError(
                f"node {rank} failed: {reason}",
                expected="every node to finish compiling before one trains",
                next_command=f"look at the log of node {rank}; this node is fine",
            )
    return [rank for rank in range(num_nodes) if f"node-{rank}.ok" not in names]
