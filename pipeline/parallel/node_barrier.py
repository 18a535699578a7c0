"""The nodes of one run wait for each other through small objects in the workspace.

No node trains while another compiles: a compile in the middle of a collective looks like a hang to its peers. In each
phase a node leaves `<phase>/node-<rank>.yes` or `.no`, its answer to the question of the phase; a node that will not
come leaves `node-<rank>.failed` with its error as text. One listing shows all.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from pipeline.core.errors import Preempted, TransientError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound, Storage, join_key

FIRST_POLL_S, MAX_POLL_S = 0.5, 10.0


@dataclass(frozen=True)
class Nodes:
    """All nodes of one try of one job, seen from one of them. A node alone waits for nobody and writes nothing.

    `folder` must differ for every try of every job (Batch: job id and attempt number), or markers of an earlier one
    would be taken for this one's. `storage` must not heed `stop`: who is stopped still tells the others.
    """

    storage: Storage
    folder: str
    rank: int
    num_nodes: int
    timeout_s: float
    stop: StopSignal
    clock: Callable[[], float] = time.monotonic

    def wait(self, phase: str) -> None:
        """Return when all nodes have come to this phase; each is to come to it once.

        Raises TransientError when a node failed or is not there after `timeout_s`, and Preempted when stopped.
        """
        self.any(phase, False)

    def any(self, phase: str, mine: bool, *, timeout_s: float = math.inf) -> bool:
        """Wait as `wait` does, here perhaps less long. Return whether `mine` was true on one node at least."""
        if self.num_nodes == 1:
            return mine
        self.storage.write_bytes(self._key(f"{phase}/node-{self.rank}.{'yes' if mine else 'no'}"), b"")
        limit_s = min(timeout_s, self.timeout_s)
        deadline, poll_s = self.clock() + limit_s, FIRST_POLL_S
        while True:
            names = {stat.key[len(self.folder) + 1 :] for stat in self.storage.list(self.folder)}
            answers = {
                rank: f"{phase}/node-{rank}.yes" in names
                for rank in range(self.num_nodes)
                if names & {f"{phase}/node-{rank}.yes", f"{phase}/node-{rank}.no"}
            }
            if len(answers) == self.num_nodes:  # what failed after all had come is for the next phase
                return any(answers.values())
            if any(name.endswith(".failed") for name in names):
                self.check()
            missing = ", ".join(str(rank) for rank in range(self.num_nodes) if rank not in answers)
            if self.clock() > deadline:
                raise TransientError(
                    f"node {missing} of {self.num_nodes} not ready after {format_duration(limit_s)}",
                    expected=f"a marker of each in {self.storage.uri(self._key(phase))}",
                    next_command="look at the log of that node; then run the job again",
                )
            if self.stop.wait(min(poll_s, limit_s)):
                self.stop.raise_if_set(f"waiting for node {missing}")
            poll_s = min(MAX_POLL_S, poll_s * 1.5)

    def exchange(self, phase: str, mine: bytes, *, timeout_s: float) -> tuple[dict[int, bytes], dict[int, str]]:
        """Return (what each node brings to this phase, by rank; why those that are absent did not come in time).

        Where one has failed, it alone is named: the others may only be waiting, too.
        """
        if self.num_nodes == 1:
            return {self.rank: mine}, {}
        keys = {rank: self._key(f"{phase}/node-{rank}.json") for rank in range(self.num_nodes)}
        self.storage.write_bytes(keys[self.rank], mine)
        late = ""
        try:
            self.any(phase, False, timeout_s=timeout_s)
        except TransientError as error:
            late = error.seen
        found = {rank: data for rank, key in keys.items() if (data := self._read(key)) is not None}
        absent = [rank for rank in keys if late and rank not in found]  # the last one may come while we give up
        failed = {rank: f"it failed: {why}" for rank in absent if (why := self._failure(rank))}
        return found, failed or dict.fromkeys(absent, late)

    def fail(self, reason: str) -> None:
        self.storage.write_bytes(self._key(f"node-{self.rank}.failed"), reason.encode())

    def check(self) -> None:
        """Raise TransientError when another node has failed."""
        for rank in range(self.num_nodes):
            if rank != self.rank and (why := self._failure(rank)):
                raise TransientError(
                    f"node {rank} failed: {why}",
                    expected="every node to finish compiling before one trains",
                    next_command=f"look at the log of node {rank}; this node is fine",
                )

    @contextmanager
    def telling(self) -> Iterator[None]:
        """End the wait of the other nodes where the block raises."""
        try:
            yield
        except BaseException as error:
            if self.num_nodes > 1:
                try:
                    self.fail(str(error) if isinstance(error, Preempted) else f"{type(error).__name__}: {error}")
                except Exception as second:
                    error.add_note(f"and the other nodes could not be told: {second}")
            raise

    def _failure(self, rank: int) -> str:
        """Return why a node has failed; empty while it has not."""
        return (self._read(self._key(f"node-{rank}.failed")) or b"").decode(errors="replace")

    def _read(self, key: str) -> bytes | None:
        with suppress(KeyNotFound):
            return self.storage.read_bytes(key)
        return None

    def _key(self, name: str) -> str:
        return join_key(self.folder, name)
