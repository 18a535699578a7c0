"""BM25 against its formula, written out for each pair."""

import math
import re

import numpy as np

from bench.bm25 import BM25

TITLES = ["red shoe", "Red red shoe, size 42", "blue hat", "", "shoe"]


def score(query: str, title: str, k1: float = 0.9, b: float = 0.4) -> float:
    split = [re.findall(r"\w+", text.lower()) for text in TITLES]
    words, mean = re.findall(r"\w+", title.lower()), sum(map(len, split)) / len(split)
    total = 0.0
    for word in re.findall(r"\w+", query.lower()):
        holding = sum(word in one for one in split)
        idf = math.log(1 + (len(TITLES) - holding + 0.5) / (holding + 0.5))
        times = words.count(word)
        total += idf * times * (k1 + 1) / (times + k1 * (1 - b + b * len(words) / mean))
    return total


def test_the_order_is_that_of_the_formula() -> None:
    index = BM25(TITLES)
    for query in ("red shoe", "shoe", "hat blue blue", "nothing"):
        scores = [score(query, title) for title in TITLES]
        expected = sorted(range(len(TITLES)), key=lambda item: (-scores[item], item))
        found = index.best(query, len(TITLES)).tolist()
        assert found == [item if scores[item] > 0 else -1 for item in expected]
    assert index.best("shoe", 1).tolist() == [int(np.argmax([score("shoe", title) for title in TITLES]))]
