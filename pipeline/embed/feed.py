"""From work shards to what the device takes: reading in this thread, judging and tokenising in worker processes."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import NumericError
from pipeline.core.stop import StopSignal
from pipeline.data.rows import BadRow, shorten
from pipeline.data.tokenizer import Tokens, take
from pipeline.embed.catalogue import WorkShard
from pipeline.embed.output import PartRows, Stored, VectorLayout, shorten_vectors, to_stored
from pipeline.embed.parts import Tally
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.reading import CatalogueReader, RawWindow
from pipeline.embed.texts import DUPLICATE_ID, ID_TYPES, TextRules, Window, make_window
from pipeline.io.storage import Storage
from pipeline.proc.pool import WorkerPool

# A part while it is made: rows come in as they are read, vectors as the device gives them.


@dataclass
class OpenPart:
    """Rows of one work shard. `room`: rows of the shard, of which some may turn out bad."""

    index: int
    layout: VectorLayout
    room: int
    tally: Tally
    windows: list[Window] = field(default_factory=list)
    rows: int = 0

    def __post_init__(self) -> None:
        self._seen: set[Any] = set()
        # Memory is taken as rows are filled in.
        self._vectors = np.empty((self.room, self.layout.dim), dtype=self.layout.numpy_dtype)
        self._scale = np.empty(self.room, dtype=np.float32) if self.layout.has_scale else None

    def add(self, window: Window, file: str) -> tuple[Tokens, Int64s]:
        """Take rows in; the tokens to embed, and the row of this part that each of their vectors belongs to."""
        self.tally.counts["read"] += window.num_read
        self.tally.add_bad(window.bad)
        window = self._without_duplicates(window, file)
        fresh = np.flatnonzero(window.place < 0)
        counts = self.tally.counts
        counts["embedded"] += len(fresh)
        counts["carried"] += len(window.place) - len(fresh)
        counts["known"] += int(window.known.sum())
        counts["truncated"] += int(window.truncated.sum())
        counts["tokens"] += len(window.tokens.ids)
        target = fresh + self.rows
        self.rows += len(window.place)
        self.windows.append(window)
        return window.tokens, target

    def fill(self, rows: Int64s, vectors: Float32s) -> None:
        """Vectors [N, D] of rows [N], cut and converted. Raises NumericError for what is no number."""
        if not np.isfinite(vectors).all():
            bad = rows[~np.isfinite(vectors).all(axis=1)]
            raise NumericError(
                f"{len(bad)} vectors of part {self.index} hold NaN or infinity, the first in row {bad[0]}",
                expected="finite numbers",
                next_command="--embed.precision fp32; if it stays, the checkpoint has diverged",
            )
        self.put(rows, *to_stored(shorten_vectors(vectors, self.layout.dim), self.layout))

    def put(self, rows: Int64s, vectors: Stored, scale: Float32s | None) -> None:
        """Vectors [N, dim] of rows [N] as they are stored, with their scales [N]."""
        self._vectors[rows] = vectors
        if self._scale is not None and scale is not None:
            self._scale[rows] = scale

    @property
    def place(self) -> Int64s:
        """Of every row: where its vector lies in the earlier cycle, -1 when it was embedded."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *(window.place for window in self.windows)])

    def finished(self) -> PartRows:
        """All rows, once every vector is in."""
        empty = np.zeros(0, dtype=np.uint64)
        return PartRows(
            ids=pa.concat_arrays([pa.array([], ID_TYPES[self.layout.id_type]), *(w.ids for w in self.windows)]),
            vectors=self._vectors[: self.rows],
            scale=None if self._scale is None else self._scale[: self.rows],
            id_hash=np.concatenate([empty, *(window.id_hash for window in self.windows)]),
            text_hash=np.concatenate([empty, *(window.text_hash for window in self.windows)]),
        )

    def _without_duplicates(self, window: Window, file: str) -> Window:
        """Rows whose id has not been in this part; the others are bad rows."""
        ids = window.ids.to_pylist()
        new = set(ids)
        if len(new) == len(ids) and self._seen.isdisjoint(new):
            self._seen |= new
            return window
        keep = np.zeros(len(ids), dtype=np.bool_)
        for row, name in enumerate(ids):
            keep[row] = name not in self._seen
            self._seen.add(name)
        rows = window.rows[~keep].tolist()
        names = [name for name, kept in zip(ids, keep.tolist(), strict=True) if not kept]
        self.tally.add_bad(
            BadRow(file, row, DUPLICATE_ID, shorten(str({"id": name}))) for row, name in zip(rows, names, strict=True)
        )
        return keep_rows(window, keep)


def keep_rows(window: Window, keep: npt.NDArray[np.bool_]) -> Window:
    """Some rows of a window."""
    fresh = keep[window.place < 0]
    return Window(
        ids=window.ids.filter(pa.array(keep)),
        id_hash=window.id_hash[keep],
        text_hash=window.text_hash[keep],
        rows=window.rows[keep],
        place=window.place[keep],
        known=window.known[keep],
        tokens=take(window.tokens, np.flatnonzero(fresh)),
        truncated=window.truncated[fresh],
        num_read=window.num_read,
        bad=window.bad,
    )


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


@dataclass(frozen=True)
class _Task:
    """A window of a shard; `raw` None closes the shard."""

    shard: WorkShard
    raw: RawWindow | None


@dataclass(frozen=True)
class _Answer:
    shard: WorkShard
    file: str
    window: Window | None


class Workers(Protocol):
    """What runs the tasks, in order."""

    def run_in_order(self, tasks: Iterator[_Task]) -> Iterator[_Answer]: ...


OpenWorkers = Callable[[TextRules], AbstractContextManager[Workers]]


def worker_processes(num_workers: int, stop: StopSignal) -> OpenWorkers:
    """Worker processes, one per core for 0."""
    return lambda rules: WorkerPool[TextRules, _Task, _Answer](
        answer, rules, num_workers=num_workers, stop=stop, doing="reading the catalogue"
    )


def answer(rules: TextRules, task: _Task) -> _Answer:
    """Run in a worker process."""
    if task.raw is None:
        return _Answer(task.shard, "", None)
    return _Answer(task.shard, task.raw.file, make_window(rules, task.raw))


def feed(
    plan: EmbedPlan, shards: Iterable[WorkShard], catalogue: Storage, rules: TextRules, workers: OpenWorkers
) -> Generator[Texts | Complete, None, None]:
    """The texts of all shards in order, `plan.window_rows` at a time, and each part as it is complete.

    Texts of one window belong to one part, so that vectors do not depend on which worker does what, or on stops.
    """
    with (
        CatalogueReader(plan.catalogue, catalogue, plan.window_rows) as reader,
        workers(rules) as pool,
    ):
        part: OpenPart | None = None
        held = _Held(plan.window_rows)
        for done in pool.run_in_order(_tasks(shards, reader)):
            if part is None:
                part = OpenPart(done.shard.index, plan.layout, done.shard.rows, Tally(plan.quarantine_rows))
            if done.window is not None:
                for tokens, rows in held.add(*part.add(done.window, done.file)):
                    yield Texts(tokens, rows, part)
                continue
            for tokens, rows in held.rest():
                yield Texts(tokens, rows, part)
            yield Complete(part)
            part = None


def _tasks(shards: Iterable[WorkShard], reader: CatalogueReader) -> Iterator[_Task]:
    for shard in shards:
        for raw in reader.read(shard):
            yield _Task(shard, raw)
        yield _Task(shard, None)


class _Held:
    """Texts that wait until there are enough for a window."""

    def __init__(self, window_rows: int) -> None:
        self._limit = window_rows
        self._tokens: list[Tokens] = []
        self._rows: list[Int64s] = []
        self._count = 0

    def add(self, tokens: Tokens, rows: Int64s) -> Iterator[tuple[Tokens, Int64s]]:
        """Every window that is full now."""
        start = 0
        while self._count + len(rows) - start >= self._limit:
            end = start + self._limit - self._count
            self._hold(tokens, rows, start, end)
            start = end
            yield from self.rest()
        if start < len(rows):
            self._hold(tokens, rows, start, len(rows))

    def rest(self) -> Iterator[tuple[Tokens, Int64s]]:
        """What is left, if anything."""
        if self._count:
            yield _joined(self._tokens), np.concatenate(self._rows)
        self._tokens, self._rows, self._count = [], [], 0

    def _hold(self, tokens: Tokens, rows: Int64s, start: int, end: int) -> None:
        first, last = tokens.offsets[start], tokens.offsets[end]
        self._tokens.append(Tokens(tokens.ids[first:last], tokens.offsets[start : end + 1] - first))
        self._rows.append(rows[start:end])
        self._count += end - start


def _joined(held: list[Tokens]) -> Tokens:
    lengths = np.concatenate([tokens.lengths for tokens in held])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Tokens(np.concatenate([tokens.ids for tokens in held]), offsets)
