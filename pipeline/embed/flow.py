"""The work of one worker: texts stream through the device while the next are tokenised and finished parts written."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np

from pipeline.backends.prefetch import prefetched
from pipeline.core.arrays import Float32s
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens
from pipeline.embed.carry import take_over
from pipeline.embed.catalogue import WorkShard
from pipeline.embed.feed import Complete, OpenPart, OpenWorkers, Texts, feed
from pipeline.embed.parts import PartRecord, commit_part
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.texts import TextRules
from pipeline.embed.vector_set import VectorSet
from pipeline.io.storage import Storage

# Finished parts written behind the device, one at a time; one more may wait.

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


FEED_DEPTH = 2
"""Windows of tokens that wait for the device."""
FILL_DEPTH = 1
"""Windows of vectors that wait to be converted."""


class TextEmbedder(Protocol):
    """The device: embed/engine.py."""

    def stream(self, windows: Iterable[Tokens]) -> Iterator[Float32s]: ...


@dataclass(frozen=True)
class Flow:
    """Where a worker reads and writes. `workspace` must go on after a stop: complete parts are still written."""

    plan: EmbedPlan
    catalogue: Storage
    workspace: Storage
    rules: TextRules
    workers: OpenWorkers
    earlier: VectorSet | None
    stop: StopSignal


class Watch(Protocol):
    """Told what goes on; called in the thread that drives the device, `written` in the writer's."""

    def embedded(self, texts: Texts) -> None: ...
    def written(self, record: PartRecord) -> None: ...


def embed_shards(flow: Flow, shards: Sequence[WorkShard], embedder: TextEmbedder, watch: Watch) -> None:
    """Embed and commit some shards. Raises TrnpipeError; whatever is complete then is committed."""
    clock = _PartClock()

    def write(part: OpenPart) -> None:
        place = part.place
        taken = np.flatnonzero(place >= 0)
        if len(taken) and flow.earlier is not None:
            part.put(taken, *take_over(flow.earlier, place[taken]))
        watch.written(
            commit_part(flow.workspace, flow.plan, part.index, part.finished(), part.tally, seconds=clock.lap())
        )

    items = feed(flow.plan, shards, flow.catalogue, flow.rules, flow.workers)
    with (
        _closed_after(items),
        PartWriter(write) as writer,
        prefetched(items, FEED_DEPTH) as ready,
        ThreadPoolExecutor(1, "part-filler") as filler,
    ):
        line = _Line(ready, writer, filler, flow.stop)
        for vectors in embedder.stream(line.windows()):
            watch.embedded(line.fill(vectors))
            line.settle()
        line.settle()
        if line.is_waiting:
            raise RuntimeError("the embedder ended before all windows had their vectors")


@contextmanager
def _closed_after(items: Generator[object, None, None]) -> Iterator[None]:
    """End the reader and its processes on leaving, by then out of the hands of the thread that ran ahead."""
    try:
        yield
    finally:
        with suppress(ValueError):  # it still hangs in a request: the processes end with this one
            items.close()


class _Line:
    """What the device has been given and not yet answered, in order, with complete parts in between.

    Vectors are converted in the thread of `filler`: the one that drives the device goes on. The embedder may ask for
    windows in a thread of its own.
    """

    def __init__(
        self, ready: Iterator[Texts | Complete], writer: PartWriter, filler: ThreadPoolExecutor, stop: StopSignal
    ) -> None:
        self._ready, self._writer, self._filler, self._stop = ready, writer, filler, stop
        self._waiting: deque[Texts | Complete] = deque()
        self._filling: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def windows(self) -> Iterator[Tokens]:
        for item in self._ready:
            self._stop.raise_if_set("embedding")
            self._waiting.append(item)
            if isinstance(item, Texts):
                yield item.tokens
            else:
                self.settle()

    def fill(self, vectors: Float32s) -> Texts:
        """The texts whose vectors have come. Raises what went wrong with those before them."""
        with self._lock:
            first = self._waiting.popleft()
            if not isinstance(first, Texts):
                raise RuntimeError("the embedder answered more windows than it was given")
            self._filling.append(self._filler.submit(first.part.fill, first.rows, vectors))
            self._wait_for_all_but(FILL_DEPTH)
        return first

    def settle(self) -> None:
        """Hand over the parts that wait for nothing any more."""
        with self._lock:
            while self._waiting and isinstance(first := self._waiting[0], Complete):
                self._wait_for_all_but(0)
                self._writer.submit(first.part)
                self._waiting.popleft()
        self._writer.check()

    def _wait_for_all_but(self, number: int) -> None:
        while len(self._filling) > number:
            self._filling[0].result()  # one that failed stays: no part is handed over after it
            self._filling.popleft()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)


class _PartClock:
    """Seconds since the last part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()

    def lap(self) -> float:
        now = self._clock()
        seconds, self._last = now - self._last, now
        return seconds
