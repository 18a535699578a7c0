"""Metrics against scikit-learn."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, ndcg_score

from pipeline.core.errors import DataError
from pipeline.core.metrics import class_figures, ndcg

NUM_CLASSES = 4
PAIRS = st.lists(st.tuples(st.integers(0, NUM_CLASSES - 1), st.integers(0, NUM_CLASSES - 1)), min_size=1, max_size=40)


@settings(deadline=None, max_examples=60)
@given(PAIRS)
def test_class_figures_are_those_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    label, predicted = np.array(pairs).T
    seen = class_figures(label, predicted, NUM_CLASSES)
    by_class = f1_score(label, predicted, labels=range(NUM_CLASSES), average=None, zero_division=0)
    assert seen.accuracy == pytest.approx(accuracy_score(label, predicted))
    assert seen.macro_f1 == pytest.approx(f1_score(label, predicted, average="macro", zero_division=0))
    assert seen.f1_by_class == pytest.approx(by_class)
    assert seen.positive_f1 == pytest.approx(by_class[-1])


def test_one_class_only() -> None:
    seen = class_figures(np.array([1, 1]), np.array([1, 1]), 2)
    assert (seen.accuracy, seen.macro_f1, seen.positive_f1, seen.f1_by_class) == (1.0, 1.0, 1.0, (0.0, 1.0))
    assert class_figures(np.array([0, 0]), np.array([0, 0]), 1).macro_f1 == 1.0


def test_nothing_to_score_is_an_error() -> None:
    with pytest.raises(DataError, match="no labelled rows"):
        class_figures(np.array([], dtype=np.int64), np.array([], dtype=np.int64), 2)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 12))
def test_ndcg_is_that_of_scikit_learn(seed: int, num_queries: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    query = np.repeat(rng.permutation(num_queries) - 3, rng.integers(2, 9, num_queries))  # ids may be negative
    order = rng.permutation(len(query))  # samples of a query need not be neighbours
    query = query[order]
    gain = rng.choice([0.0, 0.01, 0.1, 1.0], len(query))
    score = rng.permutation(len(query)).astype(np.float64)  # no ties
    expected = [
        ndcg_score([gain[query == q]], [score[query == q]], k=k) for q in np.unique(query) if gain[query == q].max() > 0
    ]
    seen = ndcg(query, gain, score, k)
    assert math.isnan(seen) if not expected else seen == pytest.approx(float(np.mean(expected)))


def test_ties_keep_the_input_order() -> None:
    query, score = np.zeros(3, dtype=np.int64), np.zeros(3)
    first, last = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0])
    assert ndcg(query, first, score, 10) == pytest.approx(1.0)
    assert ndcg(query, last, score, 10) == pytest.approx(1 / math.log2(4))
    # Averaged over all orders this is what scikit-learn gives for ties.
    every = [ndcg(query, np.eye(3)[place], score, 10) for place in range(3)]
    assert float(np.mean(every)) == pytest.approx(ndcg_score([[1.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]))


def test_queries_without_gain_do_not_count() -> None:
    query = np.array([1, 1, 2, 2])
    score = np.array([2.0, 1.0, 2.0, 1.0])
    assert ndcg(query, np.array([0.0, 0.0, 1.0, 0.0]), score, 10) == pytest.approx(1.0)
    assert math.isnan(ndcg(query, np.zeros(4), score, 10))
    assert math.isnan(ndcg(query[:0], np.zeros(0), score[:0], 10))
    assert ndcg(query[:1], np.ones(1), score[:1], 10) == 1.0
