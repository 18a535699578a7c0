"""Okapi BM25 over the texts of a catalogue: the lexical search that embeddings are held against.

Scored by bm25s, in the form of Lucene (Kamphuis et al. 2020, "Which BM25 do you mean?"): idf = ln(1 + (N - n + 0.5) /
(n + 0.5)), which is never negative, and no factor k1 + 1; k1 and b as in Anserini. Words are runs of letters, digits
and underscores in lower case, with no stemming and no stop words. Which items are best is chosen here: bm25s takes any
of equal ones.

Memory: about 60 bytes for each different word of an item (200 while the index is built), and 8 bytes an item for the
query at hand, however many queries there are.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import bm25s
import numpy as np

from pipeline.core.arrays import Float64s, Int64s

K1, B = 0.9, 0.4
_WORD = re.compile(r"\w+")


class Bm25:
    """An index of N item texts, numbered in their order."""

    def __init__(self, texts: Iterable[str], k1: float = K1, b: float = B) -> None:
        self._words: dict[str, int] = {}
        items = [[self._words.setdefault(word, len(self._words)) for word in _words(text)] for text in texts]
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
        words = [self._words[word] for word in _words(query) if word in self._words]
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


def _words(text: str) -> Iterator[str]:
    return (found.group() for found in _WORD.finditer(text.lower()))
