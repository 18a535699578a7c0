"""Okapi BM25 over a small catalogue: the lexical search that embeddings are held against."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_WORD = re.compile(r"\w+")


class BM25:
    """Robertson and Zaragoza 2009 with the idf that is never negative (as in Lucene); k1 and b as in Anserini."""

    def __init__(self, titles: Sequence[str], k1: float = 0.9, b: float = 0.4) -> None:
        self.size = len(titles)
        counts = [Counter(_WORD.findall(title.lower())) for title in titles]
        lengths = np.array([sum(count.values()) for count in counts], dtype=np.float64)
        norm = k1 * (1 - b + b * lengths / max(1.0, lengths.mean()))
        found: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for item, count in enumerate(counts):
            for word, times in count.items():
                found[word].append((item, times))
        self._postings: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}
        for word, pairs in found.items():
            items, occurs = (np.array(column) for column in zip(*pairs, strict=True))
            idf = np.log(1 + (self.size - len(items) + 0.5) / (len(items) + 0.5))
            self._postings[word] = (items, idf * occurs * (k1 + 1) / (occurs + norm[items]))

    def best(self, query: str, k: int) -> npt.NDArray[np.int64]:
        """The `k` best items, ties by number; -1 after the last with a word in common."""
        scores = np.zeros(self.size)
        for word in _WORD.findall(query.lower()):
            if word in self._postings:
                items, weights = self._postings[word]
                scores[items] += weights
        order = np.lexsort((np.arange(self.size), -scores))[:k]
        return np.where(scores[order] > 0, order, -1)
