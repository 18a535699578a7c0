"""From work shards to what the device takes: reading in this thread, judging and tokenising in worker processes."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens
from pipeline.embed.open_part import OpenPart
from pipeline.embed.parts import Tally
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.reading import CatalogueReader, RawWindow
from pipeline.embed.texts import TextRules, Window, make_window
from pipeline.embed.work_shards import WorkShard
from pipeline.io.storage import Storage
from pipeline.proc.pool import WorkerPool


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
