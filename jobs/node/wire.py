"""What nodes say to each other: one small JSON object a line, over one TCP connection of each node to the main node."""

import contextlib
import socket
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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
