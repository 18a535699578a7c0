"""The nodes of one run wait for each other through small objects in the workspace.

No node trains while another compiles: a compile in the middle of a collective looks like a hang to its peers. In each
phase a node leaves `<phase>/node-<rank>.yes` or `.no`, its answer to the question of the phase; a node that will not
come leaves `node-<rank>.failed` with its error as text. One listing shows all.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeline.core.errors import Preempted, TransientError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, join_key

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
        """Wait as `wait` does, here perhaps less long; True when `mine` was true on one node at least."""
        if self.num_nodes == 1:
            return mine
        self.storage.write_bytes(self._key(f"{phase}/node-{self.rank}.{'yes' if mine else 'no'}"), b"")
        limit_s = min(timeout_s, self.timeout_s)
        deadline, poll_s = self.clock() + limit_s, FIRST_POLL_S
        while len(answers := self._answers(phase)) < self.num_nodes:
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
        return any(answers.values())

    def check(self) -> None:
        """Raise TransientError when another node has failed."""
        if self.num_nodes > 1:
            self._raise_for_failed(self._names())

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error in the block ends the wait of the other nodes."""
        try:
            yield
        except BaseException as error:
            if self.num_nodes > 1:
                try:
                    self._report(error)
                except Exception as second:
                    error.add_note(f"and the other nodes could not be told: {second}")
            raise

    def _report(self, error: BaseException) -> None:
        reason = str(error) if isinstance(error, Preempted) else f"{type(error).__name__}: {error}"
        self.storage.write_bytes(self._key(f"node-{self.rank}.failed"), reason.encode())

    def _answers(self, phase: str) -> dict[int, bool]:
        """What each node that is there has answered."""
        names = self._names()
        answers = {
            rank: f"{phase}/node-{rank}.yes" in names
            for rank in range(self.num_nodes)
            if names & {f"{phase}/node-{rank}.yes", f"{phase}/node-{rank}.no"}
        }
        if len(answers) < self.num_nodes:  # what failed after all had come is for the next phase
            self._raise_for_failed(names)
        return answers

    def _raise_for_failed(self, names: set[str]) -> None:
        for rank in range(self.num_nodes):
            if rank != self.rank and f"node-{rank}.failed" in names:
                reason = self.storage.read_bytes(self._key(f"node-{rank}.failed")).decode(errors="replace")
                raise TransientError(
                    f"node {rank} failed: {reason}",
                    expected="every node to finish compiling before one trains",
                    next_command=f"look at the log of node {rank}; this node is fine",
                )

    def _names(self) -> set[str]:
        cut = len(self.folder) + 1
        return {stat.key[cut:] for stat in self.storage.list(self.folder)}

    def _key(self, name: str) -> str:
        return join_key(self.folder, name)
