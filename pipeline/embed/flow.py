"""The work of one worker: rows are read here, judged and tokenised in worker processes, embedded, and written in parts.

Texts stream through the device while the next are tokenised and finished parts written.
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

from pipeline.backends import Backend
from pipeline.backends.prefetch import prefetched
from pipeline.context import Figure, StageContext
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.format import format_count, format_duration, format_share
from pipeline.core.machines import MACHINES, price_usd_per_hour, usd_per_million
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens
from pipeline.embed.catalogue import CatalogueReader, RawWindow, WorkShard
from pipeline.embed.engine import Embed, EmbedFigures
from pipeline.embed.finish import too_many_bad
from pipeline.embed.parts import OpenPart, PartRecord, commit_part, records_prefix
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.texts import TextRules, Window, make_window
from pipeline.embed.vectors import VectorSet
from pipeline.io.storage import Storage
from pipeline.proc.pool import run_tasks
from pipeline.settings import Settings
from pipeline.telemetry.events import EventName

FEED_DEPTH = 2
"""Windows of tokens that wait for the device."""
FILL_DEPTH = 1
"""Windows of vectors that wait to be converted."""

MakeWindows = Callable[[TextRules, Iterator[RawWindow]], Generator[Window, None, None]]
"""Runs make_window for each, in order."""


@dataclass(frozen=True)
class Flow:
    """Where a worker reads and writes. `workspace` must go on after a stop: complete parts are still written."""

    plan: EmbedPlan
    catalogue: Storage
    workspace: Storage
    rules: TextRules
    windows: MakeWindows
    earlier: VectorSet | None
    stop: StopSignal


def worker_processes(num_workers: int, stop: StopSignal) -> MakeWindows:
    """Worker processes, one per core for 0."""
    return partial(
        run_tasks, make_window, num_workers=num_workers, stop=stop, doing="reading the catalogue", in_order=True
    )


def embed_shards(
    flow: Flow,
    shards: Sequence[WorkShard],
    embed: Embed,
    *,
    embedded: Callable[[], object] = lambda: None,
    written: Callable[[PartRecord], object] = lambda record: None,
) -> None:
    """Embed and commit some shards. Raises TrnpipeError; whatever is complete then is committed.

    `embedded` is called in this thread after each window, `written` with each part in the writer's.
    """
    last = time.monotonic()

    def write(part: OpenPart) -> None:
        nonlocal last
        if flow.earlier is not None:
            part.carry(flow.earlier)
        seconds, last = time.monotonic() - last, time.monotonic()
        written(commit_part(flow.workspace, flow.plan, part, seconds=seconds))

    items = feed(flow, shards)
    with (
        _closed_after(items),
        ThreadPoolExecutor(1, "part-writer") as writer,  # on leaving, also by an error, what was handed over is written
        prefetched(items, FEED_DEPTH) as ready,
        ThreadPoolExecutor(1, "part-filler") as filler,
    ):
        line = _Line(ready, write, writer, filler, flow.stop)
        for vectors in embed(line.windows()):
            line.fill(vectors)
            embedded()
            line.settle()
        line.finish()


@contextmanager
def _closed_after(items: Generator[object, None, None]) -> Iterator[None]:
    """End the reader and its processes on leaving, by then out of the hands of the thread that ran ahead."""
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


@dataclass(frozen=True)
class Complete:
    """All rows of a part are read, and its texts have gone before."""

    part: OpenPart


def feed(flow: Flow, shards: Sequence[WorkShard]) -> Generator[Texts | Complete, None, None]:
    """The texts of all shards in order, `plan.window_rows` at a time, and each part as it is complete.

    Texts of one window belong to one part, so that vectors do not depend on which worker does what, or on stops.
    """
    plan = flow.plan
    with (
        CatalogueReader(plan.catalogue, flow.catalogue, plan.window_rows) as reader,
        closing(flow.windows(flow.rules, (raw for shard in shards for raw in reader.read(shard)))) as windows,
    ):
        for shard in shards:
            part = OpenPart(shard.index, plan.layout, shard.rows, plan.quarantine_rows)
            yield from _texts_of(part, windows, plan.window_rows)
            yield Complete(part)


def _texts_of(part: OpenPart, windows: Iterator[Window], limit: int) -> Iterator[Texts]:
    """The texts of one part, `limit` at a time."""
    held: list[tuple[Tokens, Int64s]] = []
    room = limit

    def joined() -> Texts:
        offsets = np.concatenate([[0], np.cumsum(np.concatenate([tokens.lengths for tokens, _ in held]))])
        ids = np.concatenate([tokens.ids for tokens, _ in held])
        return Texts(Tokens(ids, offsets.astype(np.int64)), np.concatenate([rows for _, rows in held]), part)

    for window in windows:
        tokens, rows = part.add(window)
        start = 0
        while start < len(rows):
            end = min(len(rows), start + room)
            held.append((tokens.part(start, end), rows[start:end]))
            room -= end - start
            start = end
            if not room:
                yield joined()
                held, room = [], limit
        if window.rows.is_last:
            break
    if held:
        yield joined()


# Finished parts are written behind the device, one at a time; one more may wait.


class _Line:
    """What the device has been given and not yet answered, in order, with complete parts in between.

    Vectors are converted in the thread of `filler`, and parts written in that of `writer`: the one that drives the
    device goes on. The embedder may ask for windows in a thread of its own.
    """

    def __init__(
        self,
        ready: Iterator[Texts | Complete],
        write: Callable[[OpenPart], None],
        writer: ThreadPoolExecutor,
        filler: ThreadPoolExecutor,
        stop: StopSignal,
    ) -> None:
        self._ready, self._write, self._writer, self._filler, self._stop = ready, write, writer, filler, stop
        self._waiting: deque[Texts | Complete] = deque()
        self._filling: deque[Future[None]] = deque()
        self._writing: deque[Future[None]] = deque()
        self._lock = threading.Lock()

    def windows(self) -> Iterator[Tokens]:
        for item in self._ready:
            self._stop.raise_if_set("embedding")
            self._waiting.append(item)
            if isinstance(item, Texts):
                yield item.tokens
            else:
                self.settle()

    def fill(self, vectors: Float32s) -> None:
        """Vectors of the first texts that wait. Raises what went wrong with those before them."""
        with self._lock:
            first = self._waiting.popleft()
            if not isinstance(first, Texts):
                raise RuntimeError("the embedder answered more windows than it was given")
            self._filling.append(self._filler.submit(first.part.fill, first.rows, vectors))
            _wait_for_all_but(FILL_DEPTH, self._filling)

    def settle(self) -> None:
        """Hand over the parts that wait for nothing any more. Raises what went wrong with one before them."""
        with self._lock:
            while self._waiting and isinstance(first := self._waiting[0], Complete):
                _wait_for_all_but(0, self._filling)
                _wait_for_all_but(1, self._writing)
                before = self._writing[-1] if self._writing else None
                self._writing.append(self._writer.submit(self._write_after, before, first.part))
                self._waiting.popleft()
            if self._writing and self._writing[0].done():
                _wait_for_all_but(len(self._writing) - 1, self._writing)

    def finish(self) -> None:
        """Until every part is written."""
        self.settle()
        _wait_for_all_but(0, self._writing)
        if self._waiting:
            raise RuntimeError("the embedder ended before all windows had their vectors")

    def _write_after(self, before: Future[None] | None, part: OpenPart) -> None:
        if before is not None:
            before.result()  # no part is written after one that failed
        self._write(part)


def _wait_for_all_but(number: int, running: deque[Future[None]]) -> None:
    """Raises the error of the first that failed. It stays: nothing goes on after it."""
    while len(running) > number:
        running[0].result()
        running.popleft()


# How it goes: lines, events, figures, and an early end when too much of the catalogue is bad.

SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class PaceFigures:
    """`eta_s` is None before anything is done, `usd_per_million` (texts, at this pace) without a price."""

    rows: int
    total: int
    texts_per_s: float
    tokens_per_s: float
    padding_share: float
    idle_share: float
    eta_s: float | None
    usd_per_million: float | None

    def line(self) -> str:
        """`embed 120k/1.00M rows | 812 texts/s | 14.1k tokens/s | padding 4.2% | idle 1.0% | eta 3m12s | $...`"""
        eta = () if self.eta_s is None else (f"eta {format_duration(self.eta_s)}",)
        cost = () if self.usd_per_million is None else (f"${self.usd_per_million:.3g} a million texts",)
        return " | ".join(
            (
                f"embed {format_count(self.rows)}/{format_count(self.total)} rows",
                f"{format_count(self.texts_per_s)} texts/s",
                f"{format_count(self.tokens_per_s)} tokens/s",
                f"padding {format_share(self.padding_share)}",
                f"idle {format_share(self.idle_share)}",
                *eta,
                *cost,
            )
        )


class EmbedWatch:
    """Adds up what one worker does, and says so. `parts` are those finished by this run.

    Args:
        total: rows of the worker's share.
        done: of them finished by an earlier attempt.
        price_usd_per_hour: of the machine's part that this worker has; None when nobody knows.
    """

    def __init__(
        self,
        ctx: StageContext,
        plan: EmbedPlan,
        device: EmbedFigures,
        *,
        total: int,
        done: int,
        price_usd_per_hour: float | None,
        max_bad_fraction: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ctx, self._plan, self._device = ctx, plan, device
        self._total, self._done, self._price = total, done, price_usd_per_hour
        self._max_bad_fraction, self._reasons = max_bad_fraction, Counter[str]()
        self._clock = clock
        self._started = self._last_line_s = clock()
        self._passed = 0  # rows that needed no device: taken over, bad, or left out by the filter
        self.parts = 0

    def embedded(self) -> None:
        now = self._clock()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = now
            self._ctx.console.info(self.read().line())

    def written(self, record: PartRecord) -> None:
        """Raises DataError once more rows are bad than the whole catalogue may have."""
        self.parts += 1
        self._passed += self._plan.shards[record.index].rows - record.counts.embedded
        self._ctx.events.emit(
            EventName.PART_EMBEDDED, part=record.index, rows=record.rows, seconds=record.seconds, **dict(record.counts)
        )
        self._reasons.update(record.reasons)
        bad, rows = self._reasons.total(), self._plan.catalogue.rows
        if bad > self._max_bad_fraction * rows:
            place = self._ctx.workspace.uri(records_prefix(self._plan))
            raise too_many_bad(bad, rows, self._reasons, self._max_bad_fraction, place)

    def read(self) -> PaceFigures:
        """Figures since the start."""
        device, seconds = self._device, max(1e-9, self._clock() - self._started)
        rows = device.texts + self._passed
        return PaceFigures(
            rows=self._done + rows,
            total=self._total,
            texts_per_s=device.texts / seconds,
            tokens_per_s=device.tokens / seconds,
            padding_share=device.padding_share,
            idle_share=device.idle_share,
            eta_s=(self._total - self._done - rows) * seconds / rows if rows else None,
            usd_per_million=None if self._price is None else usd_per_million(self._price, device.texts, seconds),
        )

    def finish(self) -> dict[str, Figure]:
        """The last line; how this run went."""
        pace = self.read()
        self._ctx.console.info(pace.line())
        cost = pace.usd_per_million
        return {
            "texts_per_s": round(pace.texts_per_s, 1),
            "tokens_per_s": round(pace.tokens_per_s, 1),
            "padding_share": float(f"{pace.padding_share:.4g}"),
            "idle_share": float(f"{pace.idle_share:.4g}"),
            "usd_per_million_texts": None if cost is None else float(f"{cost:.4g}"),
        }


def share_price(settings: Settings, ctx: StageContext, backend: Backend) -> float | None:
    """Dollars an hour for what this process has of the machine; None where the price of another one would be told."""
    given = settings.estimate.price_usd_per_hour
    instance = MACHINES.get(settings.estimate.instance)
    price = price_usd_per_hour(settings.estimate.instance, given)
    if price is None:
        return None
    if backend.is_neuron and instance is not None:
        return price / instance.num_cores
    return None if given is None else price / ctx.world.local_world_size
