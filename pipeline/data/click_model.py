"""Estimate how much attention each position of a result list gets, and how often a product is clicked that gets it.

In the position-based model, a product is clicked with the probability `propensity[position] * rate[pair]`, where a pair
is a query and a product (Craswell et al., "An experimental comparison of click position-bias models", WSDM 2008).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipeline.core.arrays import Float64s, Int64s
from pipeline.core.errors import DataError
from pipeline.core.stop import StopSignal

Z_90 = 1.6449
"""Half the width of a 90% interval of a normal distribution, in standard deviations."""
MAX_ERROR = 0.5
"""Maximum standard error of a propensity, as a fraction of the propensity."""
_PRIOR = 0.01  # like a hundredth of a click at each position
_BLOCK_PAIRS = 4096
_MAX_ITERATIONS, _TOLERANCE = 200, 1e-6
_MAX_PLACES = 2_000  # the covariance matrix then takes 32 MB
_MORE = "add more days of impressions, or check the columns with --position and --clicked"


@dataclass(frozen=True)
class ClickCounts:
    """Impressions and clicks by pair and position, as arrays of the same length that are sorted by pair.

    Pairs are numbered from 0 to `num_pairs - 1`. `place` is an index into `positions`, which are sorted.
    """

    num_pairs: int
    positions: Int64s
    pair: Int64s
    place: Int64s
    impressions: Int64s
    clicks: Int64s


@dataclass(frozen=True)
class ClickRates:
    """The click rate of each pair at the first position, from 0 to 1, with its approximate 90% interval.

    `impressions` and `clicks` are counted at positions with a propensity. `typical` is the mean rate of a clicked pair.
    """

    impressions: Int64s
    clicks: Int64s
    rate: Float64s
    low: Float64s
    high: Float64s
    typical: float


def estimate_propensities(counts: ClickCounts, stop: StopSignal) -> tuple[Float64s, Float64s]:
    """Return the propensity of each position relative to the first one, and its standard error.

    Given the clicks on a pair, the probability that a click was at a position is proportional to the impressions there
    times the propensity. Newton's method maximises this conditional likelihood. It does not contain the rates, so pairs
    with few impressions do not bias the result (Hausman, Hall and Griliches, Econometrica 1984). Propensities with a
    relative error above MAX_ERROR are NaN. Raises DataError if fewer than two are left, or if there are too
    many positions.
    """
    num_places, on_pair = len(counts.positions), _sum(counts.clicks, counts.pair, counts.num_pairs)
    used = ((on_pair > 0) & (np.bincount(counts.pair, minlength=counts.num_pairs) > 1))[counts.pair]
    at_place = _sum(counts.clicks[used], counts.place[used], num_places)
    used &= at_place[counts.place] > 0
    values, errors = np.full((2, num_places), np.nan)
    if used.any():
        free, place = np.unique(counts.place[used], return_inverse=True)
        if len(free) > _MAX_PLACES:
            raise DataError(
                f"products were clicked at {len(free):,} different positions",
                expected=f"positions in a list of results, of which at most {_MAX_PLACES:,} have clicks",
                next_command="choose a different column with --position",
            )
        _, pair = np.unique(counts.pair[used], return_inverse=True)
        logs, covariance = _maximise(pair, place, counts.impressions[used], counts.clicks[used], stop)
        most = at_place[free].argmax()  # the best reference to determine which positions are comparable
        known = _relative_errors(covariance, most) <= MAX_ERROR
        first = known.argmax()
        values[free[known]] = np.exp(logs - logs[first])[known]
        errors[free[known]] = _relative_errors(covariance, first)[known] * values[free[known]]
    if np.isfinite(values).sum() < 2:
        raise DataError(
            f"cannot estimate the effect of the position from {counts.clicks.sum():,} clicks in"
            f" {counts.impressions.sum():,} impressions at {num_places:,} position(s)",
            expected="clicked products whose position changes between searches for the same query",
            next_command=_MORE,
        )
    return values, errors


def _sum(values: Int64s | Float64s, index: Int64s, size: int) -> Float64s:
    """Sum the values with the same index."""
    return np.bincount(index, values, size).astype(np.float64)


def _relative_errors(covariance: Float64s, reference: np.intp) -> Float64s:
    variances = np.diag(covariance)
    difference = variances + variances[reference] - 2 * covariance[reference]
    return np.asarray(np.sqrt(np.maximum(0.0, difference)), dtype=np.float64)


def _maximise(
    pair: Int64s, place: Int64s, shown: Int64s, clicks: Int64s, stop: StopSignal
) -> tuple[Float64s, Float64s]:
    """Return the logarithms of the propensities up to a constant, and their covariance matrix.

    A weak prior gives them a large variance, instead of none, if the clicks do not determine them.
    """
    num_places, starts = int(place.max()) + 1, np.unique(pair, return_index=True)[1]
    on_pair, at_place = _sum(clicks, pair, len(starts)), _sum(clicks, place, num_places)
    logs: Float64s = np.log(at_place / _sum(shown, place, num_places))
    prior, covariance = logs, np.zeros((num_places, num_places))
    for _ in range(_MAX_ITERATIONS):
        stop.raise_if_set("estimating propensities")
        gradient, curvature = at_place - _PRIOR * (logs - prior), _PRIOR * np.eye(num_places)
        for start, end in pairwise([*starts[::_BLOCK_PAIRS].tolist(), len(pair)]):
            block, first = slice(start, end), pair[start]
            share = np.zeros((pair[end - 1] - first + 1, num_places))
            share[pair[block] - first, place[block]] = shown[block] * np.exp(logs[place[block]])
            share /= share.sum(axis=1, keepdims=True)
            weighted = share * on_pair[first : first + len(share), None]
            gradient -= weighted.sum(axis=0)
            curvature += np.diag(weighted.sum(axis=0)) - share.T @ weighted
        covariance = np.asarray(np.linalg.inv(curvature), dtype=np.float64)
        step = covariance @ gradient
        logs = logs + step / max(1.0, np.abs(step).max())  # a full step from far away may increase the error
        if np.abs(step).max() < _TOLERANCE:
            break
    return logs, covariance


def estimate_rates(counts: ClickCounts, propensities: Float64s) -> ClickRates:
    """Estimate the rate of each pair as its clicks divided by its exposure, which is the sum of the propensities.

    A prior with the mean and the variance of all rates is added (empirical Bayes, method of moments), so that a single
    click on a rare pair does not make it relevant. The interval is the score interval, which equals Wilson's if all
    propensities are 1. With few impressions, it covers less than 90%, because the prior narrows it. Raises DataError if
    the rates do not differ more than by chance.
    """
    known, weight = np.isfinite(propensities)[counts.place], np.nan_to_num(propensities)[counts.place]
    impressions, clicks, exposure, squares = (
        _sum(values, counts.pair, counts.num_pairs)
        for values in (
            counts.impressions * known,
            counts.clicks * known,
            counts.impressions * weight,
            counts.impressions * weight**2,
        )
    )
    seen = np.maximum(exposure, 1e-12)
    # The expected value of clicks * (clicks - 1) is rate^2 (exposure^2 - squares), however few impressions there are.
    typical = (clicks * (clicks - 1) / seen).sum() / max(1e-12, (clicks * (1 - squares / seen**2)).sum())
    mean = clicks.sum() / exposure.sum()
    if typical <= mean:
        raise DataError(
            f"the click rates of {counts.num_pairs:,} pairs differ only by chance ({clicks.sum():,.0f} clicks)",
            expected="products that are clicked more often than others",
            next_command=_MORE,
        )
    prior = max(0.0, 1 - typical) / (typical - mean)
    total = np.maximum(exposure + prior, 1e-12)
    rate = np.minimum(1.0, (clicks + prior * mean) / total)
    # The bounds solve (rate - x)^2 = z^2 variance(x), where variance(x) = x / total - x^2 (squares + prior) / total^2.
    square, linear = 1 + Z_90**2 * (squares + prior) / total**2, 2 * rate + Z_90**2 / total
    root = np.sqrt(np.maximum(0.0, linear**2 - 4 * square * rate**2))
    low, high = (np.clip((linear + sign * root) / (2 * square), 0.0, 1.0) for sign in (-1, 1))
    return ClickRates(impressions.astype(np.int64), clicks.astype(np.int64), rate, low, high, float(typical))
