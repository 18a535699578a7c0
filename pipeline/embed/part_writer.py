"""Finished parts written behind the device, one at a time; one more may wait."""

import queue
import threading
from collections.abc import Callable
from types import TracebackType

from pipeline.embed.open_part import OpenPart

_POLL_S = 0.1


class PartWriter:
    """Calls `write` for each part in a thread of its own. Use as a context manager.

    What was submitted is written before the context is left, also when it is left by an error or a stop: a part that
    is complete is not made twice. An error of `write` comes out at the next call, or on leaving.
    """

    def __init__(self, write: Callable[[OpenPart], None]) -> None:
        self._write = write
        self._queue: queue.Queue[OpenPart | None] = queue.Queue(maxsize=1)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="part-writer", daemon=True)

    def __enter__(self) -> "PartWriter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put(None)
        self._thread.join()
        if error is None:
            self.check()

    def submit(self, part: OpenPart) -> None:
        """Hand a part over; waits while another one waits."""
        self.check()
        self._put(part)
        self.check()

    def check(self) -> None:
        """Raise the error of an earlier part, if there was one."""
        if self._error is not None:
            raise self._error

    def _put(self, item: OpenPart | None) -> None:
        while self._error is None:
            try:
                self._queue.put(item, timeout=_POLL_S)
                return
            except queue.Full:
                continue

    def _work(self) -> None:
        while (part := self._queue.get()) is not None:
            try:
                self._write(part)
            except BaseException as error:  # raised again where the parts come from
                self._error = error
                return
