"""The vectors or scores that a teacher computed for training rows, in the order of the token shards."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.batch_order import first_rows, locate
from pipeline.data.shards import Arrays

Float16s = npt.NDArray[np.float16]


@dataclass(frozen=True)
class TaughtPartition:
    """What a teacher computed for the N training rows of a partition. Any of it may be missing.

    Args:
        rows: Number of rows in each bucket.
        score: Scores of the pairs [N]. They are only comparable within a query.
        query: Indices [N] of the vectors of the queries, and `product` [N] those of the products.
        vectors: Unit vectors [U, D] of the distinct texts.
    """

    rows: tuple[int, ...]
    score: Float32s | None = None
    query: npt.NDArray[np.int32] | None = None
    product: npt.NDArray[np.int32] | None = None
    vectors: Float16s | None = None


@dataclass(frozen=True)
class TaughtRows:
    """What a teacher computed for the rows of several partitions, numbered as in the `TokenRows` of the same ones."""

    partitions: Sequence[TaughtPartition]
    width: int
    """Size of the teacher's vectors, or 0 if it does not have any."""

    def scores(self, numbers: Int64s) -> Float32s:
        """Return the scores of N rows. Those that are missing are NaN."""
        scores = np.full(len(numbers), np.nan, dtype=np.float32)
        for part, chosen, rows in self._located(numbers):
            if part.score is not None:
                scores[chosen] = part.score[rows]
        return scores

    def vectors(self, side: str, numbers: Int64s) -> Float32s:
        """Return the vectors [N, width] of the queries or products of N rows."""
        vectors = np.zeros((len(numbers), self.width), dtype=np.float32)
        for part, chosen, rows in self._located(numbers):
            index = part.query if side == "query" else part.product
            if part.vectors is not None and index is not None:
                vectors[chosen] = part.vectors[index[rows]]
        return vectors

    def _located(self, numbers: Int64s) -> list[tuple[TaughtPartition, Int64s, Int64s]]:
        """Return each partition, the indices of the numbers that belong to it, and their numbers within it."""
        counts = np.array([part.rows for part in self.partitions], dtype=np.int64)
        ends = counts.cumsum(axis=0)
        bucket, row = locate(ends[-1].tolist(), numbers)
        owner = (row[:, None] >= ends.T[bucket]).sum(axis=1)
        located = []
        for index in np.unique(owner):
            chosen = np.flatnonzero(owner == index)
            local = row[chosen] - (ends - counts)[index, bucket[chosen]]
            located.append((self.partitions[index], chosen, first_rows(counts[index].tolist())[bucket[chosen]] + local))
        return located


TAUGHT = ("teacher_score", "teacher_mask", "teacher_query", "teacher_product")


def taught_scores(score: Float32s) -> Arrays:
    """Return the scores and mask of a batch. Scores that are missing become 0, because no NaN may reach a device."""
    is_scored = np.isfinite(score)
    return {"teacher_score": np.where(is_scored, score, np.float32(0)), "teacher_mask": is_scored.astype(np.float32)}


def taught_vectors(query: Float32s, product: Float32s) -> Arrays:
    """Return the vectors of a batch."""
    return {"teacher_query": query, "teacher_product": product}
