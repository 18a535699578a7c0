"""Hybrid search: two ranked lists of each query become one. Pure.

By ranks alone (Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank
Learning Methods", SIGIR 2009), or as a weighted mean of scores, each list brought to 0..1 (Bruch, Gai and Ingber, "An
Analysis of Fusion Functions for Hybrid Retrieval", TOIS 2023).
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Float64s, Int64s

RANK_CONSTANT = 60
"""k of reciprocal rank fusion, that of the paper."""
WEIGHTS = tuple(step / 20 for step in range(21))


@dataclass(frozen=True, eq=False)
class Ranked:
    """The best items [Q, k] of each query, best first, -1 after the last one, and their scores [Q, k]."""

    items: Int64s
    scores: Float64s

    def part(self, start: int, stop: int) -> "Ranked":
        """Queries `start` to `stop`."""
        return Ranked(self.items[start:stop], self.scores[start:stop])


def by_rank(one: Ranked, other: Ranked) -> Int64s:
    """Items [Q, k] by the sum of 1 / (60 + rank) over the lists that hold them; ties by number."""
    ranks = np.broadcast_to(1.0 / (RANK_CONSTANT + 1.0 + np.arange(one.items.shape[1])), one.items.shape)
    return _joined(one.items, ranks, other.items, ranks)


def by_weight(vectors: Ranked, words: Ranked, weight: float) -> Int64s:
    """Items [Q, k] by `weight` x the score of vectors + (1 - weight) x that of words, each from 0 (the least of the
    list, and items not in it) to 1 (the best); ties by number."""
    return _joined(vectors.items, weight * _unit(vectors), words.items, (1 - weight) * _unit(words))


def best_weight(vectors: Ranked, words: Ranked, quality: Callable[[Int64s], float]) -> float:
    """The weight with the best quality of its items [Q, k]; of equal ones that nearest to one half."""
    found = {weight: quality(by_weight(vectors, words, weight)) for weight in WEIGHTS}
    return max(found, key=lambda weight: (found[weight], -abs(weight - 0.5), -weight))


def _unit(ranked: Ranked) -> Float64s:
    """Scores of each list to 0..1; all 1 where they are equal."""
    there = ranked.items >= 0
    low = np.where(there, ranked.scores, np.inf).min(axis=1, keepdims=True)
    high = np.where(there, ranked.scores, -np.inf).max(axis=1, keepdims=True)
    spread = high - low
    with np.errstate(invalid="ignore"):  # a list without items: infinity less infinity
        unit = np.divide(ranked.scores - low, spread, out=np.ones_like(ranked.scores), where=spread > 0)
    return np.where(there, unit, 0.0)


def _joined(one: Int64s, score: Float64s, other: Int64s, more: Float64s) -> Int64s:
    """The first k by the sum of both scores; an item stands once in each list at most."""
    items, scores = np.concatenate([one, other], axis=1), np.concatenate([score, more], axis=1)
    order = np.argsort(items, axis=1, kind="stable")
    items, scores = np.take_along_axis(items, order, axis=1), np.take_along_axis(scores, order, axis=1)
    twice = (items[:, 1:] == items[:, :-1]) & (items[:, 1:] >= 0)
    scores[:, :-1] += np.where(twice, scores[:, 1:], 0.0)
    items[:, 1:][twice] = -1
    best = np.lexsort((items, np.where(items >= 0, -scores, np.inf)), axis=1)[:, : one.shape[1]]
    return np.take_along_axis(items, best, axis=1)
