"""Hybrid search against the definitions, written out item by item."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.retrieval.search import WEIGHTS, Ranked, best_weight, fuse_by_rank, fuse_by_weight

K = 5
lists = st.lists(st.tuples(st.integers(0, 8), st.integers(-3, 3)), max_size=K, unique_by=lambda pair: pair[0])


def ranked(*queries: list[tuple[int, int]]) -> Ranked:
    """Lists of (item, score), best first."""
    items, scores = np.full((len(queries), K), -1, dtype=np.int64), np.zeros((len(queries), K))
    for row, pairs in enumerate(queries):
        for place, (item, score) in enumerate(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))):
            items[row, place], scores[row, place] = item, score
    return Ranked(items, scores)


def best_of(total: dict[int, float]) -> list[int]:
    found = sorted(total, key=lambda item: (-round(total[item], 12), item))[:K]
    return [*found, *[-1] * (K - len(found))]


def units(items: list[int], scores: list[float]) -> dict[int, float]:
    there = [(item, score) for item, score in zip(items, scores, strict=True) if item >= 0]
    low, high = min((score for _, score in there), default=0), max((score for _, score in there), default=0)
    return {item: (score - low) / (high - low) if high > low else 1.0 for item, score in there}


@given(lists, lists)
def test_reciprocal_ranks(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    one, other = ranked(left, right), ranked(right, left)
    found = fuse_by_rank(one, other)
    for row in range(2):
        total: dict[int, float] = {}
        for side in (one, other):
            for place, item in enumerate(side.items[row].tolist()):
                if item >= 0:
                    total[item] = total.get(item, 0.0) + 1 / (60 + place + 1)
        assert found[row].tolist() == best_of(total)


@given(lists, lists, st.sampled_from(WEIGHTS))
def test_weighted_scores(left: list[tuple[int, int]], right: list[tuple[int, int]], weight: float) -> None:
    vectors, words = ranked(left), ranked(right)
    total: dict[int, float] = {}
    for side, share in ((vectors, weight), (words, 1 - weight)):
        for item, unit in units(side.items[0].tolist(), side.scores[0].tolist()).items():
            total[item] = total.get(item, 0.0) + share * unit
    found = fuse_by_weight(vectors, words, weight)[0]
    assert sorted(found[found >= 0].tolist()) == sorted(set(found.tolist()) - {-1}), "each item once"
    scores = [total[item] for item in found[found >= 0].tolist()]
    expected = [total[item] for item in best_of(total) if item >= 0]
    assert scores == pytest.approx(expected)


def test_the_weight_with_the_best_quality() -> None:
    vectors, words = ranked([(1, 7), (2, 2), (9, 0)]), ranked([(2, 7), (3, 2), (8, 0)])
    # Item 1 has w, item 2 has w 2/7 + 1 - w: the first wins above 7/12.
    assert best_weight(vectors, words, lambda items: float(items[0, 0] == 1)) == 0.6
    assert best_weight(vectors, words, lambda items: 1.0) == 0.5, "none is better: both count the same"
    assert best_weight(vectors, words, lambda items: -float(items[0, 0] == 1)) == 0.5
