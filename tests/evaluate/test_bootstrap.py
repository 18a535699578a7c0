"""The paired bootstrap: right standard errors, the same draws for the same seed, honest ends."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import bootstrap, t

from pipeline.core.arrays import Float64s, Int64s
from pipeline.evaluate.config import MetricName, MetricsConfig
from pipeline.evaluate.gate import compare as module
from pipeline.evaluate.gate.compare import PairedDifference, paired_bootstrap, t_quantile
from pipeline.evaluate.metrics.measure import Measured, RowMetrics
from pipeline.evaluate.metrics.scored_rows import ScoredRows, mean_over_queries
from tests.evaluate.holdouts import holdouts

NAMES = ("accuracy", "macro_f1", "f1:exact", "ndcg@5", "mrr", "recall@1", "precision@1", "ece", "loss")
NAMES_OF_TWO = ("precision", "recall", "f1", "roc_auc", "average_precision")


def difference(values: Float64s, *, resamples: int = 2000, seed: int = 1, purpose: str = "test") -> PairedDifference:
    """Of a mean over queries whose incumbent is 0 everywhere."""
    pair = (mean_over_queries(values), mean_over_queries(np.zeros(len(values))))
    return paired_bootstrap({"mean": pair}, resamples=resamples, seed=seed, purpose=purpose)["mean"]


def repeated(rows: ScoredRows, times: Int64s) -> ScoredRows:
    """Each query as often as `times` says, each time as a query of its own."""
    index = np.searchsorted(np.unique(rows.query_id), rows.query_id)
    taken = [(row, copy) for row, query in enumerate(index) for copy in range(times[query])]
    row = np.array([one for one, _ in taken], dtype=np.int64)
    query = np.array([index[one] * 100 + copy for one, copy in taken], dtype=np.int64)
    return ScoredRows(query, rows.label[row], rows.gain[row], rows.probabilities[row], rows.labels, rows.label_gains)


@given(st.data())
def test_a_weighted_metric_is_that_of_the_repeated_queries(data: st.DataObject) -> None:
    """What the bootstrap computes with weights is what the metric is on the resampled holdout, for every metric."""
    rows = data.draw(holdouts(num_labels=data.draw(st.sampled_from([2, 3]))))
    names = NAMES + (NAMES_OF_TWO if len(rows.labels) == 2 else ())
    size = rows.num_queries
    times = np.array(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)), dtype=np.int64)
    if not times.any():
        return
    config, threshold = MetricsConfig(), 0.4
    resampled = RowMetrics(repeated(rows, times), config, threshold)
    for name in map(MetricName.parse, names):
        found = RowMetrics(rows, config, threshold).measure(name)
        if not isinstance(found, Measured):
            continue
        weights = np.stack([times, np.ones(size)]).astype(np.float64)
        seen = found.statistic.at(weights)
        wanted = resampled.measure(name)
        assert seen[1] == pytest.approx(found.value, abs=1e-12)
        assert seen[0] == pytest.approx(
            wanted.value if isinstance(wanted, Measured) else math.nan, abs=1e-9, nan_ok=True
        )


@pytest.mark.parametrize("num_queries", [8, 400])
def test_the_standard_error_is_that_of_a_mean(num_queries: int) -> None:
    values = np.random.default_rng(3).normal(0.2, 1.0, num_queries)
    found = difference(values, resamples=20_000)
    assert found.difference == pytest.approx(values.mean())
    assert found.standard_error == pytest.approx(values.std(ddof=1) / math.sqrt(num_queries), rel=0.02)


def test_the_ends_are_near_those_of_scipy() -> None:
    values = np.random.default_rng(4).exponential(1.0, 300)
    low, high = difference(values).interval(0.95)
    theirs = bootstrap((values,), np.mean, confidence_level=0.9, method="BCa", rng=np.random.default_rng(5))
    width = theirs.confidence_interval.high - theirs.confidence_interval.low
    assert low == pytest.approx(theirs.confidence_interval.low, abs=0.06 * width)
    assert high == pytest.approx(theirs.confidence_interval.high, abs=0.06 * width)


@pytest.mark.parametrize("seed", [1, 2])
def test_draws_depend_on_seed_and_purpose_only(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(6).normal(0, 1, 50)
    first = difference(values, seed=seed).draws
    monkeypatch.setattr(module, "_BLOCK_CELLS", 333)  # memory at hand does not matter
    assert difference(values, seed=seed).draws == pytest.approx(first, abs=1e-12)
    assert difference(values, seed=seed + 10).draws != pytest.approx(first, abs=1e-3)
    assert difference(values, seed=seed, purpose="other").draws != pytest.approx(first, abs=1e-3)


def test_a_metric_that_most_draws_leave_undefined_has_no_interval() -> None:
    rare = np.full(40, np.nan)
    rare[0] = 0.5  # drawn in 64 % of the cases
    assert all(math.isnan(end) for end in difference(rare).interval(0.95))
    common = np.full(40, np.nan)
    common[:20] = np.linspace(0, 1, 20)
    assert all(math.isfinite(end) for end in difference(common).interval(0.95))


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99, 0.9995])
@pytest.mark.parametrize("freedom", [10, 49, 5000])
def test_students_t(confidence: float, freedom: int) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(t.ppf(confidence, freedom), rel=6e-4, abs=1e-9)


def test_a_rare_loss_widens_the_lower_end() -> None:
    """3 % of the queries lose a lot: the ends of the mean are not even, and the lower one is the farther."""
    values = np.where(np.arange(200) % 33 == 0, -0.5, 0.0)
    found = difference(values)
    low, high = found.interval(0.95)
    plain = t_quantile(0.95, 199) * found.standard_error
    assert found.difference - low > 1.2 * plain
    assert high - found.difference == pytest.approx(plain, rel=0.01)
    low, high = difference(-values).interval(0.95)
    assert high - difference(-values).difference > 1.2 * plain
    assert difference(-values).difference - low == pytest.approx(plain, rel=0.01)
