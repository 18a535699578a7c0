"""Search with words (BM25), alone and fused with search by vectors. Pure.

Words are scored by bm25s, in the form of Lucene (Kamphuis et al. 2020, "Which BM25 do you mean?"): idf = ln(1 + (N - n
+ 0.5) / (n + 0.5)), which is never negative, and no factor k1 + 1; k1 and b as in Anserini. Words are those of
data/words.py, with no stemming and no stop words. Which items are best is chosen here: bm25s takes any of equal ones.

Memory: about 60 bytes for each different word of an item (200 while the index is built), and 8 bytes an item for the
query at hand, however many queries there are.

Two ranked lists of a query become one by ranks alone (Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion
outperforms Condorcet and individual Rank Learning Methods", SIGIR 2009), or by a weighted mean of scores, each list
brought to 0..1 (Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval", TOIS 2023).
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.data.words import words_of

# bm25s calls JAX on import, where it is installed, and JAX takes three quarters of a GPU's memory at its first call, in
# each process that runs. What is used here is NumPy's. None: as if it were not installed.
_uses_jax = "jax" in sys.modules
if not _uses_jax:
    sys.modules["jax"] = None  # type: ignore[assignment]
import bm25s  # noqa: E402

if not _uses_jax:
    del sys.modules["jax"]

logging.getLogger("bm25s").setLevel(logging.WARNING)  # its import sets DEBUG

K1, B = 0.9, 0.4
WORDS = 2
"""Version of what a word is; 1 was `\\w+`, which tears vowel signs and takes a Japanese title for one word."""


class Bm25:
    """An index of N item texts, numbered in their order."""

    def __init__(self, texts: Iterable[str], k1: float = K1, b: float = B) -> None:
        self._words: dict[str, int] = {}
        items: list[list[int]] = []
        for text in texts:
            items.append([self._words.setdefault(word, len(self._words)) for word in words_of(text)])
        self.num_items = len(items)
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene", dtype="float64", backend="numpy")
        if self._words:
            self._index.index((items, self._words), create_empty_token=False, show_progress=False)

    def search(self, queries: Sequence[str], k: int) -> tuple[Float64s, Int64s]:
        """Scores and item numbers [Q, k] of the best items of each query, best first, ties by number.

        An item is found when it has a word in common with the query; where fewer than k are, the score is 0 and the
        item -1. The answer of a query depends on nothing but the query and the items.
        """
        scores, items = np.zeros((len(queries), k)), np.full((len(queries), k), -1, dtype=np.int64)
        for row, query in enumerate(queries):
            every = self.scores(query)
            found = best_of(every, k)
            scores[row, : len(found)], items[row, : len(found)] = every[found], found
        return scores, items

    def scores(self, query: str) -> Float64s:
        """Of all items, [N]; 0 for those that have no word in common with the query."""
        words = [self._words[word] for word in words_of(query) if word in self._words]
        every: Float64s = self._index.get_scores_from_ids(words) if words else np.zeros(self.num_items)
        return every


def best_of(every: Float64s, k: int) -> Int64s:
    """The items of the k best scores above 0, best first, ties by number; fewer where there are not so many."""
    items = np.flatnonzero(every)
    scores = every[items]
    if len(items) > k:
        chosen = scores >= np.partition(scores, len(scores) - k)[len(scores) - k]
        scores, items = scores[chosen], items[chosen]
    return items[np.argsort(-scores, kind="stable")[:k]]  # items ascend, so ties go by number


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

    @property
    def is_empty(self) -> Bools:
        """[Q]: the queries for which nothing was found."""
        empty: Bools = self.items[:, 0] < 0
        return empty


MANY_EMPTY = 0.5
"""Of queries: a search by words that finds nothing for more of them is no comparison."""


def nothing_found(empty: int, queries: int, items: str) -> str:
    """`12 of 20 queries share no word with any item`, for more than half of the queries; else an empty text."""
    return f"{empty:,} of {queries:,} queries share no word with any {items}" if empty > MANY_EMPTY * queries else ""


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
