"""The nodes of one attempt of a multi-node job: which are here, which have failed, and when to stop.

Every other node keeps one TCP connection to the main node. A message is a JSON object on a line of its own; an empty
line is a heartbeat. AWS Batch tells no node that another has died: a broken connection does so at once, missing
heartbeats after a while. (A TCPStore would cost each entry the import of torch: measured 1.5 s of CPU and 480 MiB.)

    hello   other -> main    a node of this attempt has come
    go      main -> others   all nodes are here: start the command
    stop    main -> others   end the command
    end     other -> main    its command has ended; main -> others: all have, with the exit code of the job
"""

import hmac
import math
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, ValidationError

from jobs.node.environment import NodeIdentity, Start, Timing
from pipeline.core.errors import EXIT_BUG, EXIT_OK, Preempted, TransientError
from pipeline.core.format import format_duration
from pipeline.core.record import Record
from pipeline.parallel.launch import ranks_exit_code

MAX_LINE_BYTES = 4096
MAX_REASON_CHARACTERS = 500  # fits into a line, however JSON writes it
SETTLE_S = 2.0  # beyond the grace: for the messages of nodes that were just killed to arrive
CONNECT_S, PAUSE_S = 1.0, 0.25


@dataclass(frozen=True)
class NodeSeen:
    """One node in a post-mortem. `heard_s_ago`: None for this node itself and for one that never came. `lost`: why."""

    node: int
    heard_s_ago: float | None
    exit_code: int | None
    lost: str


@dataclass
class _Node:
    heard: float | None = None
    ended: bool = False
    code: int | None = None
    lost: str = ""


class NodeGroup:
    """The nodes as one of them sees them: the main node (0) all of them, every other one the main node and itself.

    `ready`: all nodes are here, the command may start. `trouble`: the first thing that went wrong, for which the
    command must be stopped; empty while all is well. `start`: name of this start of the job, where starts are counted;
    set on the main node before all nodes are here. `agreed`: exit code of the job and why, as the main node has sent.
    """

    def __init__(
        self,
        place: NodeIdentity,
        timing: Timing,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Listens on all interfaces, or at the main address if one is set. Raises TransientError if it cannot."""
        self._place, self._timing, self._say, self._clock = place, timing, say, clock
        self._is_main = place.node == 0
        self._nodes = {node: _Node() for node in (range(place.num_nodes) if self._is_main else (0, place.node))}
        self._links = list[Connection]()
        self._opened, self._stop_at, self._stop_reason = clock(), math.inf, ""
        self._beat_at = self._tried_at = -math.inf
        self._last_failure, self._has_reported = "nodes are missing", False
        self.ready, self.trouble = place.num_nodes == 1, ""
        self.start: Start | None = None
        self.agreed: tuple[int, str] | None = None
        self._listener: socket.socket | None = None
        if self._is_main and place.num_nodes > 1:
            try:
                self._listener = socket.create_server((place.main_address, place.port), backlog=1024)
            except OSError as error:
                raise TransientError(
                    f"cannot listen at {place.main_address or 'all interfaces'}:{place.port}: {error.strerror}",
                    next_command="run the job again; set MASTER_PORT where several jobs share a machine",
                ) from error
            self._listener.setblocking(False)

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to wait for: on the main node every outcome, elsewhere the main node's word."""
        if not self._is_main:
            return self.agreed is not None or bool(self._nodes[0].lost)
        late = self._missing() if self.trouble else []
        known = all(one.ended or one.lost or node in late for node, one in self._nodes.items())
        return known or self._clock() - self._stop_at > self._timing.grace_s + SETTLE_S

    def tick(self) -> None:
        """Receive and send messages, and note what has gone wrong; never blocks for long."""
        if self._place.num_nodes == 1 or (not self._is_main and self.settled):
            return
        now, own = self._clock(), self._nodes[self._place.node]
        self._connect(now)
        for link in list(self._links):
            try:
                for message in link.receive(now):
                    self._take(link, message)
            except NodeGone as gone:
                self._drop(link, str(gone))
            if link.node is not None:
                self._nodes[link.node].heard = link.heard
        if not self._is_main and own.code is not None and self._links and not self._has_reported:
            self._has_reported = True
            self._send(NodeMessage(kind="end", code=own.code))
        if now - self._beat_at >= self._timing.heartbeat_s:
            self._beat_at = now
            self._send(None)
        for node, one in self._nodes.items():
            is_silent = one.heard is not None and now - one.heard > self._timing.lost_after_s
            if is_silent and not one.ended and not one.lost and (self._is_main or self.ready):
                self.lose(node, f"no heartbeat for {format_duration(self._timing.lost_after_s)}")
                for link in [link for link in self._links if link.node == node]:
                    self._drop(link, "silent")  # should it wake, it learns that it is not waited for
        missing, is_late = self._missing(), not self.ready and now - self._opened > self._timing.gather_s
        limit = format_duration(self._timing.gather_s)
        if is_late and not self._is_main:
            where = f"{self._place.main_address}:{self._place.port}"
            self.lose(0, f"no word to start from {where} within {limit} ({self._last_failure})")
        elif is_late and missing:
            late = f"node {', '.join(map(str, missing))} of {self._place.num_nodes} has not come within {limit}"
            self.trouble = self.trouble or late
            for node in missing:
                self._nodes[node].lost = "never came"
        if self._is_main and not (self.ready or self.trouble or missing):
            self.ready, start = True, self.start or Start("", 0)
            self._send(NodeMessage(kind="go", text=start.job_id, attempt=start.attempt))
        if self.trouble:
            self.stop(self.trouble)

    def report(self, code: int, node: int | None = None) -> None:
        """Take the exit code of a node's command, by default of this node's.

        A bug after the trouble began counts for nothing: nodes whose peer vanished fail in ways of their own.
        """
        one = self._nodes[self._place.node if node is None else node]
        one.ended, one.code = True, None if self._is_main and self.trouble and code == EXIT_BUG else code
        if self._is_main and code != EXIT_OK and self._place.num_nodes > 1:
            self.trouble = self.trouble or f"node {node or 0} exited with {code}"

    def lose(self, node: int, why: str) -> None:
        """Note that a node is gone, unless it has reported."""
        one = self._nodes[node]
        if not one.ended and not one.lost:
            one.lost = why
            self.trouble = self.trouble or f"{f'node {node}' if node else 'the main node'} is lost: {why}"

    def stop(self, reason: str) -> None:
        """Tell all nodes to stop, once; only the main node does so."""
        if self._is_main and not self._stop_reason:
            self._stop_at, self._stop_reason = self._clock(), reason[:MAX_REASON_CHARACTERS]
            self._send(NodeMessage(kind="stop", text=self._stop_reason))

    def exit_code(self, own: int, *, stopped: bool) -> int:
        """Return the exit code of this node's entry; AWS Batch takes that of the main node for the job's.

        `stopped`: by a signal from outside.
        """
        if self._is_main and self._place.num_nodes > 1:
            return ranks_exit_code([one.code for one in self._nodes.values()], stopped=stopped)
        is_unknown = self._nodes[0].lost and own in (EXIT_OK, Preempted.exit_code) and not stopped
        return TransientError.exit_code if is_unknown else own

    def seen(self) -> list[NodeSeen]:
        now = self._clock()
        ago = {node: round(now - one.heard, 3) for node, one in self._nodes.items() if one.heard is not None}
        return [NodeSeen(node, ago.get(node), one.code, one.lost) for node, one in self._nodes.items()]

    def acknowledge(self, code: int, reason: str) -> None:
        """Send the exit code of the job to the other nodes, which wait for it before they exit."""
        if self._is_main:
            self._send(NodeMessage(kind="end", code=code, text=reason[:MAX_REASON_CHARACTERS]))
            for link in self._links:
                with suppress(OSError):  # it has gone first
                    link.socket.shutdown(socket.SHUT_WR)  # what was sent still arrives

    def close(self, limit_s: float) -> None:
        """Close all connections. The main node first waits up to `limit_s` until the others have left: its end is
        theirs."""
        until = time.monotonic() + limit_s
        for link in self._links:
            with suppress(OSError):  # silent until the limit, or gone in another way
                link.socket.settimeout(max(0.001, until - time.monotonic()))
                while self._is_main and link.node is not None and link.socket.recv(65536):
                    link.socket.settimeout(max(0.001, until - time.monotonic()))
            link.socket.close()
        if self._listener:
            self._listener.close()

    def _missing(self) -> list[int]:
        return [node for node, one in self._nodes.items() if node != self._place.node and one.heard is None]

    def _connect(self, now: float) -> None:
        """Accept what has come, or call the main node: again, as long as it has not said `go`."""
        place = self._place
        if self._listener:
            with suppress(BlockingIOError, ConnectionAbortedError):
                while True:
                    self._links.append(Connection(self._listener.accept()[0], now))
        elif not self._links and now - self._tried_at >= PAUSE_S:
            self._tried_at = now
            try:
                made = socket.create_connection((place.main_address, place.port), timeout=CONNECT_S)
            except OSError as error:
                self._last_failure = str(error.strerror or error)
                return
            self._links.append(Connection(made, now, node=0))
            self._send(NodeMessage(kind="hello", token=place.token, node=place.node))

    def _take(self, link: "Connection", message: "NodeMessage") -> None:
        """Act on a message. Raises NodeGone for a connection that is none of ours."""
        if link.node is None:
            if message.kind != "hello" or not hmac.compare_digest(message.token.encode(), self._place.token.encode()):
                raise NodeGone("it is no node of this attempt (wrong token)")
            if message.node not in self._missing():
                raise NodeGone(f"node {message.node} is here already, or not of this job")
            link.node = message.node
            if self._stop_reason:
                link.send(NodeMessage(kind="stop", text=self._stop_reason))
        elif message.kind == "end" and self._is_main:
            self.report(message.code, link.node)
        elif message.kind == "end":
            self.agreed, self._nodes[0].ended = (message.code, message.text), True
        elif message.kind == "go":
            self.ready = True
            self.start = Start(message.text, message.attempt) if message.attempt else None
        elif message.kind == "stop":
            self.trouble = self.trouble or f"the main node says: {message.text}"

    def _send(self, message: "NodeMessage | None") -> None:
        """Send to all nodes that are here."""
        for link in [one for one in self._links if one.node is not None]:
            try:
                link.send(message)
            except NodeGone as gone:
                self._drop(link, str(gone))

    def _drop(self, link: "Connection", why: str) -> None:
        self._links.remove(link)
        link.socket.close()
        if link.node is None:
            self._say(f"refused a connection: {why}")
        elif self._is_main or self.ready or self._has_reported or self.trouble:
            self.lose(link.node, why)
        else:
            self._last_failure = why


class NodeMessage(Record):
    kind: Literal["hello", "go", "stop", "end"]
    token: str = Field("", max_length=64)
    node: int = Field(0, ge=0)
    attempt: int = Field(0, ge=0)
    code: int = Field(0, ge=0, le=255)
    text: str = Field("", max_length=1000)


class NodeGone(Exception):
    """The other end has closed, or does not speak this protocol. The text says which."""


class Connection:
    """One end of a connection; never blocks. Messages are so short and few that the kernel's buffer holds them all.

    `node`: at the other end, once it has said hello.
    """

    def __init__(self, connection: socket.socket, now: float, node: int | None = None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.heard, self.node = connection, now, node
        self._unread = b""

    def send(self, message: NodeMessage | None) -> None:
        """Send a message, or a heartbeat. Raises NodeGone."""
        line = (message.model_dump_json(exclude_defaults=True) if message else "").encode() + b"\n"
        try:
            sent = self.socket.send(line)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise NodeGone(f"the connection is broken ({error.strerror or error})") from None
        if sent != len(line):
            raise NodeGone("it reads nothing")

    def receive(self, now: float) -> list[NodeMessage]:
        """Return what has come, in order. Raises NodeGone once all was read and the other end has closed."""
        try:
            block = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            raise NodeGone(f"the connection is broken ({error.strerror or error})") from None
        if not block:
            raise NodeGone("the connection was closed")
        self.heard = now
        *lines, self._unread = (self._unread + block).split(b"\n")
        if any(len(line) > MAX_LINE_BYTES for line in (*lines, self._unread)):
            raise NodeGone(f"a line of more than {MAX_LINE_BYTES} bytes")
        try:
            return [NodeMessage.model_validate_json(line) for line in lines if line]
        except ValidationError:
            raise NodeGone("no message of an entry") from None
