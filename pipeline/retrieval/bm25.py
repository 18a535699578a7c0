"""Search with words (BM25). Pure.

Words are scored by bm25s, in the form of Lucene (Kamphuis et al. 2020, "Which BM25 do you mean?"): idf = ln(1 + (N - n
+ 0.5) / (n + 0.5)), which is never negative, and no factor k1 + 1; k1 and b as in Anserini. Words are those of
data/lexical.py, without stemming or stop words. The best items are chosen here, because bm25s takes any of equal ones.

Memory: about 60 bytes for each different word of an item (200 while the index is built), and 8 bytes an item for the
query at hand.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipeline.core.arrays import Float64s, Int64s
from pipeline.data.lexical import words_of

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
MANY_EMPTY = 0.5
"""Share of the queries: a search by words that finds nothing for more of them is no comparison."""


class Bm25:
    """An index of N item texts, numbered in their order."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._words: dict[str, int] = {}
        items: list[list[int]] = []
        for text in texts:
            items.append([self._words.setdefault(word, len(self._words)) for word in words_of(text)])
        self.num_items = len(items)
        self._index = bm25s.BM25(k1=K1, b=B, method="lucene", dtype="float64", backend="numpy")
        if self._words:
            self._index.index((items, self._words), create_empty_token=False, show_progress=False)

    def search(
        self, queries: Sequence[str], k: int, each: Callable[[int, Float64s], None] = lambda row, scores: None
    ) -> tuple[Float64s, Int64s]:
        """Return scores and item numbers [Q, k] of the best items of each query, best first, ties by number.

        An item is found if it shares a word with the query; after the last one the score is 0 and the item -1.
        `each` is called with the number of every query and its scores of all items [N].
        """
        scores, items = np.zeros((len(queries), k)), np.full((len(queries), k), -1, dtype=np.int64)
        for row, query in enumerate(queries):
            words = [self._words[word] for word in words_of(query) if word in self._words]
            every: Float64s = self._index.get_scores_from_ids(words) if words else np.zeros(self.num_items)
            each(row, every)
            found = np.flatnonzero(every)
            if len(found) > k:  # those as good as the k-th best, ties by number
                found = found[every[found] >= np.partition(every[found], len(found) - k)[len(found) - k]]
            found = found[np.argsort(-every[found], kind="stable")[:k]]
            scores[row, : len(found)], items[row, : len(found)] = every[found], found
        return scores, items


def nothing_found(empty: int, queries: int, items: str) -> str:
    """Return `12 of 20 queries share no word with any item` if it is more than half of the queries, else nothing."""
    return f"{empty:,} of {queries:,} queries share no word with any {items}" if empty > MANY_EMPTY * queries else ""
