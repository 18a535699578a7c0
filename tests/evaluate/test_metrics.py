"""Metrics of labels and probabilities against scikit-learn, to 1e-9."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    log_loss,
    precision_score,
    recall_score,
    roc_auc_score,
)

from pipeline.core.errors import DataError
from pipeline.evaluate.config import MetricName, MetricsConfig
from pipeline.evaluate.metrics.labels import best_threshold, calibration_error
from pipeline.evaluate.metrics.measure import metric_names, metric_report, slice_reports
from pipeline.evaluate.metrics.scored_rows import QueryGroups, ScoredRows, SliceColumn, value_of
from pipeline.evaluate.score import HoldoutFigures, figures
from tests.evaluate.holdouts import holdout, holdouts

NUM_CLASSES = 4
PAIRS = st.lists(st.tuples(st.integers(0, NUM_CLASSES - 1), st.integers(0, NUM_CLASSES - 1)), min_size=1, max_size=40)
EXACT = 1e-9


def value(rows: ScoredRows, name: str) -> float:
    return metric_report(rows, MetricsConfig()).values[name]


def calibration(rows: ScoredRows, num_bins: int) -> float:
    return value_of(calibration_error(QueryGroups.of(rows.query_id), rows.label, rows.probabilities, num_bins))


def reached(label: Sequence[int], predicted: Sequence[int], num_classes: int) -> HoldoutFigures:
    """What training reports of rows whose labels and predictions are these."""
    size = len(label)
    logits = np.eye(num_classes, dtype=np.float32)[np.array(predicted, dtype=np.int64)]
    rows = {"logits": logits, "label": np.array(label), "gain": np.zeros(size), "query_id": np.zeros(size)}
    return figures(rows, tuple(range(num_classes)))


@given(PAIRS)
def test_figures_of_training_are_those_of_scikit_learn(pairs: list[tuple[int, int]]) -> None:
    label, predicted = np.array(pairs).T
    seen = reached(label, predicted, NUM_CLASSES)
    by_class = f1_score(label, predicted, labels=range(NUM_CLASSES), average=None, zero_division=0)
    assert seen.accuracy == pytest.approx(accuracy_score(label, predicted))
    assert seen.macro_f1 == pytest.approx(f1_score(label, predicted, average="macro", zero_division=0))
    assert seen.positive_f1 == pytest.approx(by_class[-1])


@given(holdouts())
def test_labels_and_loss_are_those_of_scikit_learn(rows: ScoredRows) -> None:
    report = metric_report(rows, MetricsConfig())
    labelled = rows.label >= 0
    label, probabilities = rows.label[labelled], rows.probabilities[labelled]
    if not labelled.any():
        for name in ("accuracy", "macro_f1", "micro_f1", "ece", "loss"):
            assert report.missing[name] == "no row has a label"
        return
    predicted, classes = probabilities.argmax(axis=1), range(len(rows.labels))
    by_label = f1_score(label, predicted, labels=classes, average=None, zero_division=0)
    assert report.values["accuracy"] == pytest.approx(accuracy_score(label, predicted), abs=EXACT)
    assert report.values["micro_f1"] == pytest.approx(
        f1_score(label, predicted, labels=classes, average="micro"), abs=EXACT
    )
    assert report.values["macro_f1"] == pytest.approx(f1_score(label, predicted, average="macro"), abs=EXACT)
    assert report.values["loss"] == pytest.approx(log_loss(label, probabilities, labels=classes), abs=EXACT)
    for place, name in enumerate(rows.labels):
        if place in label or place in predicted:
            assert report.values[f"f1:{name}"] == pytest.approx(by_label[place], abs=EXACT)
        else:
            assert report.missing[f"f1:{name}"] == f"no row is labelled or predicted {name}"


@given(holdouts(), st.sampled_from([1, 2, 4, 10, 15]))
def test_calibration_error_is_that_of_scikit_learns_curve(rows: ScoredRows, num_bins: int) -> None:
    labelled = rows.label >= 0
    if not labelled.any():
        return
    confidence = np.minimum(rows.probabilities[labelled].max(axis=1), 1.0)
    right = rows.probabilities[labelled].argmax(axis=1) == rows.label[labelled]
    share, mean = calibration_curve(right, confidence, n_bins=num_bins, pos_label=True)  # of bins that hold rows
    edges = np.linspace(0, 1, num_bins + 1)
    size = [((confidence > low) & (confidence <= high)).sum() for low, high in pairwise(edges)]
    count = np.array([rows for rows in size if rows])
    expected = (np.abs(share - mean) * count).sum() / count.sum()
    seen = calibration(rows, num_bins)
    assert seen == pytest.approx(expected, abs=EXACT)


def test_a_confidence_at_an_edge_belongs_to_the_lower_bin() -> None:
    rows = holdout([1, 2, 3, 4], [0, 1, 1, 0], [[0.5, 0.5], [0.25, 0.75], [0.25, 0.75], [0.75, 0.25]])
    # Bins (0.25, 0.5] and (0.5, 0.75]; the first label of equal ones is taken, so that the first row is right.
    assert calibration(rows, 4) == pytest.approx((0.5 + 3 * 0.25) / 4, abs=EXACT)
    sure = holdout([1], [1], [[0.0, 1.0]])
    assert value(sure, "ece") == 0.0


def test_loss_of_a_sure_mistake_is_bounded_as_in_scikit_learn() -> None:
    rows = holdout([1], [0], [[0.0, 1.0]])
    assert value(rows, "loss") == pytest.approx(log_loss([0], [[0.0, 1.0]], labels=[0, 1]), abs=EXACT)
    assert value(rows, "loss") == pytest.approx(36.0436533891, abs=1e-8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_named_and_never_a_figure(bad: float) -> None:
    rows = holdout([1, 1, 2], [1, 0, 1], [[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]])
    broken = rows.probabilities.copy()
    broken[1, 0] = bad
    report = metric_report(replace(rows, probabilities=broken), MetricsConfig(), 0.5)
    assert report.values == {}
    assert set(report.missing.values()) == {"1 of 3 rows have NaN or infinite scores"}


@given(holdouts(), st.none() | st.floats(0.0, 1.0), st.none() | st.sampled_from([0.1, 0.7, 1.0]))
def test_every_metric_is_a_finite_value_or_missing_with_a_reason(
    rows: ScoredRows, threshold: float | None, relevant_gain: float | None
) -> None:
    config = MetricsConfig(relevant_gain=relevant_gain)
    report = metric_report(rows, config, threshold)
    names = metric_names(rows.labels, config)
    assert sorted([*report.values, *report.missing]) == sorted(names)
    assert all(math.isfinite(found) for found in report.values.values())
    assert all(0 <= found <= 1 + EXACT for name, found in report.values.items() if name != "loss")
    assert all(report.missing.values())


def test_a_label_may_hold_any_sign() -> None:
    labels = ("other", "match@top:1")
    rows = replace(holdout([1, 1], [1, 0], [[0.1, 0.9], [0.8, 0.2]]), labels=labels)
    assert MetricName.parse("f1:match@top:1").label == "match@top:1"
    for name in ("ndcg@3:x", "f1@3:x"):
        with pytest.raises(ValueError, match="unknown metric"):
            MetricName.parse(name)
    assert metric_report(rows, MetricsConfig()).values["f1:match@top:1"] == 1.0


@pytest.mark.parametrize(
    "name", ["", "ndcg", "ndcg@", "ndcg@0", "ndcg@-1", "ndcg@1.5", "ndcg@\u0661", "mrr@3", "accuracy:x", "f1:", "auc"]
)
def test_names_of_no_metric_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown metric"):
        MetricName.parse(name)


def test_slices_have_their_own_metrics_and_number_of_queries() -> None:
    rows = holdout([1, 1, 2, 3], [1, 0, 1, 0], [[0.1, 0.9], [0.8, 0.2], [0.9, 0.1], [0.9, 0.1]])
    column = SliceColumn(np.array([2, 2, 0, -1]), ("shoes", "hats", "cameras"))
    rows = replace(rows, slices={"category": column, "nothing": SliceColumn(np.full(4, -1), ())})
    found = {(one.column, one.value): one.report for one in slice_reports(rows, MetricsConfig())}
    assert list(found) == [("category", "shoes"), ("category", "cameras")]
    assert found["category", "cameras"].values["accuracy"] == 1.0
    assert found["category", "shoes"].values["accuracy"] == 0.0
    assert found["category", "shoes"].num_queries == 1
    assert found["category", "shoes"].missing["roc_auc"] == "rows of both labels are needed"


# Two labels.


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
        with pytest.raises(DataError, match="cannot choose a threshold"):
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


# What all metrics read.


def test_equal_rows_have_equal_relevance_wherever_they_stand() -> None:
    """A matrix product may round rows at the end of a block differently, and break a tie."""
    many = holdout([1] * 1003, [0] * 1003, [[0.1, 0.2, 0.3, 0.7]] * 1003)
    assert len(np.unique(many.relevance)) == 1


def test_a_part_keeps_what_belongs_to_its_rows() -> None:
    rows = holdout([3, 3, 1], [1, 0, -1], [[0.1, 0.9], [0.8, 0.2], [0.4, 0.6]])
    rows = replace(rows, slices={"a": SliceColumn(np.array([0, 1, -1]), ("x", "y"))})
    part = rows.select(np.array([False, True, True]))
    assert (part.num_rows, part.num_queries, rows.num_queries) == (2, 2, 2)
    assert (part.label.tolist(), part.slices["a"].codes.tolist()) == ([0, -1], [1, -1])
