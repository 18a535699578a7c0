"""Embed the shards of a worker.

Subprocesses validate and tokenise the rows, the device embeds them, and a writer thread commits each part once it is
complete. All of this happens concurrently, so that the device does not wait for input or output.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipeline.backends import prefetched
from pipeline.context import Figure, StageContext
from pipeline.core.arrays import Int64s
from pipeline.core.format import format_count, format_duration, format_percent
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens
from pipeline.embed.catalogue import TextRules, WorkShard, make_window, read_shard
from pipeline.embed.engine import Embed, EmbedFigures
from pipeline.embed.parts import OpenPart, PartRecord, commit_part, records_prefix, too_many_bad
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.vectors import VectorSet
from pipeline.io.storage import Storage
from pipeline.proc.pool import run_tasks
from pipeline.retrieval.products import join_tokens
from pipeline.telemetry.events import EventName

FEED_DEPTH = 2
"""Maximum number of token windows that are queued for the device."""
WRITE_DEPTH = 6
"""Maximum number of vector windows and complete parts that are queued for writing."""


@dataclass(frozen=True)
class Flow:
    """The inputs and outputs of a worker.

    The storage `workspace` must ignore the stop signal, because complete parts are still written after a stop.
    """

    plan: EmbedPlan
    catalogue: Storage
    workspace: Storage
    rules: TextRules
    num_workers: int
    """Number of subprocesses that validate and tokenise rows (0: one per core)."""
    earlier: VectorSet | None
    stop: StopSignal


def embed_shards(
    flow: Flow,
    shards: Sequence[WorkShard],
    embed: Embed,
    *,
    on_window: Callable[[], object] = lambda: None,
    on_part: Callable[[PartRecord], object] = lambda record: None,
) -> None:
    """Embed shards and commit their parts. If an error is raised, parts that are already complete are still committed.

    `on_window` is called in this thread after each window. `on_part` is called in the writer thread for each part.
    """
    last, failed, lock = time.monotonic(), False, threading.Lock()
    # `in_flight` has the texts that were sent to the device and still wait for their vectors. Each part follows its
    # last texts. Items are appended in the thread that reads windows. The writer thread converts the
    # vectors and writes the parts.
    in_flight, writes = deque[Texts | OpenPart](), deque[Future[None]]()

    def write(part: OpenPart) -> None:
        nonlocal last
        if flow.earlier is not None:
            part.carry(flow.earlier)
        seconds, last = time.monotonic() - last, time.monotonic()
        on_part(commit_part(flow.workspace, flow.plan, part, seconds=seconds))

    def unless_failed(work: Callable[[], None]) -> None:
        nonlocal failed
        if not failed:  # nothing is written after a failure
            try:
                work()
            except BaseException:
                failed = True
                raise

    def wait_for_writes(max_pending: int) -> None:
        """Wait until at most `max_pending` writes are queued. After a failed write, every call raises its error."""
        while len(writes) > max_pending or (writes and writes[0].done()):
            writes[0].result()
            writes.popleft()

    def submit(work: Callable[[], None]) -> None:
        wait_for_writes(WRITE_DEPTH)
        writes.append(writer.submit(unless_failed, work))

    def write_complete_parts() -> None:
        """Queue the parts for which all vectors have been computed."""
        while in_flight and isinstance(first := in_flight[0], OpenPart):
            submit(partial(write, first))
            in_flight.popleft()

    def windows(ready: Iterator[Texts | OpenPart]) -> Iterator[Tokens]:
        for item in ready:
            flow.stop.raise_if_set("embedding")
            with lock:
                in_flight.append(item)
                write_complete_parts()
            if isinstance(item, Texts):
                yield item.tokens

    items = feed(flow, shards)
    with (
        _closed_after(items),
        ThreadPoolExecutor(1, "part-writer") as writer,  # writes queued parts on exit, even after an error
        prefetched(items, FEED_DEPTH) as ready,
    ):
        for vectors in embed(windows(ready)):
            with lock:
                first = in_flight.popleft()
                if not isinstance(first, Texts):
                    raise RuntimeError("the embedder returned more windows than it received")
                submit(partial(first.part.fill, first.rows, vectors))
                write_complete_parts()
            on_window()
        wait_for_writes(0)
        if in_flight:
            raise RuntimeError("the embedder ended before it returned all windows")


@contextmanager
def _closed_after(items: Generator[object, None, None]) -> Iterator[None]:
    """Close the reader and its subprocesses on exit, after the prefetching thread has released them."""
    try:
        yield
    finally:
        # A ValueError means that the thread is still waiting for a request. The subprocesses then exit with this one.
        with suppress(ValueError):
            items.close()


@dataclass(frozen=True)
class Texts:
    """Texts to embed, and the rows of the part that their vectors belong to."""

    tokens: Tokens
    rows: Int64s
    part: OpenPart


def feed(flow: Flow, shards: Sequence[WorkShard]) -> Generator[Texts | OpenPart, None, None]:
    """Yield the texts of all shards in order, in windows of `plan.window_rows`. Each part is yielded after its texts.

    A window never contains texts of more than one part. This ensures that vectors do not depend on the number of
    workers or on interruptions.
    """
    plan, limit = flow.plan, flow.plan.window_rows
    raws = (raw for shard in shards for raw in read_shard(plan.catalogue, flow.catalogue, shard, limit))
    tasks = run_tasks(
        make_window,
        flow.rules,
        raws,
        num_workers=flow.num_workers,
        stop=flow.stop,
        doing="reading the catalogue",
        in_order=True,
    )
    with closing(tasks) as windows:
        for shard in shards:
            part = OpenPart(shard.index, plan.layout, shard.rows, plan.quarantine_rows)
            tokens, rows, is_last = join_tokens(()), np.zeros(0, dtype=np.int64), False
            while not is_last:
                window = next(windows)
                new_tokens, new_rows = part.add(window)
                tokens, rows = join_tokens((tokens, new_tokens)), np.concatenate([rows, new_rows])
                is_last = window.rows.is_last
                while len(rows) >= limit or (is_last and len(rows)):
                    end = min(limit, len(rows))
                    yield Texts(tokens.part(0, end), rows[:end], part)
                    tokens, rows = tokens.part(end, len(rows)), rows[end:]
            yield part


# Report the progress of a worker, and fail early if too many rows are bad.

SECONDS_BETWEEN_LINES = 10.0


@dataclass
class EmbedWatch:
    """Reports the progress of one worker through log lines, events and metrics."""

    ctx: StageContext
    plan: EmbedPlan
    device: EmbedFigures
    total: int
    """Number of rows in the worker's slice."""
    done: int
    """Number of rows that earlier attempts have completed."""
    max_bad_fraction: float
    clock: Callable[[], float] = time.monotonic
    parts: int = 0
    """Number of parts that this attempt has completed."""

    def __post_init__(self) -> None:
        self._started = self._last_line_s = self.clock()
        # `_skipped` counts rows that were carried over, bad or filtered out instead of being embedded.
        self._skipped, self._reasons = 0, Counter[str]()

    def on_window(self) -> None:
        """Print a progress line every SECONDS_BETWEEN_LINES."""
        now = self.clock()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = now
            self.ctx.console.info(self.line())

    def on_part(self, record: PartRecord) -> None:
        """Record a committed part. Raises DataError if too many rows of the catalogue are bad."""
        self.parts += 1
        self._skipped += self.plan.shards[record.index].rows - record.counts.embedded
        self.ctx.events.emit(
            EventName.PART_EMBEDDED, part=record.index, rows=record.rows, seconds=record.seconds, **dict(record.counts)
        )
        self._reasons.update(record.reasons)
        bad, rows = self._reasons.total(), self.plan.catalogue.rows
        if bad > self.max_bad_fraction * rows:
            uri = self.ctx.workspace.uri(records_prefix(self.plan))
            raise too_many_bad(bad, rows, self._reasons, self.max_bad_fraction, uri)

    def line(self) -> str:
        """Format the progress as `embed 120k/1.00M rows | 812 texts/s | 14.1k tokens/s | padding 4.2% | eta 3m12s`."""
        device, seconds = self.device, self._seconds()
        rows = device.texts + self._skipped
        eta = f" | eta {format_duration((self.total - self.done - rows) * seconds / rows)}" if rows else ""
        return (
            f"embed {format_count(self.done + rows)}/{format_count(self.total)} rows"
            f" | {format_count(device.texts / seconds)} texts/s | {format_count(device.tokens / seconds)} tokens/s"
            f" | padding {format_percent(device.padding_share)} | idle {format_percent(device.idle_share)}{eta}"
        )

    def finish(self) -> dict[str, Figure]:
        """Print the final progress line and return the throughput metrics of this attempt."""
        self.ctx.console.info(self.line())
        device, seconds = self.device, self._seconds()
        return {
            "texts_per_s": round(device.texts / seconds, 1),
            "tokens_per_s": round(device.tokens / seconds, 1),
            "padding_share": float(f"{device.padding_share:.4g}"),
            "idle_share": float(f"{device.idle_share:.4g}"),
        }

    def _seconds(self) -> float:
        return max(1e-9, self.clock() - self._started)
