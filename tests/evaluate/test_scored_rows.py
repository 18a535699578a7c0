"""Scored rows: what does not fit is refused before anything is computed from it."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.evaluate.metrics.scored_rows import ScoredRows, SliceColumn
from tests.evaluate.holdouts import holdout


@pytest.fixture
def rows() -> ScoredRows:
    return holdout([3, 3, 1], [1, 0, -1], [[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]])


def test_scores_that_are_not_finite_are_found_not_refused(rows: ScoredRows) -> None:
    table = np.array([[np.nan, 0.5], [0.5, 0.5], [np.inf, -np.inf]])
    assert replace(rows, probabilities=table).unusable.tolist() == [True, False, True]


def test_equal_rows_have_equal_relevance_wherever_they_stand() -> None:
    """A matrix product may round rows at the end of a block differently, and break a tie."""
    many = holdout([1] * 1003, [0] * 1003, [[0.1, 0.2, 0.3, 0.7]] * 1003)
    assert len(np.unique(many.relevance)) == 1


def test_a_part_keeps_what_belongs_to_its_rows(rows: ScoredRows) -> None:
    rows = replace(rows, slices={"a": SliceColumn(np.array([0, 1, -1]), ("x", "y"))})
    part = rows.select(np.array([False, True, True]))
    assert (part.num_rows, part.num_queries, rows.num_queries) == (2, 2, 2)
    assert (part.label.tolist(), part.slices["a"].codes.tolist()) == ([0, -1], [1, -1])
