"""Apply the teacher to all prepared training rows, in parts that several workers compute and commit.

Each prepared partition becomes one folder, which later cycles with the same teacher reuse. It contains the vectors of
its distinct texts, or the scores of its pairs. The scores of mined negatives are another folder. The content of a part
does not depend on the worker that computes it.
"""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.context import StageContext
from pipeline.core.arrays import Int64s
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
from pipeline.teach.store import KIND, TaughtInfo
from pipeline.teach.teacher import DOING, CheckpointTeacher, RowTexts, Teacher

PART_ROWS = 16_384
"""Number of pairs or texts in a part, which limits memory and the work lost on interruption."""


@dataclass(frozen=True)
class TeachTask:
    """What the teacher has to compute for one partition, or for the negatives that were mined in all of them."""

    ctx: StageContext
    teacher: Teacher
    texts: RowTexts
    source: str
    """Fingerprint of the partition, or digest of the negatives."""
    negatives: NegativeSet | None = None

    @cached_property
    def prefix(self) -> str:
        return f"tokens/{self.texts.info.dataset}/taught/{fingerprint([self.teacher.digest, self.source])}"

    @property
    def name(self) -> str:
        """The name of the array that is computed in parts."""
        return "vectors" if self.teacher.width else "score"

    @cached_property
    def parts(self) -> ArrayParts:
        if self.teacher.width:
            total, per_part = len(self._distinct[0]), PART_ROWS
        else:
            products = self._pairs[1]
            total, per_part = len(products), max(1, PART_ROWS * len(products) // max(1, products.size))
        store = _part_store(self.ctx.workspace_after_stop, f"{self.prefix}-{per_part}/{self.name}")
        return ArrayParts(store, self.ctx.scratch / "teach", total, per_part)

    def compute(self, start: int, stop: int) -> npt.NDArray[np.generic]:
        """Compute one part of the array. Raises NumericError if the teacher returns NaN or infinite numbers."""
        if isinstance(self.teacher, CheckpointTeacher):
            numbers, count = self._distinct[0][start:stop], sum(self.texts.rows.sizes)
            sides = {"query": numbers[numbers < count], "product": numbers[numbers >= count] - count}
            blocks = [self.teacher.vectors(self.texts, side, rows) for side, rows in sides.items() if len(rows)]
            return self._finite(np.concatenate([np.zeros((0, self.teacher.width)), *blocks]).astype(np.float16))
        queries, products = (rows[start:stop] for rows in self._pairs)
        score, is_pair = np.full(products.shape, np.nan, dtype=np.float32), products != NONE
        if is_pair.any():
            score[is_pair] = self._finite(self.teacher.scores(self.texts, queries[is_pair], products[is_pair]))
        return score

    def commit(self) -> None:
        """Combine all parts to one committed folder. Several workers may do this, because they write the same bytes."""
        info = TaughtInfo(
            teacher=self.teacher.digest,
            source=self.source,
            rows=self.texts.rows.sizes,
            width=self.teacher.width,
        )
        with atomic.staging_dir(self.ctx.scratch / "teach") as folder:
            parts, empty = self.parts, self.compute(0, 0)
            shape = (parts.total, *empty.shape[1:])
            array = np.lib.format.open_memmap(folder / f"{self.name}.npy", "w+", empty.dtype, shape)
            for number in range(len(parts)):
                array[slice(*parts.rows(number))] = parts.open(number)
            array.flush()
            if info.width:
                for side, index in zip(("query", "product"), np.split(self._distinct[1], 2), strict=True):
                    np.save(folder / f"{side}.npy", index.astype(np.int32))
            fields = info.model_dump(mode="json")
            commit_dir(self.ctx.workspace_after_stop, folder, self.prefix, kind=KIND, fields=fields)

    @cached_property
    def _pairs(self) -> tuple[Int64s, Int64s]:
        """The rows of the query and of the product of each pair. Mined pairs [Q, K] are padded with NONE."""
        rows = self.texts.rows
        if self.negatives is None:
            return (np.arange(sum(rows.sizes)),) * 2
        stored = open_negatives(self.ctx.workspace, self.negatives, rows.sizes, self.ctx.scratch / "negatives")
        ids, first = np.unique(self._column("query_id"), return_index=True)
        queries = first[np.searchsorted(ids, stored.query_id)]
        return np.broadcast_to(queries[:, None], stored.product.shape), np.asarray(stored.product)

    @cached_property
    def _distinct(self) -> tuple[Int64s, Int64s]:
        """The first row of each distinct text, and the text of each row.

        Texts are in the order of their first occurrence. N is added to the rows of products, which follow all queries.
        """
        hashes = np.concatenate([self._column("query"), ~self._column("product")])  # a text may have two vectors
        _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        order = np.argsort(first)
        return first[order], np.argsort(order)[inverse.reshape(-1)]

    def _column(self, field: str) -> npt.NDArray[Any]:
        """Read a field of all rows, or hashes of their texts."""
        rows, blocks = self.texts.rows, list[npt.NDArray[Any]]()
        for bucket, numbers in rows.blocks():
            self.ctx.stop.raise_if_set(DOING)
            values = rows.read(np.full(len(numbers), bucket), numbers, bucket, (field,))[field]
            blocks.append(text_hashes(values, rows.pad_id) if values.ndim == 2 else values)
        return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.uint64)

    def _finite(self, values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        if not np.isfinite(values).all():
            raise NumericError(
                f"the teacher {self.teacher.name} computes scores or vectors that are NaN or infinite",
                expected="finite numbers",
                next_command="choose a different --train.teacher",
            )
        return values


def _part_store(storage: Storage, folder: str) -> Parts[MinedPart]:
    return Parts(storage, f"{folder}-done", folder, MinedPart, lambda index: (f"{index:05d}.npy",))


def plan_tasks(
    ctx: StageContext, teacher: Teacher, sets: list[TokenSet], tokenizer: bytes, negatives: NegativeSet | None
) -> list[TeachTask]:
    """Return the tasks of a cycle: one for each prepared partition, and one for mined negatives if they are scored."""

    def task(chosen: list[TokenSet], source: str, mined: NegativeSet | None = None) -> TeachTask:
        rows = open_rows(ctx.workspace, chosen, "train", ctx.scratch / "tokens")
        return TeachTask(ctx, teacher, RowTexts(rows, chosen[0].info, tokenizer), source, mined)

    tasks = [task([one], one.info.fingerprint) for one in sets]
    if negatives is not None and not teacher.width:
        tasks.append(task(sets, negatives.digest, negatives))
    return tasks


def teach_worker_slice(tasks: list[TeachTask], worker: int, workers: int) -> int:
    """Compute the parts that are assigned to a worker. Returns the number of parts that no worker has committed yet."""
    with progress("applying the teacher", None, "pairs and texts") as advance:
        parts = [(task, index) for task in tasks for index in range(len(task.parts))]
        own = parts[worker * len(parts) // workers : (worker + 1) * len(parts) // workers]
        done = {task.prefix: task.parts.store.done() for task, _ in own}
        for task, index in own:
            if index in done[task.prefix]:
                continue
            task.ctx.stop.raise_if_set(DOING)
            began, (start, stop) = time.monotonic(), task.parts.rows(index)
            values = task.compute(start, stop)
            spent_ms = round(1000 * (time.monotonic() - began))
            task.parts.commit(index, values, {"rows": stop - start, "ms": spent_ms})
            advance(stop - start)
    return sum(len(task.parts) - len(task.parts.store.done()) for task in tasks)


def totals(tasks: list[TeachTask]) -> dict[str, int]:
    """Add up the numbers of rows and the milliseconds of all parts."""
    counts = [record.counts for task in tasks for record in task.parts.store.read_all(range(len(task.parts)))]
    return {name: sum(count[name] for count in counts) for name in ("rows", "ms")}
