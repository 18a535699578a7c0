"""Which rows of a holdout are scored, in which order, and which of them a batch of a rank holds. Pure.

The order depends on the holdout alone, so that the whole state of an evaluation is one number: how many rows are done.
Another attempt continues there, also with other ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.core.order import mix64


@dataclass(frozen=True)
class Span:
    """The rows of one batch on all ranks: row numbers of one bucket."""

    bucket: int
    rows: Int64s

    def share(self, rank: int, batch_size: int) -> tuple[Int64s, int]:
        """This rank's full batch [batch_size] and how many of its first rows are real.

        The rest repeats a row: every rank runs every batch, so that all run the same sequence of graphs.
        """
        mine = self.rows[rank * batch_size : (rank + 1) * batch_size]
        filling = np.repeat(self.rows[-1:], batch_size - len(mine))
        return np.concatenate([mine, filling]), len(mine)


@dataclass(frozen=True)
class HoldoutOrder:
    """The row numbers to score of each bucket, ascending."""

    rows: tuple[Int64s, ...]

    @property
    def total(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def spans(self, start: int, batch_rows: int) -> Iterator[Span]:
        """Batches of `batch_rows` rows over all ranks from row number `start` of the order on; none crosses buckets."""
        before = 0
        for bucket, rows in enumerate(self.rows):
            first = max(0, start - before)
            before += len(rows)
            for place in range(first, len(rows), batch_rows):
                yield Span(bucket, rows[place : place + batch_rows])


def choose_rows(query_ids: Sequence[Int64s], max_rows: int) -> HoldoutOrder:
    """All rows of a holdout, or whole queries of at most `max_rows` rows in all (0: no limit).

    `query_ids`: of every row, by bucket. Which queries stay is a function of their ids alone.
    """
    every = np.concatenate(query_ids) if query_ids else np.zeros(0, dtype=np.int64)
    if not max_rows or len(every) <= max_rows:
        return HoldoutOrder(tuple(np.arange(len(ids), dtype=np.int64) for ids in query_ids))
    queries, counts = np.unique(every, return_counts=True)
    order = np.argsort(mix64(queries.astype(np.uint64)), kind="stable")
    fitting = np.cumsum(counts[order]) <= max_rows
    kept = np.sort(queries[order][fitting])
    return HoldoutOrder(tuple(np.flatnonzero(np.isin(ids, kept)).astype(np.int64) for ids in query_ids))
