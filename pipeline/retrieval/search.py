"""Exact nearest-neighbour search by vectors, on one process or several ranks, and fusion of two ranked lists.

The result does not depend on chunk sizes, threads or the machine. Unit vectors are rounded to multiples of 2^-26 (less
than the precision of float32), so that every product and every partial sum is an integer below 2^53 in units of 2^-52,
which float64 adds without rounding in any order. Ties go to the item with the lower number.

Products in float32 only select candidates, the items whose product could be among the k best given its largest possible
error. The candidates are then rescored as above.
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
_BLOCK_QUERIES, _BLOCK_ITEMS = 512, 4096  # block size of products: 8 MB, the fastest of the sizes tried on two cores
_RESCORED_NUMBERS = 4_000_000  # numbers in the candidate vectors rescored at a time: 32 MB
_EMPTY = -4.0  # score of a missing item, below every cosine
RANK_CONSTANT = 60  # k of reciprocal rank fusion, from the paper
WEIGHTS = tuple(step / 20 for step in range(21))


class ExactTopK:
    """The nearest `k` items of Q queries. Items are added in chunks, ascending."""

    def __init__(self, queries: Float32s, k: int) -> None:
        """Take unit vectors [Q, D]. Raises NumericError if one contains NaN or infinity."""
        _check(queries, "query")
        self._queries = torch.from_numpy(np.ascontiguousarray(queries))
        self._scores = torch.full((len(queries), k), _EMPTY, dtype=torch.float64)
        self._items = torch.full((len(queries), k), -1, dtype=torch.int64)

    def add(self, first: int, vectors: Float32s) -> None:
        """Add items `first`, `first + 1`, ... with vectors [n, D]. Raises NumericError for NaN or infinity."""
        _check(vectors, "item")
        items = torch.from_numpy(np.ascontiguousarray(vectors))
        # The maximum error of a float32 product of two vectors of `width` numbers, relative to their lengths. For any
        # order of summation it is width * 2^-24 (Higham, "Accuracy and Stability of Numerical Algorithms", section
        # 3.1). Rounding to 2^-26 adds sqrt(width) * 2^-27 for each vector. The remainder covers the rounding of the
        # thresholds.
        width = items.shape[1]
        slack = _longest(self._queries) * _longest(items) * (width + 2.0 * math.sqrt(width) + 8.0) * 2.0**-24
        for start in range(0, len(self._queries), _BLOCK_QUERIES):
            for begin in range(0, len(items), _BLOCK_ITEMS):
                block = slice(start, start + _BLOCK_QUERIES)
                self._add_block(block, first + begin, items[begin : begin + _BLOCK_ITEMS], slack)

    def merge(self, scores: Float64s, items: Int64s) -> None:
        """Add the results `scores` and `items` [Q, k] of a search of other items."""
        all_items = torch.cat([self._items, torch.from_numpy(items)], dim=1)
        order = torch.argsort(all_items, dim=1)
        all_scores = torch.cat([self._scores, torch.from_numpy(scores)], dim=1)
        self._keep_best(slice(None), all_scores.gather(1, order), all_items.gather(1, order))

    def result(self) -> tuple[Float64s, Int64s]:
        """Return cosines and item numbers [Q, k], best first, padded with item -1."""
        return self._scores.numpy(), self._items.numpy()

    def _add_block(self, block: slice, first: int, items: Tensor, slack: float) -> None:
        queries, k = self._queries[block], self._scores.shape[1]
        products = queries @ items.T
        # Skip items that are worse than the k-th best so far, or than the k-th best of this block, by more than the
        # maximum error.
        threshold = self._scores[block, -1] - slack
        if k <= len(items) and bool((self._items[block, -1] < 0).any()):
            threshold = torch.maximum(threshold, torch.topk(products, k, dim=1).values[:, -1].double() - 2 * slack)
        counts = (products >= threshold.float()[:, None]).sum(dim=1)
        rows = torch.nonzero(counts).flatten()
        if not len(rows):
            return
        columns = torch.topk(products[rows], int(counts.max()), dim=1, sorted=False).indices
        columns = columns.sort(dim=1).values  # ties are broken by number
        step = max(1, _RESCORED_NUMBERS // columns.shape[1] // items.shape[1])
        scores = [
            torch.einsum("qd,qmd->qm", _rounded(queries[rows[i : i + step]]), _rounded(items[columns[i : i + step]]))
            for i in range(0, len(rows), step)
        ]
        query_rows = rows + (block.start or 0)
        self._keep_best(
            query_rows,
            torch.cat([self._scores[query_rows], torch.cat(scores)], dim=1),
            torch.cat([self._items[query_rows], columns + first], dim=1),
        )

    def _keep_best(self, rows: Tensor | slice, scores: Tensor, items: Tensor) -> None:
        """Keep the k best of scores and items [n, k + m]. Ties go to the first column."""
        best, order = torch.sort(scores, dim=1, descending=True, stable=True)
        k = self._scores.shape[1]
        self._scores[rows], self._items[rows] = best[:, :k], items.gather(1, order[:, :k])


def exact_scores(queries: Float32s, items: Float32s) -> Float64s:
    """Return the cosines [N] of pairs of unit vectors [N, D], equal to those of ExactTopK. Raises as ExactTopK."""
    _check(queries, "query")
    _check(items, "item")
    return (_rounded(torch.from_numpy(queries)) * _rounded(torch.from_numpy(items))).sum(dim=1).numpy()


def _rounded(vectors: Tensor) -> Tensor:
    """Round to multiples of 2^-26 in float64."""
    return torch.round(vectors.double() * _SCALE) / _SCALE


def _longest(vectors: Tensor) -> float:
    """Return the length of the longest vector, or 1 if all are shorter."""
    return max(1.0, float(torch.linalg.vector_norm(vectors, dim=1).max())) if len(vectors) else 1.0


def _check(vectors: Float32s, kind: str) -> None:
    if not np.isfinite(vectors).all():
        rows = int((~np.isfinite(vectors).all(axis=1)).sum())
        raise NumericError(f"{rows:,} {kind} vectors contain NaN or infinity", expected="unit vectors")


@dataclass(frozen=True, eq=False)
class Ranked:
    """The best items [Q, k] of each query and their scores [Q, k], best first, padded with item -1."""

    items: Int64s
    scores: Float64s

    def part(self, start: int, stop: int) -> "Ranked":
        return Ranked(self.items[start:stop], self.scores[start:stop])


def search_vectors(queries: Float32s, chunks: Iterable[tuple[int, Float32s]], k: int) -> Ranked:
    """Return the `k` nearest items of unit vectors [Q, D] with their cosines.

    `chunks`: (number of the first item, vectors [n, D] of consecutive items), in ascending order. Raises NumericError
    if a vector contains NaN or infinity.
    """
    top = ExactTopK(queries, k)
    for first, vectors in chunks:
        top.add(first, vectors)
    scores, items = top.result()
    return Ranked(items, scores)


def search_on_ranks(
    process_group: ProcessGroup, queries: Sequence[Float32s], chunks: Iterable[tuple[int, Sequence[Float32s]]], k: int
) -> list[Ranked]:
    """Search items that are distributed over ranks. Returns the same lists as `search_vectors`, on all ranks.

    `queries` contains the same queries in one or several widths [Q, D], and each chunk its items in the same widths.
    Returns one list for each width. Raises NumericError on all ranks if a vector of any rank contains NaN or infinity.
    """
    failure, tops = "", []
    try:
        tops = [ExactTopK(vectors, k) for vectors in queries]
        for first, widths in chunks:
            for top, vectors in zip(tops, widths, strict=True):
                top.add(first, vectors)
    except NumericError as error:
        failure = error.seen
    gathered = process_group.gather((failure, [top.result() for top in tops]))
    for reason, _ in gathered:
        if reason:
            raise NumericError(reason, expected="unit vectors")
    ranked = []
    for width, vectors in enumerate(queries):
        merged = ExactTopK(vectors, k)
        for _, results in gathered:
            merged.merge(*results[width])
        scores, items = merged.result()
        ranked.append(Ranked(items, scores))
    return ranked


# Fusion of two ranked lists by ranks (Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and
# individual Rank Learning Methods", SIGIR 2009), or by a weighted mean of scores scaled to 0..1 (Bruch, Gai and Ingber,
# "An Analysis of Fusion Functions for Hybrid Retrieval", TOIS 2023).


def fuse_by_rank(vectors: Ranked, words: Ranked) -> Int64s:
    """Return items [Q, k] by the sum of 1 / (60 + rank) over the lists that contain them, ties by number."""
    scores = np.broadcast_to(1.0 / (RANK_CONSTANT + 1.0 + np.arange(vectors.items.shape[1])), vectors.items.shape)
    return _fuse(vectors.items, scores, words.items, scores)


def fuse_by_weight(vectors: Ranked, words: Ranked, weight: float) -> Int64s:
    """Return items [Q, k] by `weight` * score in `vectors` + (1 - weight) * score in `words`, ties by number.

    The scores of a list are scaled to 1 for its first item, and 0 for its last item and for items not in it.
    """
    return _fuse(vectors.items, weight * _scaled(vectors), words.items, (1 - weight) * _scaled(words))


def best_weight(vectors: Ranked, words: Ranked, quality: Callable[[Int64s], float]) -> float:
    """Return the weight whose fused items [Q, k] have the best quality. Ties go to the weight nearest to one half."""
    qualities = {weight: quality(fuse_by_weight(vectors, words, weight)) for weight in WEIGHTS}
    return max(qualities, key=lambda weight: (qualities[weight], -abs(weight - 0.5), -weight))


def _scaled(ranked: Ranked) -> Float64s:
    """Scale the scores of each list to 0..1, or to 1 if all are equal."""
    exists = ranked.items >= 0
    low = np.where(exists, ranked.scores, np.inf).min(axis=1, keepdims=True)
    high = np.where(exists, ranked.scores, -np.inf).max(axis=1, keepdims=True)
    spread = high - low
    with np.errstate(invalid="ignore"):  # an empty list gives infinity minus infinity
        scaled = np.divide(ranked.scores - low, spread, out=np.ones_like(ranked.scores), where=spread > 0)
    return np.where(exists, scaled, 0.0)


def _fuse(items_a: Int64s, scores_a: Float64s, items_b: Int64s, scores_b: Float64s) -> Int64s:
    """Return the best k items by the sum of their scores. A list contains an item at most once."""
    items, scores = np.concatenate([items_a, items_b], axis=1), np.concatenate([scores_a, scores_b], axis=1)
    order = np.argsort(items, axis=1, kind="stable")
    items, scores = np.take_along_axis(items, order, axis=1), np.take_along_axis(scores, order, axis=1)
    is_duplicate = (items[:, 1:] == items[:, :-1]) & (items[:, 1:] >= 0)
    scores[:, :-1] += np.where(is_duplicate, scores[:, 1:], 0.0)
    items[:, 1:][is_duplicate] = -1
    best = np.lexsort((items, np.where(items >= 0, -scores, np.inf)), axis=1)[:, : items_a.shape[1]]
    return np.take_along_axis(items, best, axis=1)
