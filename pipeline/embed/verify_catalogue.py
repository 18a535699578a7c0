"""Reading the catalogue again: every id with its text is in its part, in order, and nothing else is."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pipeline.core.arrays import UInt64s
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.reading import CatalogueReader, RawWindow
from pipeline.embed.texts import judge_rows
from pipeline.embed.vector_set import VectorSet
from pipeline.embed.verify_report import Check, judge
from pipeline.embed.work_shards import WorkShard
from pipeline.io.storage import Storage
from pipeline.proc.pool import WorkerPool

_MAX_MISSING = 100_000


@dataclass(frozen=True)
class Picked:
    """A text of the sample."""

    part: int
    id_hash: int
    text: str


@dataclass(frozen=True)
class _Task:
    shard: WorkShard
    raw: RawWindow


@dataclass(frozen=True)
class _Answer:
    """Usable rows of a window."""

    shard: WorkShard
    id_hash: UInt64s
    text_hash: UInt64s
    num_rows: int
    """Those that the filter leaves out included."""
    num_read: int
    num_bad: int
    picked: tuple[Picked, ...]


@dataclass
class _Expected:
    """What one part must hold."""

    index: int
    id_hash: list[UInt64s] = field(default_factory=list)
    text_hash: list[UInt64s] = field(default_factory=list)

    def arrays(self) -> tuple[UInt64s, UInt64s]:
        """Of ids that are twice in the shard the first counts."""
        ids, texts = np.concatenate(self.id_hash), np.concatenate(self.text_hash)
        first = np.sort(np.unique(ids, return_index=True)[1])
        return ids[first], texts[first]


Context = tuple[EmbedPlan, int]
"""The plan, and the step of the sample."""


class Workers(Protocol):
    """What runs the tasks, in order."""

    def run_in_order(self, tasks: Iterator[_Task]) -> Iterator[_Answer]: ...


OpenWorkers = Callable[[Context], AbstractContextManager[Workers]]


def judge_processes(num_workers: int, stop: StopSignal) -> OpenWorkers:
    """Worker processes, one per core for 0."""
    return lambda context: WorkerPool[Context, _Task, _Answer](
        judge_again, context, num_workers=num_workers, stop=stop, doing="reading the catalogue again"
    )


def judge_again(context: Context, task: _Task) -> _Answer:
    """Run in a worker process. Every row whose hash is a multiple of the step is in the sample."""
    plan, step = context
    rows = judge_rows(task.raw, plan.layout.id_type, plan.catalogue.columns.filter, plan.max_tokens)
    chosen = np.flatnonzero(rows.id_hash % np.uint64(step) == 0).tolist() if step else []
    picked = tuple(Picked(task.shard.index, int(rows.id_hash[row]), rows.texts[row]) for row in chosen)
    num_rows = len(task.raw.batch())
    return _Answer(task.shard, rows.id_hash, rows.text_hash, num_rows, rows.num_read, len(rows.bad), picked)


def check_catalogue(
    vectors: VectorSet, plan: EmbedPlan, catalogue: Storage, *, sample: int, workers: OpenWorkers
) -> tuple[Check, list[Picked]]:
    """Hold the parts against the catalogue; also about `sample` of its texts. Raises DataError when it has changed."""
    step = max(1, vectors.info.rows // sample) if sample else 0
    compare = _Comparison(vectors)
    picked: list[Picked] = []
    open_part: _Expected | None = None
    with (
        CatalogueReader(plan.catalogue, catalogue, plan.window_rows) as reader,
        workers((plan, step)) as pool,
        progress("reading the catalogue again", plan.catalogue.rows, "rows") as advance,
    ):
        for done in pool.run_in_order(_tasks(plan, reader)):
            advance(done.num_rows)
            if open_part is not None and open_part.index != done.shard.index:
                compare.part(open_part)
                open_part = None
            open_part = open_part or _Expected(done.shard.index)
            open_part.id_hash.append(done.id_hash)
            open_part.text_hash.append(done.text_hash)
            compare.num_read += done.num_read
            compare.num_bad += done.num_bad
            picked += done.picked
    if open_part is not None:
        compare.part(open_part)
    return compare.result(plan), picked[: 2 * sample]


def _tasks(plan: EmbedPlan, reader: CatalogueReader) -> Iterator[_Task]:
    for shard in plan.shards:
        for raw in reader.read(shard):
            yield _Task(shard, raw)


class _Comparison:
    """Adds up what differs."""

    def __init__(self, vectors: VectorSet) -> None:
        self._vectors = vectors
        self._missing: list[UInt64s] = []
        self._problems: list[str] = []
        self.num_read = self.num_bad = 0

    def part(self, expected: _Expected) -> None:
        ids, texts = expected.arrays()
        found_ids, found_texts = self._vectors.hashes(expected.index)
        there = np.isin(ids, found_ids)
        self.num_bad += sum(map(len, expected.id_hash)) - len(ids)
        name = self._vectors.info.parts[expected.index].files[-1]
        if not there.all():
            self._missing.append(ids[~there])  # an earlier part may have them
        if not np.array_equal(ids[there], found_ids):
            extra = int((~np.isin(found_ids, ids)).sum())
            self._problems.append(
                f"{name}: {extra:,} ids are not in the catalogue" if extra else f"{name}: other order"
            )
        elif changed := int((texts[there] != found_texts).sum()):
            self._problems.append(f"{name}: {changed:,} vectors are of another text")

    def result(self, plan: EmbedPlan) -> Check:
        counts, problems = self._vectors.info.counts, self._problems
        elsewhere = self._found_elsewhere()
        total = sum(map(len, self._missing))
        if total > elsewhere:
            problems.append(f"{total - elsewhere:,} ids of the catalogue have no vector")
        unreadable = sum(plan.catalogue.unreadable.values())
        read, bad = self.num_read + unreadable, self.num_bad + elsewhere + unreadable
        if (read, bad) != (counts.read, counts.bad):
            problems.append(f"{read:,} rows read and {bad:,} bad, the manifest says {counts.read:,} and {counts.bad:,}")
        return judge(
            "catalogue", problems, f"{read - bad:,} ids with their texts, {bad:,} bad rows, as in the catalogue"
        )

    def _found_elsewhere(self) -> int:
        """How many of the missing ids are in another part: duplicates that were taken out."""
        missing = np.concatenate([np.zeros(0, dtype=np.uint64), *self._missing])[:_MAX_MISSING]
        if not len(missing):
            return 0
        found = np.zeros(len(missing), dtype=np.bool_)
        for part in range(len(self._vectors.info.parts)):
            found |= np.isin(missing, self._vectors.hashes(part)[0])
        return int(found.sum())
