"""What the main node knows of every node, and what follows from it. Pure: the time is passed in."""

from dataclasses import dataclass, field

from pipeline.core.errors import EXIT_BUG, EXIT_OK
from pipeline.core.format import format_duration
from pipeline.parallel.launch import gang_exit_code


@dataclass(frozen=True)
class NodeSeen:
    """One node as the main node last saw it."""

    node: int
    heard_s_ago: float | None
    """None: it never came, or it is the main node itself."""
    exit_code: int | None
    lost: str
    """Why it counts as lost; empty when it does not."""


@dataclass
class Roll:
    """The nodes of one try. Node 0 is the main node itself, which is always there."""

    num_nodes: int
    lost_after_s: float
    trouble: str = ""
    """The first thing that went wrong; empty while all is well. From then on the try cannot succeed."""
    _heard: dict[int, float] = field(default_factory=dict)
    _codes: dict[int, int | None] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        """Nodes that have not come yet."""
        return [node for node in range(1, self.num_nodes) if node not in self._heard]

    @property
    def settled(self) -> bool:
        """Whether of every node the outcome is known. After trouble, nobody waits for nodes that have not come."""
        late = self.missing if self.trouble else []
        return len(self._codes.keys() | self._lost.keys() | set(late)) == self.num_nodes

    def takes(self, node: int) -> bool:
        """Whether a node of this number may come now: each comes once."""
        return 0 < node < self.num_nodes and node not in self._heard

    def hear(self, node: int, now: float) -> None:
        """A node has come, or is still there."""
        self._heard[node] = now

    def report(self, node: int, code: int) -> None:
        """The command of a node has ended.

        A bug reported after the trouble began says nothing: peers of a node that vanished fail in ways of their own.
        """
        self._codes[node] = None if self.trouble and code == EXIT_BUG else code
        if code != EXIT_OK:
            self._note(f"node {node} exited with {code}")

    def lose(self, node: int, why: str) -> None:
        """The connection of a node has ended. One that has reported is none the worse for it."""
        if node not in self._codes and node not in self._lost:
            self._lost[node] = why
            self._note(f"node {node} is lost: {why}")

    def check(self, now: float) -> list[int]:
        """Lose the nodes that have been silent for too long, and return them."""
        late = {node for node, at in self._heard.items() if now - at > self.lost_after_s}
        silent = sorted(late - self._codes.keys() - self._lost.keys())
        for node in silent:
            self.lose(node, f"no heartbeat for {format_duration(self.lost_after_s)}")
        return silent

    def give_up_waiting(self, waited_s: float) -> None:
        """Nodes that have not come will not be waited for."""
        for node in self.missing:
            self._lost[node] = "never came"
        if names := ", ".join(map(str, self.missing)):
            self._note(f"node {names} of {self.num_nodes} has not come within {format_duration(waited_s)}")

    def exit_code(self, *, stopped: bool) -> int:
        """One code for the job. `stopped`: by a signal from outside."""
        return gang_exit_code([self._codes.get(node) for node in range(self.num_nodes)], stopped=stopped)

    def seen(self, now: float) -> list[NodeSeen]:
        return [
            NodeSeen(
                node,
                round(now - self._heard[node], 3) if node in self._heard else None,
                self._codes.get(node),
                self._lost.get(node, ""),
            )
            for node in range(self.num_nodes)
        ]

    def _note(self, trouble: str) -> None:
        self.trouble = self.trouble or trouble
