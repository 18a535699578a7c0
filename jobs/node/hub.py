"""The main node's side: it hears all nodes, tells them to start and to stop, and knows when all have ended."""

import contextlib
import hmac
import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jobs.node.environment import Place, Timing
from jobs.node.messages import Channel, Message, NodeSeen, PeerGone, Roll
from pipeline.core.errors import TransientError

HELLO_S = 10.0
MAX_STRANGERS = 64
SETTLE_S = 2.0  # beyond the grace: for the words of nodes that were just killed to arrive


@dataclass
class _Stranger:
    channel: Channel
    address: str
    until: float


@dataclass
class Hub:
    """All nodes of this try, seen from the main node. `tick` does everything; it never blocks."""

    place: Place
    timing: Timing
    say: Callable[[str], None]
    listener: socket.socket
    clock: Callable[[], float] = time.monotonic
    roll: Roll = field(init=False)
    ready: bool = False
    """All nodes are there and have been told to start."""
    _nodes: dict[int, Channel] = field(default_factory=dict)
    _strangers: list[_Stranger] = field(default_factory=list)
    _opened: float = field(init=False)
    _beat_at: float = -math.inf
    _stop_at: float = math.inf
    _stop_reason: str = ""

    def __post_init__(self) -> None:
        self.roll = Roll(self.place.num_nodes, self.timing.lost_after_s)
        self._opened = self.clock()

    def sockets(self) -> Iterator[socket.socket]:
        """What to wait on."""
        yield self.listener
        yield from (stranger.channel.socket for stranger in self._strangers)
        yield from (channel.socket for channel in self._nodes.values())

    @property
    def trouble(self) -> str:
        """Why the command must be stopped; empty while all is well."""
        return self.roll.trouble

    @property
    def settled(self) -> bool:
        """Every node has told its outcome, is lost, or has had its time to stop."""
        limit_s = self.timing.grace_s + SETTLE_S
        return self.roll.settled or self.clock() - self._stop_at > limit_s

    def tick(self) -> None:
        now = self.clock()
        self._accept(now)
        self._meet(now)
        self._listen(now)
        if now - self._beat_at >= self.timing.heartbeat_s:
            self._beat_at = now
            self._tell(Message(kind="beat"))
        for node in self.roll.check(now):
            self._nodes.pop(node).close()  # should it wake, it hears that nobody waits for it
        if not self.ready:
            self._start(now)
        if self.roll.trouble:
            self.stop(self.roll.trouble)

    def report(self, code: int) -> None:
        """The main node's own command has ended."""
        self.roll.report(0, code)

    def stop(self, reason: str) -> None:
        """Tell all nodes to stop, once."""
        if self._stop_at == math.inf:
            self._stop_at, self._stop_reason = self.clock(), reason[:1000]
            self._tell(Message(kind="stop", text=self._stop_reason))

    def exit_code(self, own: int, *, stopped: bool) -> int:
        """The code of the whole job, which AWS Batch takes from the main node."""
        return self.roll.exit_code(stopped=stopped)

    def seen(self) -> list[NodeSeen]:
        return self.roll.seen(self.clock())

    def acknowledge(self) -> None:
        """Release the nodes, which wait for this before they exit."""
        self._tell(Message(kind="bye"))
        for channel in self._nodes.values():
            channel.finish()

    def close(self, limit_s: float) -> None:
        """Wait until the nodes have left, for `limit_s`: the end of the main node ends them, post-mortem or not."""
        until = time.monotonic() + limit_s
        for channel in self._nodes.values():
            channel.socket.settimeout(max(0.001, until - time.monotonic()))
            with contextlib.suppress(OSError):  # silent until the limit, or gone in another way
                while channel.socket.recv(65536):
                    channel.socket.settimeout(max(0.001, until - time.monotonic()))
            channel.close()
        for stranger in self._strangers:
            stranger.channel.close()
        self.listener.close()

    def _accept(self, now: float) -> None:
        while True:
            try:
                connection, address = self.listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if len(self._strangers) >= MAX_STRANGERS + self.place.num_nodes:
                connection.close()
                continue
            self._strangers.append(_Stranger(Channel(connection), str(address[0]), now + HELLO_S))

    def _meet(self, now: float) -> None:
        """Take those who say the right first words."""
        for stranger in list(self._strangers):
            try:
                words = stranger.channel.receive()
                if not words and now < stranger.until:
                    continue
                reason = self._refusal(words[0]) if words else "it says nothing"
            except PeerGone as gone:
                words, reason = [], str(gone)
            self._strangers.remove(stranger)
            if reason:
                self.say(f"refused a connection from {stranger.address}: {reason}")
                stranger.channel.close()
                continue
            node = words[0].node
            self._nodes[node] = stranger.channel
            self.roll.hear(node, now)
            self._take(node, words[1:])
            if self._stop_at < math.inf:
                self._send(node, Message(kind="stop", text=self._stop_reason))

    def _refusal(self, hello: Message) -> str:
        if hello.kind != "hello" or not hmac.compare_digest(hello.token.encode(), self.place.token.encode()):
            return "it is no node of this try (wrong token)"
        return "" if self.roll.takes(hello.node) else f"node {hello.node} is here already, or not of this job"

    def _listen(self, now: float) -> None:
        for node, channel in list(self._nodes.items()):
            try:
                channel.flush()
                words = channel.receive()
            except PeerGone as gone:
                self._drop(node, str(gone))
                continue
            if words:
                self.roll.hear(node, now)
            self._take(node, words)

    def _take(self, node: int, words: list[Message]) -> None:
        for word in words:
            if word.kind == "done":
                self.roll.report(node, word.code)

    def _start(self, now: float) -> None:
        if not self.roll.missing and not self.roll.trouble:
            self.ready = True
            self._tell(Message(kind="go"))
        elif now - self._opened > self.timing.gather_s:
            self.roll.give_up_waiting(self.timing.gather_s)

    def _tell(self, message: Message) -> None:
        for node in list(self._nodes):
            self._send(node, message)

    def _send(self, node: int, message: Message) -> None:
        try:
            self._nodes[node].send(message)
        except PeerGone as gone:
            self._drop(node, str(gone))

    def _drop(self, node: int, why: str) -> None:
        self._nodes.pop(node).close()
        self.roll.lose(node, why)


def listen(address: str, port: int) -> socket.socket:
    """A listener on this address alone, on all interfaces for an empty one. Raises TransientError for a taken port."""
    try:
        listener = socket.create_server((address, port), backlog=1024)
    except OSError as error:
        raise TransientError(
            f"cannot listen at {address or 'all interfaces'}:{port}: {error.strerror}",
            expected="a free port beside that of torchrun",
            next_command="run the job again; set MASTER_PORT where several jobs share a machine",
        ) from error
    listener.setblocking(False)
    return listener
