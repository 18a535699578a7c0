"""Ranked lists: the nearest items by vectors, exactly, alone or on several ranks, and two lists fused into one.

Which items are found does not depend on how they are cut into chunks, on threads or on the machine: unit vectors are
rounded to multiples of 2^-26 (less than what float32 leaves off), so that every product and every partial sum is a
whole number below 2^53 in units of 2^-52, which float64 adds without rounding in any order. Ties go to the item with
the lower number.

Products in float32 only select the candidates: the items whose product may, with its largest possible error, be among
the k best. The candidates are scored again as above.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.core.arrays import Float32s, Float64s, Int64s
from pipeline.core.errors import NumericError
from pipeline.parallel.process_group import ProcessGroup

_SCALE = 2.0**26
_BLOCK_QUERIES, _BLOCK_ITEMS = 512, 4096
"""Products computed at a time: 8 MB, the fastest of the sizes tried on two cores."""
_NUMBERS = 4_000_000
"""Numbers of the candidates' vectors rescored at a time: 32 MB."""
_EMPTY = -4.0
"""Below every cosine: the score of an item that does not exist."""
RANK_CONSTANT = 60
"""k of reciprocal rank fusion, that of the paper."""
WEIGHTS = tuple(step / 20 for step in range(21))


class ExactTopK:
    """The nearest `k` items of Q queries. Items are added in chunks, ascending."""

    def __init__(self, queries: Float32s, k: int) -> None:
        """Take unit vectors [Q, D]. Raises NumericError if one holds NaN or infinity."""
        _check(queries, "query")
        self._queries = torch.from_numpy(np.ascontiguousarray(queries))
        self._scores = torch.full((len(queries), k), _EMPTY, dtype=torch.float64)
        self._items = torch.full((len(queries), k), -1, dtype=torch.int64)

    def add(self, first: int, vectors: Float32s) -> None:
        """Add items `first`, `first + 1`, ... with vectors [n, D]. Raises NumericError if one holds NaN or infinity."""
        _check(vectors, "item")
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


@dataclass(frozen=True, eq=False)
class Ranked:
    """The best items [Q, k] of each query, best first, -1 after the last one, and their scores [Q, k]."""

    items: Int64s
    scores: Float64s

    def part(self, start: int, stop: int) -> "Ranked":
        return Ranked(self.items[start:stop], self.scores[start:stop])


def search_vectors(queries: Float32s, chunks: Iterable[tuple[int, Float32s]], k: int) -> Ranked:
    """Search for the `k` best items of unit vectors [Q, D], with their cosines.

    `chunks`: the number of the first item and the vectors [n, D] of consecutive items, ascending. Raises NumericError
    if a vector holds NaN or infinity.
    """
    top = ExactTopK(queries, k)
    for first, vectors in chunks:
        top.add(first, vectors)
    scores, items = top.found()
    return Ranked(items, scores)


def search_on_ranks(
    process_group: ProcessGroup, queries: Sequence[Float32s], chunks: Iterable[tuple[int, Sequence[Float32s]]], k: int
) -> list[Ranked]:
    """Search as `search_vectors` does, with the items shared by all ranks; all of them get the lists.

    `queries` holds the same queries in one or several widths [Q, D], and each chunk its items in the same widths: one
    list for each width. Raises NumericError on all ranks if a vector of any rank holds NaN or infinity.
    """
    failure, tops = "", []
    try:
        tops = [ExactTopK(vectors, k) for vectors in queries]
        for first, widths in chunks:
            for top, vectors in zip(tops, widths, strict=True):
                top.add(first, vectors)
    except NumericError as error:
        failure = error.seen
    gathered = process_group.gather((failure, [top.found() for top in tops]))
    for reason, _ in gathered:
        if reason:
            raise NumericError(reason, expected="unit vectors")
    ranked = []
    for width, vectors in enumerate(queries):
        merged = ExactTopK(vectors, k)
        for _, found in gathered:
            merged.merge(*found[width])
        scores, items = merged.found()
        ranked.append(Ranked(items, scores))
    return ranked


# Two ranked lists of a query become one by ranks alone (Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion
# outperforms Condorcet and individual Rank Learning Methods", SIGIR 2009), or by a weighted mean of scores, each list
# scaled to 0..1 (Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval", TOIS 2023).


def by_rank(one: Ranked, other: Ranked) -> Int64s:
    """Return items [Q, k] by the sum of 1 / (60 + rank) over the lists that hold them, ties by number."""
    ranks = np.broadcast_to(1.0 / (RANK_CONSTANT + 1.0 + np.arange(one.items.shape[1])), one.items.shape)
    return _fused(one.items, ranks, other.items, ranks)


def by_weight(vectors: Ranked, words: Ranked, weight: float) -> Int64s:
    """Return items [Q, k] by `weight` x the score of `vectors` + (1 - weight) x that of `words`, ties by number.

    Scores of a list run from 0 (its last item, and items not in it) to 1 (its first).
    """
    return _fused(vectors.items, weight * _scaled(vectors), words.items, (1 - weight) * _scaled(words))


def best_weight(vectors: Ranked, words: Ranked, quality: Callable[[Int64s], float]) -> float:
    """Return the weight whose fused items [Q, k] have the best quality, of equal ones the nearest to one half."""
    found = {weight: quality(by_weight(vectors, words, weight)) for weight in WEIGHTS}
    return max(found, key=lambda weight: (found[weight], -abs(weight - 0.5), -weight))


def _scaled(ranked: Ranked) -> Float64s:
    """Scale the scores of each list to 0..1; all become 1 if they are equal."""
    exists = ranked.items >= 0
    low = np.where(exists, ranked.scores, np.inf).min(axis=1, keepdims=True)
    high = np.where(exists, ranked.scores, -np.inf).max(axis=1, keepdims=True)
    spread = high - low
    with np.errstate(invalid="ignore"):  # an empty list: infinity less infinity
        scaled = np.divide(ranked.scores - low, spread, out=np.ones_like(ranked.scores), where=spread > 0)
    return np.where(exists, scaled, 0.0)


def _fused(one: Int64s, score: Float64s, other: Int64s, more: Float64s) -> Int64s:
    """Return the first k items by the sum of both scores. Each list holds an item at most once."""
    items, scores = np.concatenate([one, other], axis=1), np.concatenate([score, more], axis=1)
    order = np.argsort(items, axis=1, kind="stable")
    items, scores = np.take_along_axis(items, order, axis=1), np.take_along_axis(scores, order, axis=1)
    twice = (items[:, 1:] == items[:, :-1]) & (items[:, 1:] >= 0)
    scores[:, :-1] += np.where(twice, scores[:, 1:], 0.0)
    items[:, 1:][twice] = -1
    best = np.lexsort((items, np.where(items >= 0, -scores, np.inf)), axis=1)[:, : one.shape[1]]
    return np.take_along_axis(items, best, axis=1)
