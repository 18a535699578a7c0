"""The work of one worker: rows are read, judged and tokenised in worker processes, embedded, and written in parts.

Texts stream through the device while the next are tokenised and finished parts are written.
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
"""Windows of tokens that wait for the device."""
BEHIND_DEPTH = 6
"""Windows of vectors, and complete parts, that wait to be converted and written."""


@dataclass(frozen=True)
class Flow:
    """Where a worker reads and writes. `workspace` must go on after a stop: complete parts are still written."""

    plan: EmbedPlan
    catalogue: Storage
    workspace: Storage
    rules: TextRules
    num_workers: int
    """Processes that judge and tokenise; 0: one per core."""
    earlier: VectorSet | None
    stop: StopSignal


def embed_shards(
    flow: Flow,
    shards: Sequence[WorkShard],
    embed: Embed,
    *,
    embedded: Callable[[], object] = lambda: None,
    written: Callable[[PartRecord], object] = lambda record: None,
) -> None:
    """Embed and commit some shards. Raises TrnpipeError; whatever is complete then is committed.

    `embedded` is called in this thread after each window, `written` with each part in the thread that writes.
    """
    last, failed, lock = time.monotonic(), False, threading.Lock()
    # What the device was given and has not answered, in order, with whole parts in between. It is appended to by the
    # thread in which the embedder asks for windows. Another thread converts vectors and writes parts.
    waiting, behind = deque[Texts | OpenPart](), deque[Future[None]]()

    def write(part: OpenPart) -> None:
        nonlocal last
        if flow.earlier is not None:
            part.carry(flow.earlier)
        seconds, last = time.monotonic() - last, time.monotonic()
        written(commit_part(flow.workspace, flow.plan, part, seconds=seconds))

    def unless_failed(work: Callable[[], None]) -> None:
        nonlocal failed
        if not failed:  # nothing is written after what failed
            try:
                work()
            except BaseException:
                failed = True
                raise

    def wait_for_all_but(number: int) -> None:
        """Raise the error of the first that failed. It stays: nothing goes on after it."""
        while len(behind) > number or (behind and behind[0].done()):
            behind[0].result()
            behind.popleft()

    def submit(work: Callable[[], None]) -> None:
        wait_for_all_but(BEHIND_DEPTH)
        behind.append(writer.submit(unless_failed, work))

    def write_whole_parts() -> None:
        """Write the parts that wait for no vectors."""
        while waiting and isinstance(first := waiting[0], OpenPart):
            submit(partial(write, first))
            waiting.popleft()

    def windows(ready: Iterator[Texts | OpenPart]) -> Iterator[Tokens]:
        for item in ready:
            flow.stop.raise_if_set("embedding")
            with lock:
                waiting.append(item)
                write_whole_parts()
            if isinstance(item, Texts):
                yield item.tokens

    items = feed(flow, shards)
    with (
        _closed_after(items),
        ThreadPoolExecutor(1, "part-writer") as writer,  # on leaving, also by an error, what was handed over is written
        prefetched(items, FEED_DEPTH) as ready,
    ):
        for vectors in embed(windows(ready)):
            with lock:
                first = waiting.popleft()
                if not isinstance(first, Texts):
                    raise RuntimeError("the embedder answered more windows than it was given")
                submit(partial(first.part.fill, first.rows, vectors))
                write_whole_parts()
            embedded()
        wait_for_all_but(0)
        if waiting:
            raise RuntimeError("the embedder ended before all windows had their vectors")


@contextmanager
def _closed_after(items: Generator[object, None, None]) -> Iterator[None]:
    """End the reader and its processes on leaving, when the thread that ran ahead has released them."""
    try:
        yield
    finally:
        with suppress(ValueError):  # it still hangs in a request: the processes end with this one
            items.close()


@dataclass(frozen=True)
class Texts:
    """Texts of one part for the device, and the rows of the part that their vectors belong to."""

    tokens: Tokens
    rows: Int64s
    part: OpenPart


def feed(flow: Flow, shards: Sequence[WorkShard]) -> Generator[Texts | OpenPart, None, None]:
    """Yield the texts of all shards in order, `plan.window_rows` at a time, and each part after its texts.

    Texts of one window belong to one part, so that vectors do not depend on which worker does what, or on stops.
    """
    plan, limit = flow.plan, flow.plan.window_rows
    raws = (raw for shard in shards for raw in read_shard(plan.catalogue, flow.catalogue, shard, limit))
    making = run_tasks(
        make_window,
        flow.rules,
        raws,
        num_workers=flow.num_workers,
        stop=flow.stop,
        doing="reading the catalogue",
        in_order=True,
    )
    with closing(making) as windows:
        for shard in shards:
            part = OpenPart(shard.index, plan.layout, shard.rows, plan.quarantine_rows)
            tokens, rows, is_last = join_tokens(()), np.zeros(0, dtype=np.int64), False
            while not is_last:
                window = next(windows)
                more, places = part.add(window)
                tokens, rows, is_last = join_tokens((tokens, more)), np.concatenate([rows, places]), window.rows.is_last
                while len(rows) >= limit or (is_last and len(rows)):
                    end = min(limit, len(rows))
                    yield Texts(tokens.part(0, end), rows[:end], part)
                    tokens, rows = tokens.part(end, len(rows)), rows[end:]
            yield part


# Progress of one worker: lines, events, figures, and an early end when too much of the catalogue is bad.

SECONDS_BETWEEN_LINES = 10.0


@dataclass
class EmbedWatch:
    """Adds up and reports what one worker does."""

    ctx: StageContext
    plan: EmbedPlan
    device: EmbedFigures
    total: int
    """Rows of the worker's share."""
    done: int
    """Of them finished by an earlier attempt."""
    max_bad_fraction: float
    clock: Callable[[], float] = time.monotonic
    parts: int = 0
    """Finished by this run."""

    def __post_init__(self) -> None:
        self._started = self._last_line_s = self.clock()
        self._passed, self._reasons = 0, Counter[str]()  # rows that needed no device: taken over, bad, or filtered out

    def embedded(self) -> None:
        """Print a line now and then."""
        now = self.clock()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = now
            self.ctx.console.info(self.line())

    def written(self, record: PartRecord) -> None:
        """Record a part. Raises DataError once more rows are bad than the whole catalogue may have."""
        self.parts += 1
        self._passed += self.plan.shards[record.index].rows - record.counts.embedded
        self.ctx.events.emit(
            EventName.PART_EMBEDDED, part=record.index, rows=record.rows, seconds=record.seconds, **dict(record.counts)
        )
        self._reasons.update(record.reasons)
        bad, rows = self._reasons.total(), self.plan.catalogue.rows
        if bad > self.max_bad_fraction * rows:
            place = self.ctx.workspace.uri(records_prefix(self.plan))
            raise too_many_bad(bad, rows, self._reasons, self.max_bad_fraction, place)

    def line(self) -> str:
        """`embed 120k/1.00M rows | 812 texts/s | 14.1k tokens/s | padding 4.2% | idle 1.0% | eta 3m12s`"""
        device, seconds = self.device, self._seconds()
        rows = device.texts + self._passed
        eta = f" | eta {format_duration((self.total - self.done - rows) * seconds / rows)}" if rows else ""
        return (
            f"embed {format_count(self.done + rows)}/{format_count(self.total)} rows"
            f" | {format_count(device.texts / seconds)} texts/s | {format_count(device.tokens / seconds)} tokens/s"
            f" | padding {format_percent(device.padding_share)} | idle {format_percent(device.idle_share)}{eta}"
        )

    def finish(self) -> dict[str, Figure]:
        """Print the last line. Return how this run went."""
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
