"""Exact nearest-neighbour search on one or several ranks, and fusion of ranked lists.

The results are bitwise reproducible, regardless of chunk sizes, the number of threads, and the machine. To achieve
this, unit vectors are rounded to multiples of 2^-26, which is less than the precision of float32. As a result, every
product and every partial sum is an integer below 2^53 in units of 2^-52, and float64 can add these in any order without
rounding. Ties are broken in favour of the item with the lower number.

For efficiency, scores are first computed in float32 to select candidates. An item is a candidate if it could be among
the top k given the maximum rounding error. Only the candidates are then rescored exactly.
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
_BLOCK_QUERIES, _BLOCK_ITEMS = 512, 4096  # a block of scores takes 8 MB, which was the fastest size on two cores
_RESCORED_NUMBERS = 4_000_000  # number of vector elements (32 MB) of the candidates that are rescored at a time
_EMPTY = -4.0  # score of a missing item, which is lower than any cosine
RANK_CONSTANT = 60  # the constant k of reciprocal rank fusion, as in the paper
WEIGHTS = tuple(step / 20 for step in range(21))


class ExactTopK:
    """The k nearest items of each query. Items must be added in chunks, in ascending order."""

    def __init__(self, queries: Float32s, k: int) -> None:
        """Initialize the search for queries given as unit vectors [Q, D].

        Raises NumericError if a vector contains NaN or infinity.
        """
        _check(queries, "query")
        self._queries = torch.from_numpy(np.ascontiguousarray(queries))
        self._scores = torch.full((len(queries), k), _EMPTY, dtype=torch.float64)
        self._items = torch.full((len(queries), k), -1, dtype=torch.int64)

    def add(self, first: int, vectors: Float32s) -> None:
        """Add the items `first`, `first + 1`, ... with the given unit vectors [n, D].

        Raises NumericError if a vector contains NaN or infinity.
        """
        _check(vectors, "item")
        items = torch.from_numpy(np.ascontiguousarray(vectors))
        # Compute the maximum error of a dot product in float32. Relative to the lengths of both vectors, it is at most
        # width * 2^-24, regardless of the order of summation (Higham, "Accuracy and Stability of Numerical Algorithms",
        # section 3.1). Rounding to multiples of 2^-26 adds up to sqrt(width) * 2^-27 for each vector. The remaining
        # slack accounts for the rounding of the thresholds.
        width = items.shape[1]
        slack = _longest(self._queries) * _longest(items) * (width + 2.0 * math.sqrt(width) + 8.0) * 2.0**-24
        for start in range(0, len(self._queries), _BLOCK_QUERIES):
            for begin in range(0, len(items), _BLOCK_ITEMS):
                block = slice(start, start + _BLOCK_QUERIES)
                self._add_block(block, first + begin, items[begin : begin + _BLOCK_ITEMS], slack)

    def merge(self, scores: Float64s, items: Int64s) -> None:
        """Merge the results of a search for the same queries among other items."""
        all_items = torch.cat([self._items, torch.from_numpy(items)], dim=1)
        order = torch.argsort(all_items, dim=1)
        all_scores = torch.cat([self._scores, torch.from_numpy(scores)], dim=1)
        self._keep_best(slice(None), all_scores.gather(1, order), all_items.gather(1, order))

    def result(self) -> tuple[Float64s, Int64s]:
        """Return the cosines [Q, k] and the item numbers [Q, k], best first and padded with item -1."""
        return self._scores.numpy(), self._items.numpy()

    def _add_block(self, block: slice, first: int, items: Tensor, slack: float) -> None:
        queries, k = self._queries[block], self._scores.shape[1]
        products = queries @ items.T
        # An item can be skipped if its score is lower than the k-th best score so far, or than the k-th best score in
        # this block, by more than the maximum error.
        threshold = self._scores[block, -1] - slack
        if k <= len(items) and bool((self._items[block, -1] < 0).any()):
            threshold = torch.maximum(threshold, torch.topk(products, k, dim=1).values[:, -1].double() - 2 * slack)
        counts = (products >= threshold.float()[:, None]).sum(dim=1)
        rows = torch.nonzero(counts).flatten()
        if not len(rows):
            return
        columns = torch.topk(products[rows], int(counts.max()), dim=1, sorted=False).indices
        columns = columns.sort(dim=1).values  # to break ties by item number
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
        """Keep the k best of the given items [n, k + m]. Ties are broken in favour of the first column."""
        best, order = torch.sort(scores, dim=1, descending=True, stable=True)
        k = self._scores.shape[1]
        self._scores[rows], self._items[rows] = best[:, :k], items.gather(1, order[:, :k])


def exact_scores(queries: Float32s, items: Float32s) -> Float64s:
    """Compute the cosines of N pairs of unit vectors. The result is bitwise identical to that of `ExactTopK`.

    Raises NumericError if a vector contains NaN or infinity.
    """
    _check(queries, "query")
    _check(items, "item")
    return (_rounded(torch.from_numpy(queries)) * _rounded(torch.from_numpy(items))).sum(dim=1).numpy()


def _rounded(vectors: Tensor) -> Tensor:
    """Convert vectors to float64 and round them to multiples of 2^-26."""
    return torch.round(vectors.double() * _SCALE) / _SCALE


def _longest(vectors: Tensor) -> float:
    """Return the length of the longest vector, but at least 1."""
    return max(1.0, float(torch.linalg.vector_norm(vectors, dim=1).max())) if len(vectors) else 1.0


def _check(vectors: Float32s, kind: str) -> None:
    if not np.isfinite(vectors).all():
        rows = int((~np.isfinite(vectors).all(axis=1)).sum())
        raise NumericError(f"{rows:,} {kind} vectors contain NaN or infinity", expected="unit vectors")


@dataclass(frozen=True, eq=False)
class Ranked:
    """The top items [Q, k] of each query and their scores [Q, k], best first, padded with item -1."""

    items: Int64s
    scores: Float64s

    def part(self, start: int, stop: int) -> "Ranked":
        return Ranked(self.items[start:stop], self.scores[start:stop])


def search_vectors(queries: Float32s, chunks: Iterable[tuple[int, Float32s]], k: int) -> Ranked:
    """Find the k nearest items of each query.

    Args:
        queries: Unit vectors [Q, D].
        chunks: Chunks of consecutive items in ascending order. Each chunk consists of the number of its first item, and
            of the unit vectors [n, D] of its items.
        k: Number of items to return for each query.

    Raises NumericError if a vector contains NaN or infinity.
    """
    top = ExactTopK(queries, k)
    for first, vectors in chunks:
        top.add(first, vectors)
    scores, items = top.result()
    return Ranked(items, scores)


def search_on_ranks(
    process_group: ProcessGroup, queries: Sequence[Float32s], chunks: Iterable[tuple[int, Sequence[Float32s]]], k: int
) -> list[Ranked]:
    """Find the k nearest items of each query when the items are distributed over the ranks of a process group.

    All ranks return the same results as a call of `search_vectors` with all items. The queries can be given in several
    widths [Q, D], in which case each chunk must contain the vectors of its items in the same widths, and one result is
    returned for each width. If a vector on any rank contains NaN or infinity, NumericError is raised on all ranks.
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


# Two methods for the fusion of ranked lists. `fuse_by_rank` only uses the ranks (Cormack, Clarke and Buettcher,
# "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods", SIGIR 2009), and `fuse_by_weight`
# uses a weighted mean of normalised scores (Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid
# Retrieval", TOIS 2023).


def fuse_by_rank(vectors: Ranked, words: Ranked) -> Int64s:
    """Rank items by the sum of 1 / (60 + rank) over the lists that contain them. Ties are broken by item number."""
    scores = np.broadcast_to(1.0 / (RANK_CONSTANT + 1.0 + np.arange(vectors.items.shape[1])), vectors.items.shape)
    return _fuse(vectors.items, scores, words.items, scores)


def fuse_by_weight(vectors: Ranked, words: Ranked, weight: float) -> Int64s:
    """Rank items by `weight` * score in `vectors` + (1 - `weight`) * score in `words`.

    The scores in each list are normalised so that the first item has score 1 and the last item has score 0. Items that
    are not in a list have score 0. Ties are broken by item number.
    """
    return _fuse(vectors.items, weight * _scaled(vectors), words.items, (1 - weight) * _scaled(words))


def best_weight(vectors: Ranked, words: Ranked, quality: Callable[[Int64s], float]) -> float:
    """Return the weight that results in the best quality. Ties are broken in favour of the weight closest to 0.5."""
    qualities = {weight: quality(fuse_by_weight(vectors, words, weight)) for weight in WEIGHTS}
    return max(qualities, key=lambda weight: (qualities[weight], -abs(weight - 0.5), -weight))


def _scaled(ranked: Ranked) -> Float64s:
    """Normalise the scores in each list to [0, 1]. If all scores in a list are equal, they are set to 1."""
    exists = ranked.items >= 0
    low = np.where(exists, ranked.scores, np.inf).min(axis=1, keepdims=True)
    high = np.where(exists, ranked.scores, -np.inf).max(axis=1, keepdims=True)
    spread = high - low
    with np.errstate(invalid="ignore"):  # for an empty list, this computes infinity minus infinity
        scaled = np.divide(ranked.scores - low, spread, out=np.ones_like(ranked.scores), where=spread > 0)
    return np.where(exists, scaled, 0.0)


def _fuse(items_a: Int64s, scores_a: Float64s, items_b: Int64s, scores_b: Float64s) -> Int64s:
    """Return the top k items by the sum of their scores. Each list must not contain an item more than once."""
    items, scores = np.concatenate([items_a, items_b], axis=1), np.concatenate([scores_a, scores_b], axis=1)
    order = np.argsort(items, axis=1, kind="stable")
    items, scores = np.take_along_axis(items, order, axis=1), np.take_along_axis(scores, order, axis=1)
    is_duplicate = (items[:, 1:] == items[:, :-1]) & (items[:, 1:] >= 0)
    scores[:, :-1] += np.where(is_duplicate, scores[:, 1:], 0.0)
    items[:, 1:][is_duplicate] = -1
    best = np.lexsort((items, np.where(items >= 0, -scores, np.inf)), axis=1)[:, : items_a.shape[1]]
    return np.take_along_axis(items, best, axis=1)
