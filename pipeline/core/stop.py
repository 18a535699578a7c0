"""The one stop signal that every long loop polls."""

import threading

from pipeline.core.errors import Preempted


class StopSignal:
    """Set once by a signal handler, read everywhere. Thread-safe."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        self.is_shown = False
        """Whether a picture on the terminal answers Ctrl-C, which a line would damage."""

    def set(self, reason: str) -> None:
        """Ask every loop to stop at its next safe point; the first reason is kept."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the signal or the time-out; True when the signal is set."""
        return self._event.wait(timeout_s)

    def raise_if_set(self, doing: str) -> None:
        """Raise Preempted when set. `doing` says what was interrupted."""
        if self.is_set():
            raise Preempted(
                f"stopped by {self.reason} while {doing}",
                next_command="run the same command again; it continues where it stopped",
            )
