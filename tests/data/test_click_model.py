"""The click model against a simulated user, and against logs that do not determine it."""

import numpy as np
import pytest

from pipeline.core.arrays import Float64s
from pipeline.core.errors import DataError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.data.click_model import ClickCounts, ClickRates, estimate_propensities, estimate_rates

PLACES = 10
TRUE: Float64s = np.asarray(np.arange(1, PLACES + 1) ** -0.7, dtype=np.float64)
RATES = np.tile([0.6, 0.3, 0.1, 0.02], 1500)


def simulated(places: np.ndarray, rates: np.ndarray = RATES, seed: int = 3) -> ClickCounts:
    """Count simulated clicks on pairs whose impressions are at `places` [pairs, impressions]."""
    random, pair = np.random.default_rng(seed), np.repeat(np.arange(len(places)), places.shape[1])
    clicks = random.random(places.size) < TRUE[places.ravel()] * rates[pair]
    keys, row = np.unique(pair * PLACES + places.ravel(), return_inverse=True)
    pair, place = keys // PLACES, keys % PLACES
    counts = np.bincount(row), np.bincount(row, clicks).astype(np.int64)
    return ClickCounts(len(places), np.arange(1, PLACES + 1), pair, place, *counts)


def anywhere(impressions: int, pairs: int = len(RATES)) -> np.ndarray:
    return np.random.default_rng(1).integers(0, PLACES, (pairs, impressions))


def written(*rows: tuple[int, int, int, int]) -> ClickCounts:
    """Return the counts of rows of pair, position, impressions and clicks."""
    pair, position, impressions, clicks = np.array(rows).T
    positions, place = np.unique(position, return_inverse=True)
    return ClickCounts(int(pair.max()) + 1, positions, pair, place, impressions, clicks)


def test_propensities_are_recovered_from_positions_at_random() -> None:
    values, errors = estimate_propensities(simulated(anywhere(200)), StopSignal())
    assert values == pytest.approx(TRUE, rel=0.05)
    assert np.abs(values - TRUE)[1:].max() < 3 * errors[1:].max() < 0.05
    assert (values[0], errors[0]) == (1, 0)


def test_propensities_are_recovered_if_better_products_are_shown_higher() -> None:
    """The click rates alone would be off by far, because position 1 mostly has the products of rate 0.6."""
    base = np.tile([0, 3, 6, 9], len(RATES) // 4)[:, None]
    places = np.clip(base + np.random.default_rng(1).integers(-3, 4, (len(RATES), 600)), 0, PLACES - 1)
    counts = simulated(places)
    values, _ = estimate_propensities(counts, StopSignal())
    assert values == pytest.approx(TRUE, rel=0.05)
    shown, clicks = (np.bincount(counts.place, each) for each in (counts.impressions, counts.clicks))
    assert (clicks / shown / (clicks[0] / shown[0]))[-1] < 0.2 * TRUE[-1]


def test_few_impressions_per_pair_do_not_bias_the_propensities() -> None:
    values, errors = estimate_propensities(simulated(anywhere(3, 60_000), np.tile(RATES, 10)), StopSignal())
    assert (np.abs(values - TRUE)[1:] < 3.5 * errors[1:]).all() and (errors[1:] < 0.04 * TRUE[1:] + 0.01).all()


def test_rates_are_recovered_and_intervals_cover_them() -> None:
    counts = simulated(anywhere(1000))
    rates = estimate_rates(counts, estimate_propensities(counts, StopSignal())[0])
    for rate in np.unique(RATES):
        assert rates.rate[rate == RATES].mean() == pytest.approx(
            rate, rel=0.05, abs=0.002
        )  # the prior raises the lowest
    assert rates.typical == pytest.approx((RATES**2).sum() / RATES.sum(), rel=0.05)
    covered = (rates.low <= RATES) & (rates.high >= RATES)
    assert covered.mean() == pytest.approx(0.9, abs=0.03)
    few = estimate_rates(simulated(anywhere(10, 60_000), np.tile(RATES, 10)), TRUE)
    covered = (few.low <= np.tile(RATES, 10)) & (few.high >= np.tile(RATES, 10))
    assert 0.8 < covered.mean() < 0.9, "fewer, as docs/data.md says"


def test_a_single_click_on_a_rare_pair_does_not_make_it_relevant() -> None:
    common = simulated(anywhere(300))
    extra = [np.array([value]) for value in (common.num_pairs, 0, 1, 1)]
    arrays = (common.pair, common.place, common.impressions, common.clicks)
    joined = (np.append(array, value) for array, value in zip(arrays, extra, strict=True))
    rates = estimate_rates(ClickCounts(common.num_pairs + 1, common.positions, *joined), TRUE)
    assert rates.clicks[-1] == rates.impressions[-1] == 1
    assert rates.rate[-1] < 0.6 and rates.high[-1] - rates.low[-1] > 0.5


def test_the_interval_is_that_of_wilson_if_every_position_is_noticed() -> None:
    """Brown, Cai and DasGupta, "Interval estimation for a binomial proportion", 2001; the prior is negligible here."""
    counts = written((0, 1, 100_000, 40_000), (1, 1, 100_000, 60), (2, 1, 100_000, 90_000))
    rates = estimate_rates(counts, np.ones(1))
    z, n, p = 1.6449, 100_000, np.array([0.4, 0.0006, 0.9])
    middle, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    assert rates.low == pytest.approx((middle - half) / (1 + z**2 / n), rel=0.05, abs=1e-4)
    assert rates.high == pytest.approx((middle + half) / (1 + z**2 / n), rel=0.05, abs=1e-4)


SEPARATE = [(0, 1, 100, 50), (0, 2, 100, 25), (1, 3, 100, 50), (1, 4, 100, 20)]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (SEPARATE, [1, 0.5, np.nan, np.nan]),
        ([*SEPARATE, (2, 2, 100, 50), (2, 3, 100, 25)], [1, 0.5, 0.25, 0.1]),
        ([*SEPARATE, (2, 2, 10, 5), (2, 3, 10, 0)], [1, 0.5, np.nan, np.nan]),  # no bound on how much less 3 gets
        ([(0, 1, 100, 50), (0, 2, 100, 25), (1, 3, 100, 50)], [1, 0.5, np.nan]),  # shown at a single position
        ([(0, 1, 100, 50), (0, 2, 100, 25), (0, 7, 100, 0)], [1, 0.5, np.nan]),
        ([(0, 5, 100, 50), (0, 6, 100, 25)], [1, 0.5]),
    ],
)
def test_only_positions_that_can_be_compared_have_a_propensity(
    rows: list[tuple[int, int, int, int]], expected: list[float]
) -> None:
    values, errors = estimate_propensities(written(*rows), StopSignal())
    assert values == pytest.approx(np.array(expected), rel=0.02, nan_ok=True)
    assert np.array_equal(np.isnan(errors), np.isnan(values))


def test_impressions_without_a_propensity_are_not_counted() -> None:
    counts = written(*SEPARATE, (0, 3, 100, 0), (1, 1, 100, 20))
    rates = estimate_rates(counts, np.array([1, 0.5, np.nan, np.nan]))
    assert rates.impressions.tolist() == [200, 100] and rates.clicks.tolist() == [75, 20]


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 1, 100, 0), (0, 2, 100, 0)],
        [(0, 1, 100, 50), (1, 1, 100, 20)],
        [(0, 1, 100, 50), (1, 2, 100, 20)],
        [(0, 1, 100, 50), (0, 2, 100, 0)],
    ],
    ids=["no clicks", "one position", "one position for each pair", "clicks at one position"],
)
def test_a_log_that_does_not_determine_propensities_is_refused(rows: list[tuple[int, int, int, int]]) -> None:
    with pytest.raises(DataError):
        estimate_propensities(written(*rows), StopSignal())


def test_rates_that_differ_by_chance_are_refused() -> None:
    with pytest.raises(DataError):
        estimate_rates(written((0, 1, 100, 20), (1, 1, 100, 21), (2, 1, 100, 19)), np.ones(1))


def test_a_stop_ends_the_estimate() -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted):
        estimate_propensities(written(*SEPARATE), stop)


def test_all_fields_have_a_value_for_each_pair() -> None:
    rates = estimate_rates(written(*SEPARATE), np.array([1, 0.5, 0.4, 0.2]))
    assert isinstance(rates, ClickRates)
    assert {len(getattr(rates, name)) for name in ("impressions", "clicks", "rate", "low", "high")} == {2}
    assert (rates.low <= rates.rate).all() and (rates.rate <= rates.high).all() and (rates.high <= 1).all()
