"""Search by words with BM25.

Scores are computed by bm25s in Lucene's variant (Kamphuis et al. 2020, "Which BM25 do you mean?"): idf = ln(1 + (N - n
+ 0.5) / (n + 0.5)), which is never negative, without the factor k1 + 1, and with k1 and b as in Anserini. Words are
those of data/lexical.py, without stemming or stop words. The best items are selected here, because bm25s breaks ties
arbitrarily.

Memory: about 60 bytes for each distinct word of an item (200 while the index is built), and 8 bytes per item for the
current query.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from pipeline.core.arrays import Float64s, Int64s
from pipeline.data.lexical import split_words

# bm25s calls JAX on import if it is installed, and JAX allocates three quarters of a GPU's memory at its first call, in
# every process. Only the NumPy backend is used here, so hide JAX during the import.
_uses_jax = "jax" in sys.modules
if not _uses_jax:
    sys.modules["jax"] = None  # type: ignore[assignment]
import bm25s  # noqa: E402

if not _uses_jax:
    del sys.modules["jax"]

logging.getLogger("bm25s").setLevel(logging.WARNING)  # its import sets DEBUG

K1, B = 0.9, 0.4
WORDS_VERSION = 2  # version 1 was `\w+`, which split off vowel signs and took a Japanese title for one word
_COUNT, _PARAMETERS = "items", "params.index.json"
"""Files of a saved index: the number of items, and a file of bm25s, which is missing if no item has a word."""
MAX_UNMATCHED = 0.5  # search by words is no fair baseline if it finds nothing for a larger share of queries


class Bm25:
    """An index of N item texts, numbered in their order."""

    def __init__(self, texts: Iterable[str] = (), *, saved: Path | None = None) -> None:
        """Index texts, or open a memory-mapped index written by `save`."""
        self._words: dict[str, int] = {}
        self._index = bm25s.BM25(k1=K1, b=B, method="lucene", dtype="float64", backend="numpy")
        if saved is not None:
            self.num_items = int((saved / _COUNT).read_text())
            if self.num_items and (saved / _PARAMETERS).exists():
                self._index = bm25s.BM25.load(str(saved), mmap=True, show_progress=False)
                self._words = self._index.vocab_dict
            return
        items: list[list[int]] = []
        for text in texts:
            items.append([self._words.setdefault(word, len(self._words)) for word in split_words(text)])
        self.num_items = len(items)
        if self._words:
            self._index.index((items, self._words), create_empty_token=False, show_progress=False)

    def save(self, folder: Path) -> None:
        """Write the index to an existing folder."""
        (folder / _COUNT).write_text(str(self.num_items))
        if self._words:
            self._index.save(str(folder), show_progress=False)

    def search(
        self, queries: Sequence[str], k: int, each: Callable[[int, Float64s], None] = lambda row, scores: None
    ) -> tuple[Float64s, Int64s]:
        """Return scores and item numbers [Q, k] of the best items of each query, best first, ties by number.

        An item matches if it shares a word with the query. Lists are padded with score 0 and item -1. `each` is called
        with the index of every query and its scores for all items [N].
        """
        scores, items = np.zeros((len(queries), k)), np.full((len(queries), k), -1, dtype=np.int64)
        for row, query in enumerate(queries):
            word_ids = [self._words[word] for word in split_words(query) if word in self._words]
            all_scores: Float64s = self._index.get_scores_from_ids(word_ids) if word_ids else np.zeros(self.num_items)
            each(row, all_scores)
            matches = np.flatnonzero(all_scores)
            if len(matches) > k:  # keep all items that score at least as high as the k-th best
                threshold = np.partition(all_scores[matches], len(matches) - k)[len(matches) - k]
                matches = matches[all_scores[matches] >= threshold]
            matches = matches[np.argsort(-all_scores[matches], kind="stable")[:k]]
            scores[row, : len(matches)], items[row, : len(matches)] = all_scores[matches], matches
        return scores, items


def unmatched_warning(unmatched: int, queries: int, item: str) -> str:
    """Return a warning if more than half of the queries share no word with any item, else an empty string."""
    if unmatched <= MAX_UNMATCHED * queries:
        return ""
    return f"{unmatched:,} of {queries:,} queries share no word with any {item}"
