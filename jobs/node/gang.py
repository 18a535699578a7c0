"""The nodes of one try of a job: who is here, who has failed, and the word to stop.

Every node keeps one TCP connection to the main node and says one small JSON object a line. AWS Batch tells nobody when
a node dies: a broken connection does at once, a missing heartbeat after a while. (A TCPStore would cost each entry the
import of torch: measured 1.5 s of CPU and 480 MiB.)
"""

import contextlib
import hmac
import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field, ValidationError

from jobs.node.environment import Place, Start, Timing
from pipeline.core.errors import EXIT_BUG, EXIT_OK, Preempted, TransientError
from pipeline.core.format import format_duration
from pipeline.core.record import Record
from pipeline.parallel.launch import gang_exit_code

MAX_LINE_BYTES, MAX_UNSENT_BYTES = 4096, 64 * 1024
MAX_REASON_CHARACTERS = 500  # a line has room for it, however it is written in JSON
MAX_STRANGERS, HELLO_S = 64, 10.0
SETTLE_S = 2.0  # beyond the grace: for the words of nodes that were just killed to arrive
CONNECT_S, PAUSE_S = 1.0, 0.25


@dataclass(frozen=True)
class NodeSeen:
    node: int
    heard_s_ago: float | None
    """None: it never came, or it is the main node itself."""
    exit_code: int | None
    lost: str
    """Why it counts as lost; empty when it does not."""


class Peers:
    """The other nodes of a job as the supervisor asks for them; here there are none."""

    ready: bool = True
    """All nodes are there: the command may start."""
    trouble: str = ""
    """Why the command must be stopped; empty while all is well."""
    called: Start | None = None
    """What the main node calls this start of the job, where starts are counted; set before all nodes are there."""
    agreed: tuple[int, str] | None = None
    """The exit code of the whole job and why, as the main node has told; None on it, and where it could not tell."""

    @property
    def settled(self) -> bool:
        """Nobody is left to wait for."""
        return True

    def sockets(self) -> Iterator[socket.socket]:
        return iter(())

    def tick(self) -> None:
        """Hear and say what there is; never blocks."""

    def report(self, code: int) -> None:
        """The command of this node has ended."""

    def stop(self, reason: str) -> None:
        """Tell all nodes to stop, once. Of another node than the main one a signal is its own affair."""

    def exit_code(self, own: int, *, stopped: bool) -> int:
        """Of this node's entry. AWS Batch takes the main node's for the code of the job."""
        return own

    def seen(self) -> list[NodeSeen]:
        return []

    def acknowledge(self, code: int, reason: str) -> None:
        """Release the nodes, which wait for this before they exit, with the exit code of the job and why."""

    def close(self, limit_s: float) -> None:
        """Wait until the nodes have left, for `limit_s`: the end of the main node ends them, post-mortem or not."""


class Hub(Peers):
    """The main node's side: it hears all nodes, tells them to start and to stop, and knows when all have ended."""

    def __init__(
        self,
        place: Place,
        timing: Timing,
        say: Callable[[str], None],
        listener: socket.socket,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place, self._timing, self._say, self._listener, self._clock = place, timing, say, listener, clock
        self._roster = Roster(place.num_nodes, timing.lost_after_s)
        self._callers: dict[Channel, _Caller] = {}
        self._opened, self._beat_at, self._stop_at, self._stop_reason = clock(), -math.inf, math.inf, ""
        self.ready = False

    @property
    def settled(self) -> bool:
        """Every node has told its outcome, is lost, or has had its time to stop."""
        return self._roster.settled or self._clock() - self._stop_at > self._timing.grace_s + SETTLE_S

    def sockets(self) -> Iterator[socket.socket]:
        yield self._listener
        yield from (channel.socket for channel in self._callers)

    def tick(self) -> None:
        now = self._clock()
        self._accept(now)
        for channel, caller in list(self._callers.items()):
            try:
                channel.flush()
                words = channel.receive()
            except PeerGone as gone:
                self._drop(channel, str(gone))
                continue
            if caller.node is None:
                if not words and now < caller.until:
                    continue
                if reason := self._refusal(words[0]) if words else "it says nothing":
                    self._drop(channel, reason)
                    continue
                caller.node = words.pop(0).node
                self._roster.heard[caller.node] = now
                if self._stop_reason:
                    self._tell(Message(kind="stop", text=self._stop_reason), channel)
            elif words:
                self._roster.heard[caller.node] = now
            for word in words:
                if word.kind == "done":
                    self._roster.report(caller.node, word.code)
        if now - self._beat_at >= self._timing.heartbeat_s:
            self._beat_at = now
            self._tell(Message(kind="beat"))
        silent = self._roster.check(now)
        for channel in [one for one, caller in self._callers.items() if caller.node in silent]:
            self._drop(channel, "silent")  # should it wake, it hears that nobody waits for it
        if not self.ready and not self._roster.missing and not self._roster.trouble:
            self.ready = True
            of = self.called
            self._tell(Message(kind="go", text=of.job_id, attempt=of.attempt) if of else Message(kind="go"))
        elif not self.ready and now - self._opened > self._timing.gather_s:
            self._roster.give_up_waiting(self._timing.gather_s)
        self.trouble = self._roster.trouble
        if self.trouble:
            self.stop(self.trouble)

    def report(self, code: int) -> None:
        self._roster.report(0, code)
        self.trouble = self._roster.trouble

    def stop(self, reason: str) -> None:
        if not self._stop_reason:
            self._stop_at, self._stop_reason = self._clock(), reason[:MAX_REASON_CHARACTERS]
            self._tell(Message(kind="stop", text=self._stop_reason))

    def exit_code(self, own: int, *, stopped: bool) -> int:
        return self._roster.exit_code(stopped=stopped)

    def seen(self) -> list[NodeSeen]:
        return self._roster.seen(self._clock())

    def acknowledge(self, code: int, reason: str) -> None:
        self._tell(Message(kind="bye", code=code, text=reason[:MAX_REASON_CHARACTERS]))
        for channel in self._callers:
            with contextlib.suppress(OSError):  # it has gone first
                channel.socket.shutdown(socket.SHUT_WR)  # what was sent still arrives

    def close(self, limit_s: float) -> None:
        until = time.monotonic() + limit_s
        for channel, caller in self._callers.items():
            with contextlib.suppress(OSError):  # silent until the limit, or gone in another way
                channel.socket.settimeout(max(0.001, until - time.monotonic()))
                while caller.node is not None and channel.socket.recv(65536):
                    channel.socket.settimeout(max(0.001, until - time.monotonic()))
            channel.socket.close()
        self._listener.close()

    def _accept(self, now: float) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            if sum(caller.node is None for caller in self._callers.values()) < MAX_STRANGERS + self._place.num_nodes:
                self._callers[Channel(connection)] = _Caller(str(address[0]), now + HELLO_S)
            else:
                connection.close()

    def _refusal(self, hello: "Message") -> str:
        if hello.kind != "hello" or not hmac.compare_digest(hello.token.encode(), self._place.token.encode()):
            return "it is no node of this try (wrong token)"
        return "" if self._roster.takes(hello.node) else f"node {hello.node} is here already, or not of this job"

    def _tell(self, message: "Message", *channels: "Channel") -> None:
        """These, or all nodes."""
        for channel in channels or [one for one, caller in self._callers.items() if caller.node is not None]:
            try:
                channel.send(message)
            except PeerGone as gone:
                self._drop(channel, str(gone))

    def _drop(self, channel: "Channel", why: str) -> None:
        caller = self._callers.pop(channel)
        channel.socket.close()
        if caller.node is None:
            self._say(f"refused a connection from {caller.address}: {why}")
        else:
            self._roster.lose(caller.node, why)


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


class Link(Peers):
    """The side of every other node. Until the main node has said `go`, a connection that breaks is made again."""

    def __init__(self, place: Place, timing: Timing, clock: Callable[[], float] = time.monotonic) -> None:
        self._place, self._timing, self._clock = place, timing, clock
        self._channel: Channel | None = None
        self._opened = self._heard = clock()
        self._tried_at = self._beat_at = -math.inf
        self._code: int | None = None
        self._reported = self._released = self.ready = False
        self._lost = self._last_failure = ""

    @property
    def settled(self) -> bool:
        """The main node knows how this one has ended, or is not there to be told."""
        return self._released or bool(self._lost)

    def sockets(self) -> Iterator[socket.socket]:
        if self._channel is not None:
            yield self._channel.socket

    def tick(self) -> None:
        now = self._clock()
        if self.settled:
            return
        try:
            if self._channel is None and now - self._tried_at >= PAUSE_S:
                self._tried_at = now
                main = (self._place.main_address, self._place.port)
                self._channel = Channel(socket.create_connection(main, timeout=CONNECT_S))
                self._heard = now
                self._channel.send(Message(kind="hello", token=self._place.token, node=self._place.node))
            if self._channel is not None:
                self._talk(self._channel, now)
        except (PeerGone, OSError) as error:
            self._last_failure = str(getattr(error, "strerror", None) or error)
            was_connected = self._channel is not None
            self.close(0.0)
            self._channel = None
            if was_connected and (self.ready or self._reported or self.trouble):
                self._lose(self._last_failure)
        if self.ready and now - self._heard > self._timing.lost_after_s:
            self._lose(f"no heartbeat for {format_duration(self._timing.lost_after_s)}")
        if not self.ready and now - self._opened > self._timing.gather_s:
            where = f"{self._place.main_address}:{self._place.port}"
            limit = format_duration(self._timing.gather_s)
            self._lose(f"no word to start from {where} within {limit} ({self._last_failure or 'nodes are missing'})")

    def report(self, code: int) -> None:
        self._code = code

    def exit_code(self, own: int, *, stopped: bool) -> int:
        unheard = self._lost and own in (EXIT_OK, Preempted.exit_code) and not stopped
        return TransientError.exit_code if unheard else own

    def seen(self) -> list[NodeSeen]:
        return [
            NodeSeen(0, round(self._clock() - self._heard, 3), None, self._lost),
            NodeSeen(self._place.node, None, self._code, ""),
        ]

    def close(self, limit_s: float) -> None:
        """The main node takes the end of the connection for the end of this node."""
        if self._channel is not None:
            self._channel.socket.close()

    def _talk(self, channel: "Channel", now: float) -> None:
        for word in channel.receive():
            self._heard = now
            if word.kind == "go":
                self.ready = True
                self.called = Start(word.text, word.attempt) if word.attempt else None
            elif word.kind == "stop":
                self.trouble = self.trouble or f"the main node says: {word.text}"
            elif word.kind == "bye":
                self._released, self.agreed = True, (word.code, word.text)
                return
        if self._code is not None and not self._reported:
            self._reported = True
            channel.send(Message(kind="done", code=self._code))
        if now - self._beat_at >= self._timing.heartbeat_s:
            self._beat_at = now
            channel.send(Message(kind="beat"))
        channel.flush()

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        self.trouble = self.trouble or f"the main node is lost: {why}"


@dataclass
class _Caller:
    """Who is at the other end of a connection. `node`: None until it has said hello, which it must by `until`."""

    address: str
    until: float
    node: int | None = None


@dataclass
class Roster:
    """The nodes of one try. Node 0 is the main node itself, which is always there."""

    num_nodes: int
    lost_after_s: float
    trouble: str = ""
    """The first thing that went wrong; empty while all is well. From then on the try cannot succeed."""
    heard: dict[int, float] = field(default_factory=dict)
    """When each other node was last heard of, by number; none of those that have not come."""
    _codes: dict[int, int | None] = field(default_factory=dict)
    _lost: dict[int, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [node for node in range(1, self.num_nodes) if node not in self.heard]

    @property
    def settled(self) -> bool:
        """Whether of every node the outcome is known. After trouble, nobody waits for nodes that have not come."""
        late = self.missing if self.trouble else []
        return len(self._codes.keys() | self._lost.keys() | set(late)) == self.num_nodes

    def takes(self, node: int) -> bool:
        """Whether a node of this number may come now: each comes once."""
        return 0 < node < self.num_nodes and node not in self.heard

    def report(self, node: int, code: int) -> None:
        """The command of a node has ended.

        A bug reported after the trouble began says nothing: peers of a node that vanished fail in ways of their own.
        """
        self._codes[node] = None if self.trouble and code == EXIT_BUG else code
        if code != EXIT_OK:
            self.trouble = self.trouble or f"node {node} exited with {code}"

    def lose(self, node: int, why: str) -> None:
        """The connection of a node has ended. One that has reported is none the worse for it."""
        if node not in self._codes and node not in self._lost:
            self._lost[node] = why
            self.trouble = self.trouble or f"node {node} is lost: {why}"

    def check(self, now: float) -> list[int]:
        """Lose the nodes that have been silent for too long, and return them."""
        late = {node for node, at in self.heard.items() if now - at > self.lost_after_s}
        silent = sorted(late - self._codes.keys() - self._lost.keys())
        for node in silent:
            self.lose(node, f"no heartbeat for {format_duration(self.lost_after_s)}")
        return silent

    def give_up_waiting(self, waited_s: float) -> None:
        """Nodes that have not come will not be waited for."""
        for node in self.missing:
            self._lost[node] = "never came"
        if names := ", ".join(map(str, self.missing)):
            late = f"node {names} of {self.num_nodes} has not come within {format_duration(waited_s)}"
            self.trouble = self.trouble or late

    def exit_code(self, *, stopped: bool) -> int:
        """One code for the job. `stopped`: by a signal from outside."""
        return gang_exit_code([self._codes.get(node) for node in range(self.num_nodes)], stopped=stopped)

    def seen(self, now: float) -> list[NodeSeen]:
        return [
            NodeSeen(
                node,
                round(now - self.heard[node], 3) if node in self.heard else None,
                self._codes.get(node),
                self._lost.get(node, ""),
            )
            for node in range(self.num_nodes)
        ]


class Message(Record):
    """hello: a node comes · go: all are there, and what this start is called · beat: still here · stop: end your
    command · done: my command's exit code · bye: the main node knows the outcome of all."""

    kind: Literal["hello", "go", "beat", "stop", "done", "bye"]
    token: str = Field("", max_length=64)
    node: int = Field(0, ge=0)
    attempt: int = Field(0, ge=0)
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
            *lines, self._unread = (self._unread + block).split(b"\n")
            if any(len(line) > MAX_LINE_BYTES for line in (*lines, self._unread)):
                raise PeerGone(f"a line of more than {MAX_LINE_BYTES} bytes")
            try:
                messages += [Message.model_validate_json(bytes(line)) for line in lines]
            except ValidationError:
                raise PeerGone("no message of an entry") from None
