"""SIGTERM, SIGINT and the end of a child wake the one loop of the entry."""

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from pipeline.core.stop import StopSignal

STOPPING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Signals:
    """`stop` holds the name of the first signal that asks to stop; `wake` can be read when any has come."""

    stop: StopSignal
    wake: socket.socket

    @property
    def asked(self) -> signal.Signals | None:
        """What to pass on to the command."""
        return signal.Signals[self.stop.reason] if self.stop.is_set() else None

    def drain(self) -> None:
        """Read what woke the loop."""
        try:
            while self.wake.recv(4096):
                continue
        except BlockingIOError:
            return


@contextmanager
def watched_signals() -> Iterator[Signals]:
    """Main thread only. Handlers are set even as PID 1, where the kernel drops signals that have none."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    stop = StopSignal()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if signum in STOPPING:
            stop.set(signal.Signals(signum).name)

    earlier = {signum: signal.signal(signum, on_signal) for signum in (*STOPPING, signal.SIGCHLD)}
    earlier_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield Signals(stop, reader)
    finally:
        signal.set_wakeup_fd(earlier_fd)
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
        reader.close()
        writer.close()
