"""Ranked lists: by vectors, alone or on several ranks, and two lists fused into one."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Float32s, Float64s, Int64s
from pipeline.core.errors import NumericError
from pipeline.parallel.gang import Gang
from pipeline.retrieval.exact import ExactTopK

RANK_CONSTANT = 60
"""k of reciprocal rank fusion, that of the paper."""
WEIGHTS = tuple(step / 20 for step in range(21))


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
    gang: Gang, queries: Sequence[Float32s], chunks: Iterable[tuple[int, Sequence[Float32s]]], k: int
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
    gathered = gang.gather((failure, [top.found() for top in tops]))
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
