"""The nodes of a multi-node job: wait until all are connected, detect failures, and agree on an exit code.

AWS Batch does not notify the nodes when one of them dies, so we keep a TCP connection between the main node and each
of the others. If a node dies, its connection usually breaks immediately. If not, this is detected by missing
heartbeats. We do not use a TCPStore, because it requires torch, which takes 1.5 s of CPU time and 480 MiB to import.

Each message is a line with a JSON object, and an empty line is a heartbeat. There are four kinds of messages:

    hello   other -> main    a node of this attempt has connected
    go      main -> others   all nodes are connected, start the command
    stop    main -> others   stop the command
    end     other -> main    the command has ended on this node
            main -> others   the command has ended on all nodes (with the exit code of the job)
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
from pipeline.core.progress import Say
from pipeline.core.record import Record
from pipeline.parallel.launch import ranks_exit_code

MAX_LINE_BYTES = 4096
MAX_REASON_CHARACTERS = 500  # fits into a line even if JSON has to escape every character
SETTLE_S = 2.0  # how long to wait after the grace period for messages of nodes whose command was just killed
CONNECT_S, PAUSE_S = 1.0, 0.25


@dataclass(frozen=True)
class NodeStatus:
    """The status of a node, as included in a post-mortem.

    `heard_s_ago` is None for this node itself and for nodes that have never connected. `lost` is the reason why the
    node is considered lost, or empty if it is not.
    """

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
    """The node group from the perspective of one node.

    The main node (0) keeps track of all nodes, while the other nodes only keep track of the main node and themselves.

    Attributes:
        ready: Whether all nodes are connected, so that the command can be started.
        failure: The first failure, after which the command has to be stopped, or an empty string.
        start: This start of the job, if starts are counted. The main node has to set it before all nodes are connected.
        job_result: The exit code and the reason of the job, once the main node has sent them.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        timing: Timing,
        say: Say,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start listening if this is the main node. Raises TransientError if the port is not available."""
        self._identity, self._timing, self._say, self._clock = identity, timing, say, clock
        self._is_main = identity.node == 0
        self._nodes = {node: _Node() for node in (range(identity.num_nodes) if self._is_main else (0, identity.node))}
        self._links = list[Connection]()
        self._opened, self._stop_at, self._stop_reason = clock(), math.inf, ""
        self._heartbeat_at = self._connect_at = -math.inf
        self._last_failure, self._has_reported = "nodes are missing", False
        self.ready, self.failure = identity.num_nodes == 1, ""
        self.start: Start | None = None
        self.job_result: tuple[int, str] | None = None
        self._listener: socket.socket | None = None
        if self._is_main and identity.num_nodes > 1:
            try:
                self._listener = socket.create_server((identity.main_address, identity.port), backlog=1024)
            except OSError as error:
                raise TransientError(
                    f"cannot listen at {identity.main_address or 'all interfaces'}:{identity.port}: {error.strerror}",
                    next_command="run the job again, and set MASTER_PORT if several jobs run on the same machine",
                ) from error
            self._listener.setblocking(False)

    @property
    def settled(self) -> bool:
        """Return whether there is nothing left to wait for.

        The main node waits for the outcome of every node. The other nodes wait for the result of the job.
        """
        if not self._is_main:
            return self.job_result is not None or bool(self._nodes[0].lost)
        late = self._missing() if self.failure else []
        complete = all(state.ended or state.lost or node in late for node, state in self._nodes.items())
        return complete or self._clock() - self._stop_at > self._timing.grace_s + SETTLE_S

    def poll(self) -> None:
        """Receive and send messages, and detect failures. This must be called regularly and does not block for long."""
        if self._identity.num_nodes == 1 or (not self._is_main and self.settled):
            return
        now, own = self._clock(), self._nodes[self._identity.node]
        self._connect(now)
        for link in list(self._links):
            try:
                for message in link.receive(now):
                    self._handle(link, message)
            except NodeGone as gone:
                self._drop(link, str(gone))
            if link.node is not None:
                self._nodes[link.node].heard = link.heard
        if not self._is_main and own.code is not None and self._links and not self._has_reported:
            self._has_reported = True
            self._send(NodeMessage(kind="end", code=own.code))
        if now - self._heartbeat_at >= self._timing.heartbeat_s:
            self._heartbeat_at = now
            self._send(None)
        for node, state in self._nodes.items():
            is_silent = state.heard is not None and now - state.heard > self._timing.lost_after_s
            if is_silent and not state.ended and not state.lost and (self._is_main or self.ready):
                self.mark_lost(node, f"no heartbeat for {format_duration(self._timing.lost_after_s)}")
                for link in [link for link in self._links if link.node == node]:
                    self._drop(link, "silent")  # if the node recovers, it will notice the closed connection
        missing, is_late = self._missing(), not self.ready and now - self._opened > self._timing.gather_s
        limit = format_duration(self._timing.gather_s)
        if is_late and not self._is_main:
            address = f"{self._identity.main_address}:{self._identity.port}"
            self.mark_lost(0, f"no start message from {address} within {limit} ({self._last_failure})")
        elif is_late and missing:
            names, num_nodes = ", ".join(map(str, missing)), self._identity.num_nodes
            self.failure = self.failure or f"node {names} of {num_nodes} has not connected within {limit}"
            for node in missing:
                self._nodes[node].lost = "never connected"
        if self._is_main and not (self.ready or self.failure or missing):
            self.ready, start = True, self.start or Start("", 0)
            self._send(NodeMessage(kind="go", text=start.job_id, attempt=start.attempt))
        if self.failure:
            self.stop(self.failure)

    def report(self, code: int, node: int | None = None) -> None:
        """Record that the command has ended on a node (by default this node).

        After the first failure, the exit code for a bug is ignored on the main node, because a command can fail in
        arbitrary ways when another node has been lost.
        """
        state = self._nodes[self._identity.node if node is None else node]
        state.ended, state.code = True, None if self._is_main and self.failure and code == EXIT_BUG else code
        if self._is_main and code != EXIT_OK and self._identity.num_nodes > 1:
            self.failure = self.failure or f"node {node or 0} exited with {code}"

    def mark_lost(self, node: int, why: str) -> None:
        """Record that a node is lost, unless its command has already ended."""
        state = self._nodes[node]
        if not state.ended and not state.lost:
            state.lost = why
            self.failure = self.failure or f"{f'node {node}' if node else 'the main node'} is lost: {why}"

    def stop(self, reason: str) -> None:
        """Request that all nodes stop. Only the main node sends this message, and only once."""
        if self._is_main and not self._stop_reason:
            self._stop_at, self._stop_reason = self._clock(), reason[:MAX_REASON_CHARACTERS]
            self._send(NodeMessage(kind="stop", text=self._stop_reason))

    def exit_code(self, own: int, *, stopped: bool) -> int:
        """Determine the exit code of `trnjobs-entry` on this node.

        AWS Batch uses the exit code of the main node as that of the job.

        Args:
            own: The exit code of the command on this node.
            stopped: Whether this node has received a signal to stop.
        """
        if self._is_main and self._identity.num_nodes > 1:
            codes = {state.code for state in self._nodes.values()}
            is_preempted = stopped or codes in ({Preempted.exit_code}, {EXIT_OK, Preempted.exit_code})
            return ranks_exit_code([state.code for state in self._nodes.values()], stopped=is_preempted)
        is_unknown = self._nodes[0].lost and own in (EXIT_OK, Preempted.exit_code) and not stopped
        return TransientError.exit_code if is_unknown else own

    def status(self) -> list[NodeStatus]:
        """Return the status of all nodes that this node keeps track of, for the post-mortem."""
        now, nodes = self._clock(), self._nodes
        ago = {node: round(now - state.heard, 3) for node, state in nodes.items() if state.heard is not None}
        return [NodeStatus(node, ago.get(node), state.code, state.lost) for node, state in nodes.items()]

    def acknowledge(self, code: int, reason: str) -> None:
        """Send the exit code of the job to all other nodes, which wait for it before they exit (main node only)."""
        if self._is_main:
            self._send(NodeMessage(kind="end", code=code, text=reason[:MAX_REASON_CHARACTERS]))
            for link in self._links:
                with suppress(OSError):  # the other end may already have closed the connection
                    link.socket.shutdown(socket.SHUT_WR)  # messages that were already sent will still arrive

    def close(self, limit_s: float) -> None:
        """Close all connections.

        The main node first waits up to `limit_s` until the other nodes have closed their connections, because they may
        be terminated as soon as the main node exits.
        """
        until = time.monotonic() + limit_s
        for link in self._links:
            with suppress(OSError):  # a timeout or a broken connection
                link.socket.settimeout(max(0.001, until - time.monotonic()))
                while self._is_main and link.node is not None and link.socket.recv(65536):
                    link.socket.settimeout(max(0.001, until - time.monotonic()))
            link.socket.close()
        if self._listener:
            self._listener.close()

    def _missing(self) -> list[int]:
        return [node for node, state in self._nodes.items() if node != self._identity.node and state.heard is None]

    def _connect(self, now: float) -> None:
        """Accept connections if this is the main node, otherwise connect to it if there is no connection."""
        identity = self._identity
        if self._listener:
            with suppress(BlockingIOError, ConnectionAbortedError):
                while True:
                    self._links.append(Connection(self._listener.accept()[0], now))
        elif not self._links and now - self._connect_at >= PAUSE_S:
            self._connect_at = now
            try:
                connection = socket.create_connection((identity.main_address, identity.port), timeout=CONNECT_S)
            except OSError as error:
                self._last_failure = str(error.strerror or error)
                return
            self._links.append(Connection(connection, now, node=0))
            self._send(NodeMessage(kind="hello", token=identity.token, node=identity.node))

    def _handle(self, link: "Connection", message: "NodeMessage") -> None:
        """Handle a message. Raises NodeGone if the connection is not from a node of this attempt."""
        if link.node is None:
            expected = self._identity.token.encode()
            if message.kind != "hello" or not hmac.compare_digest(message.token.encode(), expected):
                raise NodeGone("it is not from a node of this attempt (wrong token)")
            if message.node not in self._missing():
                raise NodeGone(f"node {message.node} is already connected, or is not part of this job")
            link.node = message.node
            if self._stop_reason:
                link.send(NodeMessage(kind="stop", text=self._stop_reason))
        elif message.kind == "end" and self._is_main:
            self.report(message.code, link.node)
        elif message.kind == "end":
            self.job_result, self._nodes[0].ended = (message.code, message.text), True
        elif message.kind == "go":
            self.ready = True
            self.start = Start(message.text, message.attempt) if message.attempt else None
        elif message.kind == "stop":
            self.failure = self.failure or f"stopped by the main node: {message.text}"

    def _send(self, message: "NodeMessage | None") -> None:
        for link in [link for link in self._links if link.node is not None]:
            try:
                link.send(message)
            except NodeGone as gone:
                self._drop(link, str(gone))

    def _drop(self, link: "Connection", why: str) -> None:
        self._links.remove(link)
        link.socket.close()
        if link.node is None:
            self._say(f"refused a connection: {why}")
        elif self._is_main or self.ready or self._has_reported or self.failure:
            self.mark_lost(link.node, why)
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
    """Raised if the other end has closed the connection or does not follow the protocol."""


class Connection:
    """One end of a non-blocking connection.

    There is no send buffer, because messages are short and rare enough to fit into the buffer of the kernel. `node` is
    the rank of the node at the other end, which is only known once it has sent its hello message.
    """

    def __init__(self, connection: socket.socket, now: float, node: int | None = None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.heard, self.node = connection, now, node
        self._unread = b""

    def send(self, message: NodeMessage | None) -> None:
        """Send a message, or a heartbeat if `message` is None. Raises NodeGone if the connection is broken."""
        line = (message.model_dump_json(exclude_defaults=True) if message else "").encode() + b"\n"
        try:
            sent = self.socket.send(line)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise NodeGone(f"the connection is broken ({error.strerror or error})") from None
        if sent != len(line):
            raise NodeGone("the other end is not reading")

    def receive(self, now: float) -> list[NodeMessage]:
        """Return the messages that have been received, in order.

        Raises NodeGone if the other end has closed the connection and all messages have been read.
        """
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
            raise NodeGone(f"it sent a line of more than {MAX_LINE_BYTES} bytes")
        try:
            return [NodeMessage.model_validate_json(line) for line in lines if line]
        except ValidationError:
            raise NodeGone("it sent an invalid message") from None
