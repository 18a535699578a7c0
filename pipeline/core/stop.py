"""The stop signal, which every long-running loop polls."""

import threading

from pipeline.core.errors import Preempted


class StopSignal:
    """A thread-safe flag that is set by signal handlers and polled by all long-running loops."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""
        self.has_live_display = False
        """Whether a live display is using the terminal. It handles Ctrl-C itself, so nothing else should be printed."""

    def set(self, reason: str) -> None:
        """Request that all loops stop at the next safe point. Only the first call sets the reason."""
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the signal is set or the timeout expires. Return whether the signal is set."""
        return self._event.wait(timeout_s)

    def raise_if_set(self, doing: str) -> None:
        """Raise Preempted if the signal is set. `doing` describes the work that was interrupted."""
        if self.is_set():
            raise Preempted(
                f"stopped by {self.reason} while {doing}",
                next_command="run the same command again to continue",
            )
