"""Metrics of two labels against scikit-learn, to 1e-9."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, f1_score, precision_score, recall_score, roc_auc_score

from pipeline.core.errors import DataError
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.metrics.labels import best_threshold
from pipeline.evaluate.metrics.measure import metric_report
from pipeline.evaluate.metrics.scored_rows import ScoredRows
from tests.evaluate.holdouts import holdout, holdouts

EXACT = 1e-9


def two(label: list[int], score: list[float]) -> ScoredRows:
    return holdout(list(range(len(label))), label, [[1 - one, one] for one in score])


@given(holdouts(num_labels=2), st.floats(0.0, 1.0))
def test_two_labels_are_those_of_scikit_learn(rows: ScoredRows, threshold: float) -> None:
    report = metric_report(rows, MetricsConfig(), threshold)
    labelled = rows.label >= 0
    label, score = rows.label[labelled], rows.probabilities[labelled, 1]
    called = score >= threshold
    oracles = {
        "precision": (precision_score, called.any()),
        "recall": (recall_score, label.any()),
        "f1": (f1_score, called.any() or label.any()),
    }
    for name, (oracle, defined) in oracles.items():
        if labelled.any() and defined:
            assert report.values[name] == pytest.approx(oracle(label, called, zero_division=0), abs=EXACT)
        else:
            assert name in report.missing
    if label.any():
        wanted = average_precision_score(label, score)
        assert report.values["average_precision"] == pytest.approx(wanted, abs=EXACT)
    else:
        assert "average_precision" in report.missing
    if label.any() and not label.all():
        assert report.values["roc_auc"] == pytest.approx(roc_auc_score(label, score), abs=EXACT)
    else:
        assert "roc_auc" in report.missing


@given(holdouts(num_labels=2))
def test_no_threshold_has_a_better_f1(rows: ScoredRows) -> None:
    label, score = rows.label[rows.label >= 0], rows.probabilities[rows.label >= 0, 1]
    if not label.any():
        with pytest.raises(DataError, match="a threshold cannot be chosen"):
            best_threshold(rows)
        return
    seen = best_threshold(rows)
    f1 = {one: f1_score(label, score >= one) for one in np.unique(score)}
    assert f1_score(label, score >= seen) == max(f1.values())
    highest = max(one for one, found in f1.items() if found == max(f1.values()))
    assert ((score >= seen) == (score >= highest)).all()  # of equal ones the highest


def test_a_threshold_lies_half_way_to_the_next_score() -> None:
    assert best_threshold(two([0, 0, 1, 1], [0.1, 0.2, 0.6, 0.9])) == pytest.approx(0.4)
    assert best_threshold(two([1, 1], [0.4, 0.6])) == pytest.approx(0.2)
    assert best_threshold(two([1], [0.0])) == 0.0


def test_of_two_thresholds_with_equal_f1_the_higher_is_taken() -> None:
    """1 of 1 right, or 2 of 4: F1 is 2/3 in both."""
    assert best_threshold(two([1, 0, 0, 1], [0.8, 0.6, 0.4, 0.2])) == pytest.approx(0.7)


def test_a_threshold_between_neighbouring_floats_still_parts_them() -> None:
    low = 0.5
    high = float(np.nextafter(low, 1.0))
    rows = two([0, 1], [low, high])
    assert rows.probabilities[0, 1] < rows.probabilities[1, 1]
    assert metric_report(rows, MetricsConfig(), best_threshold(rows)).values["f1"] == 1.0


def test_what_cannot_have_a_threshold() -> None:
    with pytest.raises(DataError, match="two labels"):
        best_threshold(holdout([1], [2], [[0.2, 0.3, 0.5]]))
    rows = two([0, 1], [0.1, 0.9])
    broken = ScoredRows(rows.query_id, rows.label, rows.gain, np.full((2, 2), np.nan), rows.labels, rows.label_gains)
    with pytest.raises(DataError, match="2 of 2 rows have NaN"):
        best_threshold(broken)


def test_without_a_threshold_the_metrics_at_it_are_missing() -> None:
    report = metric_report(two([0, 1], [0.1, 0.9]), MetricsConfig())
    assert {name for name, why in report.missing.items() if why == "no threshold was chosen on the valid split"} == {
        "precision",
        "recall",
        "f1",
    }


def test_more_labels_have_no_metrics_of_two() -> None:
    report = metric_report(holdout([1], [2], [[0.2, 0.3, 0.5]]), MetricsConfig())
    assert not {"roc_auc", "f1", "average_precision"} & {*report.values, *report.missing}
