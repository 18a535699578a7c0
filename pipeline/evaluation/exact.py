"""The k nearest items of each query among all items, exactly: chunked matrix products and a running top-k.

The result does not depend on how items come in chunks, on threads or on the machine: unit vectors are rounded to
multiples of 2^-26 (less than the float32 they are stored in leaves off), so that every product and every partial sum is
a whole number below 2^53 in units of 2^-52, which float64 adds without rounding in any order. Ties go to the item with
the lower number.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.core.errors import NumericError

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

_SCALE = 2.0**26
_CELLS = 8_000_000  # similarities held at a time: 64 MB
_EMPTY = -4.0 * _SCALE * _SCALE
"""Below every similarity: the place of an item that does not exist."""


class ExactTopK:
    """The nearest `k` items of Q queries. Items come in chunks, ascending."""

    def __init__(self, queries: Float32s, k: int) -> None:
        """queries [Q, D] of length one. Raises NumericError for NaN or infinity."""
        self._queries = _whole(queries, "query")
        self._scores = torch.full((len(queries), k), _EMPTY, dtype=torch.float64)
        self._items = torch.full((len(queries), k), -1, dtype=torch.int64)
        self._next = 0

    def add(self, first: int, vectors: Float32s) -> None:
        """Items `first`, `first + 1`, ... with vectors [n, D]. Raises NumericError, ValueError when out of order."""
        if first < self._next:
            raise ValueError(f"item {first} after item {self._next - 1}")
        self._next = first + len(vectors)
        items = _whole(vectors, "item").T
        numbers = torch.arange(first, self._next)
        block = max(1, _CELLS // max(1, len(vectors)))
        for start in range(0, len(self._queries), block):
            part = slice(start, start + block)
            self._merge(part, torch.matmul(self._queries[part], items), numbers)

    def merge(self, scores: Float64s, items: Int64s) -> None:
        """Take in what another one found among other items: its `scores` and `items` [Q, k]."""
        every_score = torch.cat([self._scores, torch.from_numpy(scores)], dim=1)
        every_item = torch.cat([self._items, torch.from_numpy(items)], dim=1)
        order = torch.argsort(every_item, dim=1, stable=True)  # ties go by number again
        every_score, every_item = every_score.gather(1, order), every_item.gather(1, order)
        self._scores, self._items = _first_k(every_score, every_item, self._scores.shape[1])

    def found(self) -> tuple[Float64s, Int64s]:
        """Cosines times 2^52 [Q, k] and item numbers [Q, k], best first; -1 where there are fewer than k items."""
        return self._scores.numpy(), self._items.numpy()

    def _merge(self, part: slice, scores: Tensor, numbers: Tensor) -> None:
        every_score = torch.cat([self._scores[part], scores], dim=1)
        every_item = torch.cat([self._items[part], numbers.expand(len(scores), -1)], dim=1)
        self._scores[part], self._items[part] = _first_k(every_score, every_item, self._scores.shape[1])


def _first_k(scores: Tensor, items: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row, best first. Of equal scores the earlier column wins."""
    best, columns = torch.topk(scores, k, dim=1)
    tied = torch.nonzero((scores >= best[:, -1:]).sum(dim=1) > k).flatten()
    if len(tied):  # topk takes any of them
        columns[tied] = _columns_of_ties(scores[tied], best[tied, -1:], k)
    columns = columns.sort(dim=1).values
    best = scores.gather(1, columns)
    order = torch.argsort(best, dim=1, descending=True, stable=True)
    return best.gather(1, order), items.gather(1, columns).gather(1, order)


def _columns_of_ties(scores: Tensor, last: Tensor, k: int) -> Tensor:
    """[R, n] scores and the k-th best [R, 1] to columns [R, k]: all that are better, then the first that are equal."""
    better, equal = scores > last, scores == last
    room = k - better.sum(dim=1, keepdim=True)
    chosen = better | (equal & (equal.cumsum(dim=1) <= room))
    return torch.nonzero(chosen)[:, 1].reshape(len(scores), k)


def _whole(vectors: Float32s, what: str) -> Tensor:
    """In units of 2^-26, as whole numbers in float64."""
    if not np.isfinite(vectors).all():
        rows = int((~np.isfinite(vectors).all(axis=1)).sum())
        raise NumericError(f"{rows:,} {what} vectors hold NaN or infinity", expected="unit vectors")
    return torch.round(torch.from_numpy(vectors).double() * _SCALE)
