"""What the main node knows of every node, and what follows from it. Pure: the time is passed in."""

import contextlib
import socket
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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


# What nodes say to each other: one small JSON object a line, over one TCP connection of each node to the main node.

MAX_LINE_BYTES = 4096
MAX_UNSENT_BYTES = 64 * 1024


class Message(BaseModel):
    """hello: a node comes · go: all are there · beat: still here · stop: end your command · done: my command's exit
    code · bye: the main node knows the outcome of all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["hello", "go", "beat", "stop", "done", "bye"]
    token: str = Field("", max_length=64)
    node: int = Field(0, ge=0)
    code: int = Field(0, ge=0, le=255)
    text: str = Field("", max_length=1000)


class PeerGone(Exception):
    """The other end has closed, or talks in another language. The text says which."""


class Channel:
    """One connection. Never blocks."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._unread, self._unsent = bytearray(), bytearray()

    def send(self, message: Message) -> None:
        """Send now, or with a later `flush`. Raises PeerGone."""
        self._unsent += message.model_dump_json(exclude_defaults=True).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what waits. Raises PeerGone."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT_BYTES:
                raise PeerGone("it reads nothing") from None
        except OSError as error:
            raise PeerGone(f"the connection is broken ({error.strerror or error})") from None

    def receive(self) -> list[Message]:
        """What has come, in order. Raises PeerGone once all of it was read and the other end has closed."""
        messages: list[Message] = []
        while True:
            try:
                block = self.socket.recv(65536)
            except BlockingIOError:
                return messages
            except OSError as error:
                if messages:
                    return messages
                raise PeerGone(f"the connection is broken ({error.strerror or error})") from None
            if not block:
                if messages:
                    return messages  # the next call meets the end again
                raise PeerGone("the connection was closed")
            self._unread += block
            messages += self._take_lines()

    def close(self) -> None:
        """Twice is fine."""
        self.socket.close()

    def finish(self) -> None:
        """Say that nothing more will come; what was sent still arrives."""
        with contextlib.suppress(OSError):  # it has gone first
            self.socket.shutdown(socket.SHUT_WR)

    def _take_lines(self) -> list[Message]:
        *lines, rest = self._unread.split(b"\n")
        if any(len(line) > MAX_LINE_BYTES for line in (*lines, rest)):
            raise PeerGone(f"a line of more than {MAX_LINE_BYTES} bytes")
        self._unread = bytearray(rest)
        try:
            return [Message.model_validate_json(bytes(line)) for line in lines]
        except ValidationError:
            raise PeerGone("no message of an entry") from None
