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
from sklearn.metrics import accuracy_score, f1_score, log_loss

from pipeline.evaluate.config import MetricName, MetricsConfig
from pipeline.evaluate.metrics.labels import calibration_error
from pipeline.evaluate.metrics.measure import metric_names, metric_report, slice_reports
from pipeline.evaluate.metrics.scored_rows import Queries, ScoredRows, SliceColumn, value_of
from pipeline.evaluate.score import HoldoutFigures, figures
from tests.evaluate.holdouts import holdout, holdouts

NUM_CLASSES = 4
PAIRS = st.lists(st.tuples(st.integers(0, NUM_CLASSES - 1), st.integers(0, NUM_CLASSES - 1)), min_size=1, max_size=40)
EXACT = 1e-9


def value(rows: ScoredRows, name: str) -> float:
    return metric_report(rows, MetricsConfig()).values[name]


def calibration(rows: ScoredRows, num_bins: int) -> float:
    return value_of(calibration_error(Queries.of(rows.query_id), rows.label, rows.probabilities, num_bins))


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
        with pytest.raises(ValueError, match="no metric is called"):
            MetricName.parse(name)
    assert metric_report(rows, MetricsConfig()).values["f1:match@top:1"] == 1.0


@pytest.mark.parametrize(
    "name", ["", "ndcg", "ndcg@", "ndcg@0", "ndcg@-1", "ndcg@1.5", "ndcg@\u0661", "mrr@3", "accuracy:x", "f1:", "auc"]
)
def test_names_of_no_metric_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no metric is called"):
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
    assert found["category", "shoes"].missing["roc_auc"] == "labelled rows of both labels are needed"
