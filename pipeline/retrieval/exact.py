"""Find the k nearest items of each query among all items, exactly.

The result does not depend on how items are cut into chunks, on threads or on the machine: unit vectors are rounded to
multiples of 2^-26 (less than what float32 leaves off), so that every product and every partial sum is a whole number
below 2^53 in units of 2^-52, which float64 adds without rounding in any order. Ties go to the item with the lower
number.

Products in float32 only select the candidates: the items whose product may, with its largest possible error, be among
the k best. The candidates are scored again as above.
"""

import math

import numpy as np
import torch
from torch import Tensor

from pipeline.core.arrays import Float32s, Float64s, Int64s
from pipeline.core.errors import NumericError

_SCALE = 2.0**26
_BLOCK_QUERIES, _BLOCK_ITEMS = 512, 4096
"""Products computed at a time: 8 MB, the fastest of the sizes tried on two cores."""
_NUMBERS = 4_000_000
"""Numbers of the candidates' vectors rescored at a time: 32 MB."""
_EMPTY = -4.0
"""Below every cosine: the score of an item that does not exist."""


class ExactTopK:
    """The nearest `k` items of Q queries. Items are added in chunks, ascending."""

    def __init__(self, queries: Float32s, k: int) -> None:
        """Take unit vectors [Q, D]. Raises NumericError if one holds NaN or infinity."""
        _check(queries, "query")
        self._queries = torch.from_numpy(np.ascontiguousarray(queries))
        self._scores = torch.full((len(queries), k), _EMPTY, dtype=torch.float64)
        self._items = torch.full((len(queries), k), -1, dtype=torch.int64)
        self._next = 0

    def add(self, first: int, vectors: Float32s) -> None:
        """Add items `first`, `first + 1`, ... with vectors [n, D].

        Raises NumericError if one holds NaN or infinity, ValueError if items are out of order.
        """
        if first < self._next:
            raise ValueError(f"item {first} after item {self._next - 1}")
        _check(vectors, "item")
        self._next = first + len(vectors)
        items = torch.from_numpy(np.ascontiguousarray(vectors))
        # The largest distance of a float32 product of two vectors of `width` numbers from their score, relative to
        # their lengths. In any order of adding it is width * 2^-24 (Higham, "Accuracy and Stability of Numerical
        # Algorithms", section 3.1). Rounding to 2^-26 adds sqrt(width) * 2^-27 for each side; the rest is for the
        # numbers it is compared with.
        width = items.shape[1]
        slack = _longest(self._queries) * _longest(items) * (width + 2.0 * math.sqrt(width) + 8.0) * 2.0**-24
        for start in range(0, len(self._queries), _BLOCK_QUERIES):
            for begin in range(0, len(items), _BLOCK_ITEMS):
                block = slice(start, start + _BLOCK_QUERIES)
                self._add_block(block, first + begin, items[begin : begin + _BLOCK_ITEMS], slack)

    def merge(self, scores: Float64s, items: Int64s) -> None:
        """Add the `scores` and `items` [Q, k] that another search found among other items."""
        all_items = torch.cat([self._items, torch.from_numpy(items)], dim=1)
        order = torch.argsort(all_items, dim=1)
        all_scores = torch.cat([self._scores, torch.from_numpy(scores)], dim=1)
        self._keep_best(slice(None), all_scores.gather(1, order), all_items.gather(1, order))

    def found(self) -> tuple[Float64s, Int64s]:
        """Return cosines and item numbers [Q, k], best first, -1 after the last item."""
        return self._scores.numpy(), self._items.numpy()

    def _add_block(self, block: slice, first: int, items: Tensor, slack: float) -> None:
        queries, k = self._queries[block], self._scores.shape[1]
        products = queries @ items.T
        # An item below the k-th best so far, or below the k-th best of this block by more than both can be off, is not
        # among the k best.
        least = self._scores[block, -1] - slack
        if k <= len(items) and bool((self._items[block, -1] < 0).any()):
            least = torch.maximum(least, torch.topk(products, k, dim=1).values[:, -1].double() - 2 * slack)
        counts = (products >= least.float()[:, None]).sum(dim=1)
        rows = torch.nonzero(counts).flatten()
        if not len(rows):
            return
        columns = torch.topk(products[rows], int(counts.max()), dim=1, sorted=False).indices
        columns = columns.sort(dim=1).values  # ties go by number
        step = max(1, _NUMBERS // columns.shape[1] // items.shape[1])
        scores = [
            torch.einsum(
                "qd,qmd->qm", _rounded(queries[rows[at : at + step]]), _rounded(items[columns[at : at + step]])
            )
            for at in range(0, len(rows), step)
        ]
        of_all = rows + (block.start or 0)
        self._keep_best(
            of_all,
            torch.cat([self._scores[of_all], torch.cat(scores)], dim=1),
            torch.cat([self._items[of_all], columns + first], dim=1),
        )

    def _keep_best(self, rows: Tensor | slice, scores: Tensor, items: Tensor) -> None:
        """Keep the k best of scores and items [n, k + m]. Of equal scores the first column is kept."""
        best, order = torch.sort(scores, dim=1, descending=True, stable=True)
        k = self._scores.shape[1]
        self._scores[rows], self._items[rows] = best[:, :k], items.gather(1, order[:, :k])


def exact_scores(queries: Float32s, items: Float32s) -> Float64s:
    """Return the cosines [N] of pairs of unit vectors [N, D], the same as those of ExactTopK. Raises NumericError."""
    _check(queries, "query")
    _check(items, "item")
    return (_rounded(torch.from_numpy(queries)) * _rounded(torch.from_numpy(items))).sum(dim=1).numpy()


def _rounded(vectors: Tensor) -> Tensor:
    """Round to multiples of 2^-26, in float64."""
    return torch.round(vectors.double() * _SCALE) / _SCALE


def _longest(vectors: Tensor) -> float:
    """Return the length of the longest vector, at least one."""
    return max(1.0, float(torch.linalg.vector_norm(vectors, dim=1).max())) if len(vectors) else 1.0


def _check(vectors: Float32s, what: str) -> None:
    if not np.isfinite(vectors).all():
        rows = int((~np.isfinite(vectors).all(axis=1)).sum())
        raise NumericError(f"{rows:,} {what} vectors hold NaN or infinity", expected="unit vectors")
