"""The stop signal that every long loop polls."""

import threading

from pipeline.core.errors import Preempted


class StopSignal:
    """Flag that a signal handler sets and all loops poll. Thread-safe."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        self.has_live_display = False
        """A live display on the terminal responds to Ctrl-C, so no line may be printed."""

    def set(self, reason: str) -> None:
        """Request all loops to stop at their next safe point. The first reason is kept."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the signal is set or the time-out. Return whether it is set."""
        return self._event.wait(timeout_s)

    def raise_if_set(self, doing: str) -> None:
        """Raise Preempted if set. `doing` describes the interrupted work."""
        if self.is_set():
            raise Preempted(
                f"stopped by {self.reason} while {doing}",
                next_command="run the same command again to continue",
            )
