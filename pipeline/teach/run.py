"""Apply the teacher to all prepared training rows, in parts that several workers compute and commit.

Each prepared partition becomes one folder, which later cycles with the same teacher reuse. It contains the scores of
its pairs and the vectors of its distinct texts. The scores of mined negatives are another folder. The content of a part
does not depend on the worker that computes it.
"""

import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipeline.context import StageContext
from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.errors import NumericError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.data.shards import text_hashes
from pipeline.data.token_sets import TokenSet, open_rows
from pipeline.io import atomic
from pipeline.io.commit import commit_dir
from pipeline.io.parts import Parts
from pipeline.io.storage import Storage
from pipeline.mine.run import NONE, ArrayParts, MinedPart
from pipeline.mine.store import NegativeSet, open_negatives
from pipeline.teach.store import KIND, MINED, TaughtInfo
from pipeline.teach.teacher import RowTexts, Teacher, score_pairs

PART_ROWS = 16_384
"""Number of pairs or texts in a part, which limits memory and the work lost on interruption."""
_DOING = "computing scores and vectors of the teacher (finished parts are kept)"


@dataclass(frozen=True)
class TeachTask:
    """What the teacher has to compute for one partition, or for the negatives that were mined in all of them."""

    ctx: StageContext
    teacher: Teacher
    texts: RowTexts
    source: str
    """Fingerprint of the partition, or digest of the negatives."""
    negatives: NegativeSet | None = None

    @property
    def name(self) -> str:
        return self.texts.info.partition if self.negatives is None else MINED

    @cached_property
    def prefix(self) -> str:
        return f"tokens/{self.texts.info.dataset}/taught/{fingerprint([self.teacher.digest, self.source])}"

    @cached_property
    def parts(self) -> dict[str, ArrayParts]:
        """The arrays that are computed in parts."""
        sizes, info, teacher = dict[str, tuple[int, int]](), self.texts.info, self.teacher
        if self.negatives is not None:
            queries, per_query = self._mined[1].shape
            sizes["score"] = queries, max(1, PART_ROWS // max(1, per_query))
        else:
            if teacher.scores_pairs(info, mined=False):
                sizes["score"] = sum(self.texts.rows.sizes), PART_ROWS
            if teacher.width:
                sizes["vectors"] = sum(len(first) for first, _ in self._distinct.values()), PART_ROWS
        storage, cache = self.ctx.workspace_after_stop, self.ctx.scratch / "teach"
        return {
            name: ArrayParts(_part_store(storage, f"{self.prefix}-{per_part}/{name}"), cache, total, per_part)
            for name, (total, per_part) in sizes.items()
        }

    def compute(self, name: str, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Compute one part of an array. Raises NumericError if the teacher returns NaN or infinite numbers."""
        values: npt.NDArray[np.generic]
        if start == stop:  # a partition without training rows
            if name == "vectors":
                return np.zeros((0, self.teacher.width), dtype=np.float16)
            return np.zeros((0,) if self.negatives is None else (0, self._mined[1].shape[1]), dtype=np.float32)
        if name == "vectors":
            values = self._vectors(start, stop).astype(np.float16)
        elif self.negatives is None:
            numbers = np.arange(start, stop, dtype=np.int64)
            values = score_pairs(self.teacher, self.texts, numbers, numbers, self.ctx)
        else:
            rows, products = self._mined[0][start:stop], self._mined[1][start:stop]
            query, column = np.nonzero(products != NONE)
            values = np.full(products.shape, np.nan, dtype=np.float32)
            scored = score_pairs(self.teacher, self.texts, rows[query], products[query, column], self.ctx)
            _check(scored, self.teacher)
            values[query, column] = scored
            return values
        return _check(values, self.teacher)

    def commit(self) -> None:
        """Combine all parts to one committed folder. Several workers may do this, because they write the same bytes."""
        info = TaughtInfo(
            teacher=self.teacher.digest,
            source=self.source,
            rows=self.texts.rows.sizes if self.negatives is None else (len(self._mined[1]),),
            width=0 if "vectors" not in self.parts else self.teacher.width,
        )
        with atomic.staging_dir(self.ctx.scratch / "teach") as folder:
            for name, parts in self.parts.items():
                if not len(parts):
                    np.save(folder / f"{name}.npy", self.compute(name, 0, 0))
                    continue
                first = parts.open(0)
                shape = (parts.total, *first.shape[1:])
                array = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", first.dtype, shape)
                for index in range(len(parts)):
                    array[slice(*parts.rows(index))] = parts.open(index)
                array.flush()
                del array
            if "vectors" in self.parts:
                offset = 0
                for side, (first_rows, text) in self._distinct.items():
                    np.save(folder / f"{side}.npy", (text + offset).astype(np.int32))
                    offset += len(first_rows)
            fields = info.model_dump(mode="json")
            commit_dir(self.ctx.workspace_after_stop, folder, self.prefix, kind=KIND, fields=fields)

    @cached_property
    def _mined(self) -> tuple[Int64s, Int64s]:
        """A row of each query with mined negatives [Q], and the rows of its negatives [Q, K]."""
        if self.negatives is None:
            return np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
        rows, stop = self.texts.rows, self.ctx.stop
        stored = open_negatives(self.ctx.workspace, self.negatives, rows.sizes, self.ctx.scratch / "negatives")
        blocks = [np.zeros(0, dtype=np.int64)]
        for bucket, numbers in rows.blocks():
            stop.raise_if_set(_DOING)
            blocks.append(rows.read(np.full(len(numbers), bucket), numbers, bucket, ("query_id",))["query_id"])
        ids, first = np.unique(np.concatenate(blocks), return_index=True)
        return first[np.searchsorted(ids, stored.query_id)], np.asarray(stored.product)

    @cached_property
    def _distinct(self) -> dict[str, tuple[Int64s, Int64s]]:
        """For each side, a row of each distinct text in order of first occurrence, and the text of each row."""
        rows, found = self.texts.rows, dict[str, tuple[Int64s, Int64s]]()
        for side in ("query", "product"):
            blocks: list[UInt64s] = [np.zeros(0, dtype=np.uint64)]
            for bucket, numbers in rows.blocks():
                self.ctx.stop.raise_if_set(_DOING)
                arrays = rows.read(np.full(len(numbers), bucket), numbers, bucket, (side,))
                blocks.append(text_hashes(arrays[side], rows.pad_id))
            _, first, inverse = np.unique(np.concatenate(blocks), return_index=True, return_inverse=True)
            order = np.argsort(first)
            rank = np.empty_like(order)
            rank[order] = np.arange(len(order))
            found[side] = first[order], rank[inverse.reshape(-1)]
        return found

    def _vectors(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Compute the vectors of distinct texts, of which those of queries are first."""
        blocks, offset = [np.zeros((0, self.teacher.width), dtype=np.float32)], 0
        for side, (first, _) in self._distinct.items():
            numbers = first[max(0, start - offset) : max(0, stop - offset)]
            if len(numbers):
                blocks.append(self.teacher.vectors(self.texts, side, numbers))
            offset += len(first)
        return np.concatenate(blocks)


def _part_store(storage: Storage, folder: str) -> Parts[MinedPart]:
    return Parts(storage, f"{folder}-done", folder, MinedPart, lambda index: (f"{index:05d}.npy",))


def _check(values: npt.NDArray[np.generic], teacher: Teacher) -> npt.NDArray[np.generic]:
    if not np.isfinite(values).all():
        raise NumericError(
            f"the teacher {teacher.name} computes scores or vectors that are NaN or infinite",
            expected="finite numbers",
            next_command="choose a different --train.teacher",
        )
    return values


def plan_tasks(
    ctx: StageContext, teacher: Teacher, sets: list[TokenSet], tokenizer: bytes, negatives: NegativeSet | None
) -> list[TeachTask]:
    """Return the tasks of a cycle: one for each prepared partition, and one for mined negatives if they are scored."""
    cache = ctx.scratch / "tokens"
    tasks = [
        TeachTask(ctx, teacher, RowTexts(open_rows(ctx.workspace, [one], "train", cache), one.info, tokenizer), source)
        for one, source in ((one, one.info.fingerprint) for one in sets)
    ]
    if negatives is not None and teacher.scores_pairs(sets[0].info, mined=True):
        texts = RowTexts(open_rows(ctx.workspace, sets, "train", cache), sets[0].info, tokenizer)
        tasks.append(TeachTask(ctx, teacher, texts, negatives.digest, negatives))
    return tasks


def teach_worker_slice(tasks: list[TeachTask], worker: int, workers: int) -> int:
    """Compute the parts that are assigned to a worker. Returns the number of parts that no worker has committed yet."""
    arrays = [(task, name, parts, parts.store.done()) for task in tasks for name, parts in task.parts.items()]
    todo = [
        (task, name, parts, index)
        for task, name, parts, done in arrays
        for index in parts.worker_slice(worker, workers)
        if index not in done
    ]
    total = sum(stop - start for _, _, parts, index in todo for start, stop in [parts.rows(index)])
    with progress("applying the teacher", total, "pairs and texts") as advance:
        for task, name, parts, index in todo:
            task.ctx.stop.raise_if_set(_DOING)
            began, (start, stop) = time.monotonic(), parts.rows(index)
            values = task.compute(name, start, stop)
            milliseconds = round(1000 * (time.monotonic() - began))
            parts.commit(index, values, {"rows": stop - start, "ms": milliseconds})
            advance(stop - start)
    return sum(len(parts) - len(parts.store.done()) for _, _, parts, _ in arrays)


def totals(tasks: list[TeachTask]) -> dict[str, int]:
    """Add up the numbers of rows and the milliseconds of all parts."""
    sums = {"rows": 0, "ms": 0}
    for parts in (parts for task in tasks for parts in task.parts.values()):
        for record in parts.store.read_all(range(len(parts))):
            sums = {name: count + record.counts[name] for name, count in sums.items()}
    return sums
