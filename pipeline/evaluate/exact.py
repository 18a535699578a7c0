"""The k nearest items of each query among all items, exactly: chunked matrix products and a running top-k.

The result does not depend on how items come in chunks, on threads or on the machine: unit vectors are rounded to
multiples of 2^-26 (less than the float32 they are stored in leaves off), so that every product and every partial sum is
a whole number below 2^53 in units of 2^-52, which float64 adds without rounding in any order. Ties go to the item with
the lower number.

Matrix products are in float32, and only find out which items may be among the k best: those within its largest
possible error of the k-th best so far. These are scored again as above.
"""

import math

import numpy as np
import torch
from torch import Tensor

from pipeline.core.arrays import Float32s, Float64s, Int64s
from pipeline.core.errors import NumericError

_SCALE = 2.0**26
UNIT = _SCALE * _SCALE
"""Scores are cosines times this."""
_BLOCK_QUERIES, _BLOCK_ITEMS = 512, 4096
"""Similarities held at a time: 8 MB, the fastest of the sizes tried on two cores."""
_GROUP = 64
"""Of items, whose largest similarity is looked at first."""
_PAIRS = 2_000_000
"""Numbers of the vectors that are scored again at a time: 16 MB a side."""
_EMPTY = -4.0 * UNIT
"""Below every similarity: the place of an item that does not exist."""


class ExactTopK:
    """The nearest `k` items of Q queries. Items come in chunks, ascending."""

    def __init__(self, queries: Float32s, k: int) -> None:
        """queries [Q, D] of length one. Raises NumericError for NaN or infinity."""
        _check(queries, "query")
        self._queries = torch.from_numpy(np.ascontiguousarray(queries))
        self._longest = _longest(self._queries)
        self._scores = torch.full((len(queries), k), _EMPTY, dtype=torch.float64)
        self._items = torch.full((len(queries), k), -1, dtype=torch.int64)
        self._next = 0

    def add(self, first: int, vectors: Float32s) -> None:
        """Items `first`, `first + 1`, ... with vectors [n, D]. Raises NumericError, ValueError when out of order."""
        if first < self._next:
            raise ValueError(f"item {first} after item {self._next - 1}")
        _check(vectors, "item")
        self._next = first + len(vectors)
        items = torch.from_numpy(np.ascontiguousarray(vectors))
        # How far a float32 product of two vectors of `width` numbers is from their score, relative to both lengths.
        # Whatever the order of adding: width 2^-24 (Higham, "Accuracy and Stability of Numerical Algorithms", section
        # 3.1); and twice half of 2^-26 a number for what is rounded before; and some for the numbers compared with.
        width = items.shape[1]
        slack = self._longest * _longest(items) * (width + 2.0 * math.sqrt(width) + 8.0) * 2.0**-24
        for start in range(0, len(self._queries), _BLOCK_QUERIES):
            self._search(slice(start, start + _BLOCK_QUERIES), first, items, slack)

    def merge(self, scores: Float64s, items: Int64s) -> None:
        """Take in what another one found among other items: its `scores` and `items` [Q, k]."""
        every_score = torch.cat([self._scores, torch.from_numpy(scores)], dim=1)
        every_item = torch.cat([self._items, torch.from_numpy(items)], dim=1)
        order = torch.argsort(every_item, dim=1, stable=True)  # ties go by number again
        every_score, every_item = every_score.gather(1, order), every_item.gather(1, order)
        self._scores, self._items = _first_k(every_score, every_item, self._scores.shape[1])

    def found(self) -> tuple[Float64s, Int64s]:
        """Scores (cosines times UNIT) [Q, k] and item numbers [Q, k], best first; -1 where there are fewer than k."""
        return self._scores.numpy(), self._items.numpy()

    def _search(self, part: slice, first: int, items: Tensor, slack: float) -> None:
        """The items for some of the queries. `slack`: how far a float32 product may be off."""
        queries, k = self._queries[part], self._scores.shape[1]
        rows: list[Tensor] = []
        columns: list[Tensor] = []
        for start in range(0, len(items), _BLOCK_ITEMS):
            scores = torch.matmul(queries, items[start : start + _BLOCK_ITEMS].T)
            least = self._scores[part, -1] / UNIT - slack
            if k <= scores.shape[1] and bool((self._items[part, -1] < 0).any()):
                # Those below the k best of this block by more than both can be off are not among the k best either.
                least = torch.maximum(least, torch.topk(scores, k, dim=1).values[:, -1].double() - 2 * slack)
            # Those that reach the least of their query, columns ascending within a row: groups first, then inside them.
            least = least.float()[:, None]
            whole = scores.shape[1] - scores.shape[1] % _GROUP
            grouped = scores[:, :whole].reshape(len(scores), -1, _GROUP)
            row, group = torch.nonzero(grouped.amax(dim=2) >= least, as_tuple=True)
            hit, place = torch.nonzero(grouped[row, group] >= least[row], as_tuple=True)
            last_row, last = torch.nonzero(scores[:, whole:] >= least, as_tuple=True)
            rows.append(torch.cat([row[hit], last_row]))
            columns.append(torch.cat([group[hit] * _GROUP + place, last + whole]) + start)
            if sum(map(len, rows)) >= k * len(queries):  # a higher least score is worth the merge
                self._take_in(part, first, items, torch.cat(rows), torch.cat(columns))
                rows, columns = [], []
        if rows:
            self._take_in(part, first, items, torch.cat(rows), torch.cat(columns))

    def _take_in(self, part: slice, first: int, items: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Merge pairs of a query and an item, each of a row of `part` and of `items`; a row's items are ascending."""
        queries, step = self._queries[part], max(1, _PAIRS // items.shape[1])
        scores = torch.cat(
            [
                (_whole(queries[rows[start : start + step]]) * _whole(items[columns[start : start + step]])).sum(dim=1)
                for start in range(0, max(1, len(rows)), step)
            ]
        )
        better = scores > self._scores[part, -1][rows]  # of a tie the earlier item stays
        rows, columns, scores = rows[better], columns[better], scores[better]
        if not len(rows):
            return
        order = torch.argsort(rows, stable=True)
        rows, columns, scores = rows[order], columns[order], scores[order]
        count = torch.bincount(rows, minlength=len(self._scores[part]))
        place = torch.arange(len(rows)) - (torch.cumsum(count, 0) - count)[rows]
        changed = torch.nonzero(count).flatten()
        number_of = torch.empty_like(count)
        number_of[changed] = torch.arange(len(changed))
        shape = (len(changed), int(count.max()))
        new_score = torch.full(shape, _EMPTY, dtype=torch.float64)
        new_item = torch.full(shape, -1, dtype=torch.int64)
        new_score[number_of[rows], place] = scores
        new_item[number_of[rows], place] = columns + first
        every_score = torch.cat([self._scores[part][changed], new_score], dim=1)
        every_item = torch.cat([self._items[part][changed], new_item], dim=1)
        k = self._scores.shape[1]
        self._scores[part][changed], self._items[part][changed] = _first_k(every_score, every_item, k)


def exact_scores(queries: Float32s, items: Float32s) -> Float64s:
    """Scores [N] of pairs of unit vectors, [N, D] each, as ExactTopK has them. Raises NumericError."""
    _check(queries, "query")
    _check(items, "item")
    return (_whole(torch.from_numpy(queries)) * _whole(torch.from_numpy(items))).sum(dim=1).numpy()


def _first_k(scores: Tensor, items: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row, best first. Of equal scores the earlier column wins."""
    best, columns = torch.topk(scores, k, dim=1)
    tied = torch.nonzero((scores >= best[:, -1:]).sum(dim=1) > k).flatten()
    if len(tied):  # topk takes any of them; here all that are better than the k-th best, then the first that are equal
        better, equal = scores[tied] > best[tied, -1:], scores[tied] == best[tied, -1:]
        room = k - better.sum(dim=1, keepdim=True)
        chosen = better | (equal & (equal.cumsum(dim=1) <= room))
        columns[tied] = torch.nonzero(chosen)[:, 1].reshape(len(tied), k)
    columns = columns.sort(dim=1).values
    best = scores.gather(1, columns)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    return best.gather(1, order), items.gather(1, columns).gather(1, order)


def _whole(vectors: Tensor) -> Tensor:
    """In units of 2^-26, as whole numbers in float64."""
    return torch.round(vectors.double() * _SCALE)


def _longest(vectors: Tensor) -> float:
    """Length of the longest vector, at least one."""
    return max(1.0, float(torch.linalg.vector_norm(vectors, dim=1).max())) if len(vectors) else 1.0


def _check(vectors: Float32s, what: str) -> None:
    if not np.isfinite(vectors).all():
        rows = int((~np.isfinite(vectors).all(axis=1)).sum())
        raise NumericError(f"{rows:,} {what} vectors hold NaN or infinity", expected="unit vectors")
