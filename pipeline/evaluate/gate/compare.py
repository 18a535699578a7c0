"""Comparisons of the candidate with the production model or a baseline, by paired bootstrap."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist
from typing import Literal

import numpy as np
from pydantic import Field

from pipeline.core.arrays import Bools, Float64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.core.record import Record
from pipeline.evaluate.config import MetricName, MetricsConfig
from pipeline.evaluate.metrics.measure import Measured, RowMetrics, measure_retrieval
from pipeline.evaluate.metrics.scored_rows import Missing, PerQuery, ScoredRows, Statistic, value_of

# Paired bootstrap over queries, to separate a difference of two models from chance.
# Queries are drawn with replacement, each with all its rows, the same draw for both models (Efron and Tibshirani, "An
# Introduction to the Bootstrap", 1993). Rows of one query are dependent, queries are independent.

SEED = 1
_BLOCK_CELLS = 4_000_000  # weights in memory at a time: 32 MB
_MIN_DEFINED = 0.95  # share of the draws in which both metrics must be defined
_ROUNDING = 1e-12  # a standard error below this is rounding error: every query changed by the same amount


@dataclass(frozen=True, eq=False)
class PairedDifference:
    """Candidate minus reference, measured and in each draw [R]. NaN in a draw with an undefined metric."""

    difference: float
    draws: Float64s
    num_queries: int

    @property
    def standard_error(self) -> float:
        """Bootstrap standard error. NaN if fewer than 95 % of the draws are defined."""
        defined = self.draws[~np.isnan(self.draws)]
        if len(defined) < max(2, _MIN_DEFINED * len(self.draws)) or self.num_queries < 2:
            return math.nan
        return float(defined.std(ddof=1)) * math.sqrt(self.num_queries / (self.num_queries - 1))

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return the lower and upper bound, each with the one-sided `confidence`. NaN without a standard error.

        Each bound is the wider of two: difference -+ t * standard error, and Hall's correction of it for skewness
        ("On the Removal of Skewness by Transformation", JRSS B 1992). If a few queries lose a lot, the first is too
        narrow (with 100 queries of which 3 % lose 0.5, wrong in 17 % of cases instead of 5 %). With few queries and a
        symmetric spread, the second is (8 %). The wider one is correct or conservative in both cases.
        """
        error = self.standard_error
        if not error > _ROUNDING:
            return self.difference + error, self.difference + error  # NaN stays NaN
        defined = self.draws[~np.isnan(self.draws)]
        skewness = float(((defined - defined.mean()) ** 3).mean() / defined.std() ** 3)
        quantile = t_quantile(confidence, self.num_queries - 1)
        low = max(quantile, _corrected(quantile, skewness))
        high = min(-quantile, _corrected(-quantile, skewness))
        return self.difference - low * error, self.difference - high * error


def paired_bootstrap(
    pairs: Mapping[str, tuple[Statistic, Statistic]], *, resamples: int, seed: int, purpose: str
) -> dict[str, PairedDifference]:
    """Bootstrap the differences of pairs (candidate, reference) by name, over the same Q queries in the same order.

    All pairs share the draws, which are a function of `seed` and `purpose` (such as the judged slice).
    """
    if not pairs:
        return {}
    num_queries = len(next(iter(pairs.values()))[0].counted)
    draws = {name: np.empty(resamples) for name in pairs}
    stream = np.random.default_rng([seed, hash63(purpose)])
    block = max(1, _BLOCK_CELLS // num_queries)
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = stream.integers(0, num_queries, (size, num_queries))
        drawn += np.arange(size)[:, None] * num_queries
        # [size, Q]: how often each query was drawn in Q draws with replacement.
        weights = np.bincount(drawn.ravel(), minlength=size * num_queries).reshape(size, -1).astype(np.float64)
        for name, (candidate, reference) in pairs.items():
            draws[name][start : start + size] = candidate.at(weights) - reference.at(weights)
    return {
        name: PairedDifference(
            value_of(candidate) - value_of(reference), draws[name], int((candidate.counted | reference.counted).sum())
        )
        for name, (candidate, reference) in pairs.items()
    }


def t_quantile(confidence: float, freedom: int) -> float:
    """Compute the quantile of Student's t by expansion around the normal (Abramowitz and Stegun 26.7.5).

    The error is below 0.06 % for at least 10 degrees of freedom and confidences up to 0.9999.
    """
    z = NormalDist().inv_cdf(confidence)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    for power, term in enumerate(terms, start=1):
        z += term / freedom**power
    return z


def _corrected(quantile: float, skewness: float) -> float:
    """Invert Hall's cubic transformation for a studentised value of this skewness."""
    if abs(skewness) < 1e-6:
        return quantile
    return 3 / skewness * (float(np.cbrt(1 + skewness * (quantile - skewness / 6))) - 1)


# Checks and verdict of the gate, as records and as lines for the console.

Outcome = Literal["fail", "warn", "skipped", "pass"]
CheckKind = Literal["scores", "holdout", "incumbent", "comparison", "floor", "delta", "slice", "baseline", "golden"]

_SLICES_SHOWN: dict[Outcome, int] = {"fail": 1000, "warn": 1000, "skipped": 5, "pass": 0}
"""Slice checks listed on the console by outcome, in this order. The rest are counted."""


class GateCheck(Record):
    """One check of the gate. Values that do not apply are null."""

    name: str = Field(description="Kind, metric and slice, unique within a verdict")
    kind: CheckKind
    outcome: Outcome = Field(description="fail refuses promotion, skipped means not applicable")
    reason: str = Field(description="One sentence")
    metric: str = ""
    slice: str = Field("", description="column=value, or a column for all its slices. Empty: all rows")
    candidate: float | None = None
    incumbent: float | None = None
    baseline: str = Field("", description="Name of the baseline, if compared with one")
    baseline_value: float | None = None
    bound: float | None = Field(None, description="The floor or the allowed drop")
    low: float | None = Field(None, description="Lower bound of the candidate minus the other model")
    high: float | None = Field(None, description="Upper bound, like the lower one at the one-sided confidence")
    num_queries: int | None = Field(None, description="Queries that contribute to the metric")
    needed_queries: int | None = Field(None, description="Queries required, if there are fewer")

    @property
    def judges(self) -> bool:
        """True if the check compared the candidate with a floor or, with an interval, with another model."""
        return self.outcome == "pass" if self.kind == "floor" else self.low is not None


class Verdict(Record):
    """Promote or refuse, with every check."""

    promote: bool
    without_comparison: bool = Field(False, description="Promote although the candidate was compared with nothing")
    advice: str = Field("", description="How to get enough test queries, if too few are the reason for the refusal")
    checks: tuple[GateCheck, ...]
    num_rows: int = Field(ge=0)
    num_queries: int = Field(ge=0)
    confidence: float = Field(description="One-sided confidence of each comparison over all rows")
    slice_confidence: float = Field(description="Confidence of each slice, corrected for the number of comparisons")
    baseline_confidence: float | None = Field(None, description="Confidence of each baseline comparison, corrected too")
    resamples: int
    seed: int

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reasons of the failed checks or, if promoted, of the checks over all rows and of warnings."""
        if not self.promote:
            return tuple(check.reason for check in self.checks if check.outcome == "fail")
        outcomes = ("warn", "pass") if self.without_comparison else ("warn", "pass", "skipped")
        return tuple(
            check.reason
            for check in self.checks
            if check.outcome in outcomes and (check.kind != "slice" or check.outcome == "warn")
        )

    def lines(self) -> list[str]:
        """Format the verdict for a terminal: summary, then checks by outcome. Slices that passed are only counted."""
        head = (
            "refuse" if not self.promote else "promote WITHOUT a comparison" if self.without_comparison else "promote"
        )
        lines = [f"{head}: {self.counts} ({self.num_queries:,} queries, {self.num_rows:,} rows)"]
        for outcome, shown in _SLICES_SHOWN.items():
            checks = [check for check in self.checks if check.outcome == outcome]
            hidden = [check for check in checks if check.kind == "slice"][shown:]
            lines += [f"  {outcome:<7} {check.reason}" for check in checks if check not in hidden]
            lines += [f"  {outcome:<7} {len(hidden):,} slice comparisons"] if hidden else []
        return [*lines, f"  {self.advice}"] if self.advice else lines

    @property
    def counts(self) -> str:
        """Summary by outcome, such as `3 checks passed, 1 warning, 1 not applicable`."""
        counts = Counter(check.outcome for check in self.checks)
        parts = [f"{counts['fail']} failed"] if counts["fail"] else []
        parts += [f"{counts['pass']} {'check' if counts['pass'] == 1 else 'checks'} passed"]
        parts += [f"{counts['warn']} {'warning' if counts['warn'] == 1 else 'warnings'}"] if counts["warn"] else []
        parts += [f"{counts['skipped']} not applicable"] if counts["skipped"] else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Comparison:
    """One metric of the candidate and of a reference, over all rows or one slice (`column=value`).

    The reference is the production model, or the baseline that `baseline` names.
    """

    metric: MetricName
    allowed: float
    candidate: Measured | Missing
    reference: Measured | Missing
    slice: str = ""
    baseline: str = ""

    @property
    def name(self) -> str:
        """Name of the check, unique within a verdict."""
        return " ".join(part for part in (self.kind, self.baseline, self.metric.text, self.slice) if part)

    @property
    def kind(self) -> CheckKind:
        return "baseline" if self.baseline else "slice" if self.slice else "delta"

    @property
    def num_queries(self) -> int:
        """Queries that contribute to the metric of both models, 0 if it cannot be computed."""
        return min(self.candidate.num_queries, self.reference.num_queries)

    @property
    def statistics(self) -> tuple[Statistic, Statistic]:
        """Statistics of candidate and reference. Raises ValueError if one is missing, see `not_comparable`."""
        if isinstance(self.candidate, Missing) or isinstance(self.reference, Missing):
            raise ValueError(f"{self.name} was not measured for both models")
        return self.candidate.statistic, self.reference.statistic

    def check(
        self,
        outcome: Outcome,
        reason: str,
        interval: tuple[float, float] | None = None,
        title: str = "",
        min_queries: int = 0,
    ) -> GateCheck:
        """Build the check of this comparison. `min_queries`: the required number, if it has too few queries."""
        measured = isinstance(self.candidate, Measured) and isinstance(self.reference, Measured)
        low, high = interval or (math.nan, math.nan)
        scope = f" vs {self.baseline}" if self.baseline else f" of {self.slice}" if self.slice else ""
        return GateCheck(
            name=self.name,
            kind=self.kind,
            outcome=outcome,
            reason=f"{title or self.metric.text + scope}: {reason}",
            metric=self.metric.text,
            slice=self.slice,
            candidate=self.candidate.value,
            incumbent=None if self.baseline else self.reference.value,
            baseline=self.baseline,
            baseline_value=self.reference.value if self.baseline else None,
            bound=self.allowed,
            low=None if math.isnan(low) else low,
            high=None if math.isnan(high) else high,
            num_queries=self.num_queries,
            needed_queries=min_queries if measured and self.num_queries < min_queries else None,
        )


def not_comparable(comparison: Comparison, min_queries: int) -> str:
    """Return the reason why a comparison is impossible, or an empty string."""
    reference = comparison.baseline or "the production model"
    for model, result in (("the candidate", comparison.candidate), (reference, comparison.reference)):
        if isinstance(result, Missing):
            return f"cannot be computed for {model}: {result.reason}"
    if comparison.num_queries < min_queries:
        return f"not enough test queries: {comparison.num_queries:,}, at least {min_queries:,} needed"
    return ""


def judge_overall(comparison: Comparison, difference: PairedDifference, confidence: float) -> GateCheck:
    """Pass only if the candidate is worse by at most the allowed drop with this confidence (non-inferiority)."""
    interval, values, drop, worst, best = _losses(comparison, difference, confidence)
    if math.isnan(worst):
        return comparison.check("fail", f"{values}, but undefined in too many bootstrap draws for an interval")
    allowed = comparison.allowed
    if worst <= allowed:
        bound = "better" if worst < 0 else "not worse" if worst == 0 else f"at most {worst:.4f} worse"
        return comparison.check("pass", f"{values}, {bound} with {confidence:.1%} confidence", interval)
    if best > allowed:
        reason = f"{values}, at least {best:.4f} worse with {confidence:.1%} confidence"
        return comparison.check("fail", reason, interval)
    reason = f"{values}, up to {worst:.4f} worse with {confidence:.1%} confidence"
    room, num_queries, min_queries = allowed - drop, comparison.num_queries, 0
    if room > 0:  # with this many queries the same difference would pass
        spread = t_quantile(confidence, num_queries - 1) * difference.standard_error
        needed = math.ceil(num_queries * (spread / room) ** 2)
        if needed > num_queries:  # otherwise skewness decided, not the spread
            min_queries = needed
            reason += f", which takes about {needed:,} queries to rule out and there are {num_queries:,}"
    return comparison.check("fail", reason, interval, min_queries=min_queries)


def judge_refusal(
    comparison: Comparison, difference: PairedDifference, confidence: float, worse: Outcome = "fail"
) -> GateCheck:
    """Return `worse` only if the candidate is worse by more than the allowed drop with this confidence.

    Used for slices and baselines, where few queries must not refuse a candidate.
    """
    interval, values, drop, _, best = _losses(comparison, difference, confidence)
    allowed, tool, metric = comparison.allowed, comparison.baseline, comparison.metric.text
    if math.isnan(best):
        reason = f"{values}, but undefined in too many bootstrap draws for an interval"
        return comparison.check("skipped", reason, interval, title=tool and f"{tool} on {metric}")
    if best > allowed:
        reason = f"{values}, at least {best:.4f} worse with {confidence:.2%} confidence"
        return comparison.check(worse, reason, interval, title=tool and f"{tool} is better on {metric}")
    if drop > allowed:
        reason = f"{values}, not statistically significant with {comparison.num_queries:,} queries"
        return comparison.check("warn", reason, interval, title=tool and f"{tool} may be better on {metric}")
    title = f"beats {tool} on {metric}" if drop < 0 else f"{tool} is not better on {metric}"
    return comparison.check("pass", values, interval, title=tool and title)


def _losses(
    comparison: Comparison, difference: PairedDifference, confidence: float
) -> tuple[tuple[float, float], str, float, float, float]:
    """Return the interval, the formatted values, and the drop of the candidate: measured, at worst, at best."""
    low, high = interval = difference.interval(confidence)
    drop, worst, best = -difference.difference, -low, -high
    if comparison.metric.lower_is_better:
        drop, worst, best = difference.difference, high, low
    change = "equal" if drop == 0 else f"{abs(drop):.4f} {'worse' if drop > 0 else 'better'}"
    if comparison.allowed or not comparison.baseline:
        change += f", {comparison.allowed:g} worse is allowed"
    values = f"{comparison.candidate.value:.4f} vs {comparison.reference.value:.4f} ({change})"
    return interval, values, drop, worst, best


@dataclass(frozen=True, eq=False)
class GateInput:
    """Results of one model for the gate: scored rows, threshold (two labels only), and retrieval metrics per query."""

    rows: ScoredRows
    config: MetricsConfig
    threshold: float | None = None
    retrieval: PerQuery | None = None

    @cached_property
    def metrics(self) -> RowMetrics:
        return RowMetrics(self.rows, self.config, self.threshold)

    def measure(self, name: MetricName) -> Measured | Missing:
        return measure_retrieval(self.retrieval, name) if name.is_retrieval else self.metrics.measure(name)

    def select(self, mask: Bools) -> "GateInput":
        """Select the rows where `mask` [N] is true. Drops retrieval, which is not per row."""
        return replace(self, rows=self.rows.select(mask), retrieval=None)


def check_same_holdout(candidate: GateInput, reference: GateInput) -> None:
    """Raise DataError unless both were scored on the same rows in the same order, and on the same queries."""
    names = ("labels", "query_id", "label", "gain")
    pairs = [(name, getattr(candidate.rows, name), getattr(reference.rows, name)) for name in names]
    if candidate.retrieval is not None and reference.retrieval is not None:
        pairs.append(("retrieval queries", candidate.retrieval.query_id, reference.retrieval.query_id))
    for name, first, second in pairs:
        if not np.array_equal(first, second):
            raise DataError(
                f"candidate and production model were not scored on the same test split: the {name} differ"
                f" ({len(first):,} and {len(second):,})",
                expected="the same labels, rows and queries for both",
                next_command="run trnpipe evaluate again; for other labels set data.labels to those of the production"
                " model and train again, or use --evaluate.incumbent none",
            )
