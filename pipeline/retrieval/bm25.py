"""Keyword search with BM25.

Scores are computed with the bm25s library. It implements the variant of BM25 that Lucene uses (Kamphuis et al. 2020,
"Which BM25 do you mean?"), in which idf = ln(1 + (N - n + 0.5) / (n + 0.5)) is never negative and the factor k1 + 1 is
omitted. The values of k1 and b are the defaults of Anserini. Texts are split into words as described in
data/lexical.py, without stemming or stop words. The top items are selected here instead of by bm25s, because bm25s
breaks ties arbitrarily.

The index needs about 60 bytes of memory for each distinct word of an item (200 bytes while it is being built). A search
needs 8 bytes per item.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from pipeline.core.arrays import Float64s, Int64s
from pipeline.data.lexical import split_words

# If JAX is installed, bm25s calls it on import, and JAX allocates three quarters of the GPU memory on its first call in
# every process. Since only the NumPy backend is used here, hide JAX during the import.
_uses_jax = "jax" in sys.modules
if not _uses_jax:
    sys.modules["jax"] = None  # type: ignore[assignment]
import bm25s  # noqa: E402

if not _uses_jax:
    del sys.modules["jax"]

logging.getLogger("bm25s").setLevel(logging.WARNING)  # bm25s sets its log level to DEBUG on import

K1, B = 0.9, 0.4
WORDS_VERSION = 2  # version 1 used `\w+`, which split off vowel signs and treated a Japanese title as a single word
_COUNT, _PARAMETERS = "items", "params.index.json"
"""Files of a saved index. The former contains the number of items. The latter is written by bm25s, and is missing if
none of the items contains a word."""
MAX_UNMATCHED = 0.5  # BM25 is not a fair baseline if it does not match anything for a larger fraction of the queries


class Bm25:
    """A BM25 index of texts, in which each text is identified by its position."""

    def __init__(self, texts: Iterable[str] = (), *, saved: Path | None = None) -> None:
        """Index texts, or memory-map an index that was written by `save`."""
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
        """Return the scores [Q, k] and the numbers [Q, k] of the top items for each query, best first.

        An item matches if it has a word in common with the query. If fewer than k items match, the lists are padded
        with score 0 and item -1. Ties are broken by item number. `each` is called for every query, with its index and
        its scores for all items.
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
    """Return a warning if most queries do not have any word in common with any item, otherwise an empty string."""
    if unmatched <= MAX_UNMATCHED * queries:
        return ""
    return f"{unmatched:,} of {queries:,} queries have no word in common with any {item}"
