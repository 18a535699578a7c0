"""The side of every other node: it comes to the main node, waits for its word, and leaves after it."""

import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from jobs.node.environment import Place, Timing
from jobs.node.messages import Channel, Message, NodeSeen, PeerGone
from pipeline.core.errors import EXIT_OK, Preempted, TransientError
from pipeline.core.format import format_duration

CONNECT_S = 1.0
PAUSE_S = 0.25


@dataclass
class Link:
    """The main node, seen from another one. Until it has said `go`, a connection that breaks is made again."""

    place: Place
    timing: Timing
    clock: Callable[[], float] = time.monotonic
    ready: bool = False
    trouble: str = ""
    """Why the command must be stopped; empty while all is well."""
    _channel: Channel | None = None
    _opened: float = field(init=False)
    _heard: float = field(init=False)
    _tried_at: float = -math.inf
    _beat_at: float = -math.inf
    _code: int | None = None
    _reported: bool = False
    _lost: str = ""
    _released: bool = False
    _last_failure: str = ""

    def __post_init__(self) -> None:
        self._opened = self._heard = self.clock()

    def sockets(self) -> Iterator[socket.socket]:
        """What to wait on."""
        if self._channel is not None:
            yield self._channel.socket

    @property
    def settled(self) -> bool:
        """The main node knows how this one has ended, or is not there to be told."""
        return self._released or bool(self._lost)

    def tick(self) -> None:
        now = self.clock()
        if self._lost or self._released:
            return
        if self._channel is None:
            self._connect(now)
        if self._channel is not None:
            try:
                self._talk(self._channel, now)
            except PeerGone as gone:
                self._broken(str(gone))
        if self.ready and now - self._heard > self.timing.lost_after_s:
            self._lose(f"no heartbeat for {format_duration(self.timing.lost_after_s)}")
        if not self.ready and now - self._opened > self.timing.gather_s:
            where = f"{self.place.main_address}:{self.place.port}"
            limit = format_duration(self.timing.gather_s)
            self._lose(f"no word to start from {where} within {limit} ({self._last_failure or 'nodes are missing'})")

    def report(self, code: int) -> None:
        """The command of this node has ended."""
        self._code = code

    def stop(self, reason: str) -> None:
        """A signal that reached this node is its own affair; the main node hears of the exit code."""

    def exit_code(self, own: int, *, stopped: bool) -> int:
        """Of this node. AWS Batch looks at the main node's alone."""
        unheard = self._lost and own in (EXIT_OK, Preempted.exit_code) and not stopped
        return TransientError.exit_code if unheard else own

    def seen(self) -> list[NodeSeen]:
        return [
            NodeSeen(0, round(self.clock() - self._heard, 3), None, self._lost),
            NodeSeen(self.place.node, None, self._code, ""),
        ]

    def acknowledge(self) -> None:
        """Nobody waits for this node's word."""

    def close(self, limit_s: float) -> None:
        """The main node takes the end of the connection for the end of this node."""
        if self._channel is not None:
            self._channel.close()

    def _connect(self, now: float) -> None:
        if now - self._tried_at < PAUSE_S:
            return
        self._tried_at = now
        try:
            connection = socket.create_connection((self.place.main_address, self.place.port), timeout=CONNECT_S)
        except OSError as error:
            self._last_failure = str(error.strerror or error)
            return
        self._channel, self._heard = Channel(connection), now
        try:
            self._channel.send(Message(kind="hello", token=self.place.token, node=self.place.node))
        except PeerGone as gone:
            self._broken(str(gone))

    def _talk(self, channel: Channel, now: float) -> None:
        words = channel.receive()
        for word in words:
            self._heard = now
            if word.kind == "go":
                self.ready = True
            elif word.kind == "stop":
                self.trouble = self.trouble or f"the main node says: {word.text}"
            elif word.kind == "bye":
                self._released = True
                return
        if self._code is not None and not self._reported:
            self._reported = True
            channel.send(Message(kind="done", code=self._code))
        if now - self._beat_at >= self.timing.heartbeat_s:
            self._beat_at = now
            channel.send(Message(kind="beat"))
        channel.flush()

    def _broken(self, why: str) -> None:
        self._last_failure = why
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self.ready or self._reported or self.trouble:
            self._lose(why)

    def _lose(self, why: str) -> None:
        self._lost = why
        self.trouble = self.trouble or f"the main node is lost: {why}"
