"""The temperature that is fitted to logits, and what it must leave as it is."""

from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from pipeline.evaluate.metrics.labels import MIN_FITTED, best_threshold, calibration_error, fit_temperature
from pipeline.evaluate.metrics.scored_rows import QueryGroups, ScoredRows, value_of
from pipeline.evaluate.score import to_probabilities


def drawn(num_labels: int, factor: float, rows: int = 4000, seed: int = 3) -> tuple[Any, Any]:
    """Logits that are `factor` times as large as those that the labels were drawn from."""
    generator = np.random.default_rng(seed)
    true = generator.normal(size=(rows, num_labels)) * 2
    sums = to_probabilities(true.astype(np.float32)).cumsum(axis=1)
    label = np.minimum((sums < generator.random((rows, 1))).sum(axis=1), num_labels - 1)
    return (true * factor).astype(np.float32), label


def rows_of(logits: Any, label: Any, temperature: float) -> ScoredRows:
    num_labels = logits.shape[1]
    names, gains = tuple(map(str, range(num_labels))), tuple(map(float, range(num_labels)))
    numbers = np.arange(len(label))
    return ScoredRows(numbers, label, np.zeros(len(label)), to_probabilities(logits / temperature), names, gains)


def ece(rows: ScoredRows) -> float:
    return value_of(calibration_error(QueryGroups.of(rows.query_id), rows.label, rows.probabilities))


@pytest.mark.parametrize("num_labels", [2, 4])
@pytest.mark.parametrize("factor", [0.3, 1.0, 5.0])
def test_the_factor_of_the_logits_is_found_and_the_error_goes(num_labels: int, factor: float) -> None:
    logits, label = drawn(num_labels, factor)
    temperature = fit_temperature(logits, label)
    assert temperature == pytest.approx(factor, rel=0.06)
    other_logits, other_label = drawn(num_labels, factor, seed=4)
    before, after = rows_of(other_logits, other_label, 1.0), rows_of(other_logits, other_label, temperature)
    assert ece(after) < 0.03
    if factor != 1.0:
        assert ece(before) > ece(after) + 0.05
    # The most probable label and, with two labels, the rows that reach the best threshold stay the same.
    assert np.array_equal(before.probabilities.argmax(axis=1), after.probabilities.argmax(axis=1))
    if num_labels == 2:
        matches = [rows.probabilities[:, 1] >= best_threshold(rows) for rows in (before, after)]
        assert np.array_equal(matches[0], matches[1])


@pytest.mark.parametrize("num_labels", [2, 3])
def test_no_other_temperature_has_a_lower_loss(num_labels: int) -> None:
    logits, label = drawn(num_labels, 2.5, rows=300)
    target = np.eye(num_labels)[label] + 1 / (len(label) * num_labels)  # one more row, of any label
    target /= target.sum(axis=1, keepdims=True)

    def loss(log_temperature: float) -> float:
        found: float = -(np.log(to_probabilities(logits / np.exp(log_temperature))) * target).mean()
        return found

    best = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-9})
    assert fit_temperature(logits, label) == pytest.approx(np.exp(best.x), abs=2e-4)


LOGITS, LABEL = drawn(2, 3.0, rows=MIN_FITTED)


@pytest.mark.parametrize(
    ("logits", "label"),
    [
        (LOGITS[1:], LABEL[1:]),
        (LOGITS, np.where(np.arange(MIN_FITTED) == 7, -1, LABEL)),
        (LOGITS, np.ones_like(LABEL)),
        (np.where(np.arange(2 * MIN_FITTED).reshape(-1, 2) == 9, np.nan, LOGITS), LABEL),
        (np.where(np.arange(2 * MIN_FITTED).reshape(-1, 2) == 9, np.inf, LOGITS), LABEL),
        (np.ones_like(LOGITS), LABEL),
    ],
    ids=["too few", "too few with a label", "one label", "NaN", "infinite", "all the same"],
)
def test_nothing_is_fitted_where_it_would_mean_nothing(logits: Any, label: Any) -> None:
    assert fit_temperature(LOGITS, LABEL) != 1.0
    assert fit_temperature(logits, label) == 1.0


def test_rows_without_a_label_do_not_count() -> None:
    noise = np.random.default_rng(1).normal(size=(50, 2)).astype(np.float32)
    noise[0] = np.nan
    together = np.concatenate([noise, LOGITS]), np.concatenate([np.full(50, -1), LABEL])
    assert fit_temperature(*together) == fit_temperature(LOGITS, LABEL)


def test_a_model_without_a_mistake_does_not_become_infinitely_sure() -> None:
    label = np.arange(400) % 2
    logits = (np.eye(2)[label] * 4).astype(np.float32)
    confidence = to_probabilities(logits / fit_temperature(logits, label)).max(axis=1)
    assert confidence == pytest.approx(1 - 0.5 / 401, abs=1e-5)  # half of one more row is a mistake
