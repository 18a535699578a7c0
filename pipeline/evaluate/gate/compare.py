"""Compare the candidate with the production model or a baseline, using a paired bootstrap."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Literal

import numpy as np
from pydantic import Field

from pipeline.core.arrays import Bools, Float64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.core.record import Record
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.metrics.measure import Measured, RowMetrics, measure_retrieval
from pipeline.evaluate.metrics.scored_rows import Missing, PerQuery, Statistic, value_of

# A paired bootstrap over queries, which estimates whether the difference between two models is statistically
# significant (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993). We resample queries with all their rows
# instead of single rows, because the rows of a query are not independent. Both models see the same resamples.

SEED = 1
_BLOCK_CELLS = 4_000_000  # number of weights to hold in memory at a time (32 MB)
_MIN_DEFINED = 0.95  # minimum fraction of resamples in which both metrics must be defined
_ROUNDING = 1e-12  # A smaller standard error is a rounding error, which means that every query changed equally.


@dataclass(frozen=True, eq=False)
class PairedDifference:
    """The difference between candidate and reference, on the actual queries and in each bootstrap resample.

    `draws` [R] has NaN for resamples in which a metric is undefined.
    """

    difference: float
    draws: Float64s
    num_queries: int

    @property
    def standard_error(self) -> float:
        """The bootstrap standard error, or NaN if the metrics are defined in fewer than 95 % of the resamples."""
        defined = self.draws[~np.isnan(self.draws)]
        if len(defined) < max(2, _MIN_DEFINED * len(self.draws)) or self.num_queries < 2:
            return math.nan
        return float(defined.std(ddof=1)) * math.sqrt(self.num_queries / (self.num_queries - 1))

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return a lower and an upper confidence bound, each at the one-sided level `confidence`.

        For each bound we compute difference -+ t * standard error, and the same with Hall's correction for skewness
        ("On the Removal of Skewness by Transformation", JRSS B 1992), and take the wider of the two. The uncorrected
        bound is too narrow if a few queries lose a lot: with 100 queries of which 3 % lose 0.5, it is wrong in 17 % of
        cases instead of 5 %. The corrected bound is too narrow (8 %) if there are few queries and their differences are
        symmetric. The wider bound is either correct or conservative in both cases.

        Both bounds are NaN if there is no standard error.
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
    """Bootstrap the difference between candidate and reference for several metrics.

    All `pairs` (candidate, reference) must be over the same Q queries in the same order, and they share the resamples.
    These are determined by `seed` and `purpose`, which is for example the name of a slice.
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
        # Count how often each query was drawn, [size, Q].
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
    """Approximate a quantile of Student's t distribution by a series expansion (Abramowitz and Stegun 26.7.5).

    For 10 or more degrees of freedom and a confidence of up to 0.9999, the relative error is below 0.06 %.
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
    """Correct a quantile for skewness by inverting Hall's cubic transformation."""
    if abs(skewness) < 1e-6:
        return quantile
    return 3 / skewness * (float(np.cbrt(1 + skewness * (quantile - skewness / 6))) - 1)


# The checks of the gate and its verdict, which are stored as records and shown on the console.

Outcome = Literal["fail", "warn", "skipped", "pass"]
CheckKind = Literal["scores", "holdout", "incumbent", "comparison", "floor", "delta", "slice", "baseline", "golden"]

_SLICES_SHOWN: dict[Outcome, int] = {"fail": 1000, "warn": 1000, "skipped": 5, "pass": 0}
"""How many slice checks to list on the console for each outcome, in display order. The rest are only counted."""


class GateCheck(Record):
    """The result of one check of the gate. Fields that do not apply to the check are null."""

    name: str = Field(description="Name, made from kind, metric and slice, which is unique within a verdict")
    kind: CheckKind
    outcome: Outcome = Field(description="A check that fails prevents promotion. skipped means that it does not apply")
    reason: str = Field(description="Why the check has this outcome, in one sentence")
    metric: str = ""
    slice: str = Field("", description="column=value, or only the column for all its slices (empty: all rows)")
    candidate: float | None = None
    incumbent: float | None = None
    baseline: str = Field("", description="Name of the baseline that the candidate is compared with, if any")
    baseline_value: float | None = None
    bound: float | None = Field(None, description="Value of the floor, or the allowed drop")
    low: float | None = Field(None, description="Lower confidence bound of the difference to the other model")
    high: float | None = Field(None, description="Upper confidence bound of the difference to the other model")
    num_queries: int | None = Field(None, description="Number of queries that contribute to the metric")
    needed_queries: int | None = Field(None, description="Number of queries required, if there were too few")

    @property
    def judges(self) -> bool:
        """Return whether this check counts as a comparison.

        This is the case if the candidate reaches a floor, or if a confidence interval was computed for the difference
        to the production model or a baseline.
        """
        return self.outcome == "pass" if self.kind == "floor" else self.low is not None


class Verdict(Record):
    """The decision of the gate to promote or refuse a candidate, with the checks that led to it."""

    promote: bool
    without_comparison: bool = Field(False, description="Promote although there was nothing to compare with")
    advice: str = Field("", description="How to get more test queries, if there were too few to judge")
    checks: tuple[GateCheck, ...]
    num_rows: int = Field(ge=0)
    num_queries: int = Field(ge=0)
    confidence: float = Field(description="One-sided confidence level of comparisons over all rows")
    slice_confidence: float = Field(description="Confidence level of slice comparisons, with Bonferroni correction")
    baseline_confidence: float | None = Field(
        None, description="Confidence level of baseline comparisons, with Bonferroni correction"
    )
    resamples: int
    seed: int

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons for the decision.

        If the candidate is refused, these are the reasons of the failed checks. If it is promoted, they are those of
        all warnings and of the checks over all rows.
        """
        if not self.promote:
            return tuple(check.reason for check in self.checks if check.outcome == "fail")
        outcomes = ("warn", "pass") if self.without_comparison else ("warn", "pass", "skipped")
        return tuple(
            check.reason
            for check in self.checks
            if check.outcome in outcomes and (check.kind != "slice" or check.outcome == "warn")
        )

    def lines(self) -> list[str]:
        """Format the verdict for the console.

        A summary is followed by the checks, grouped by outcome. Slice checks that passed are only counted.
        """
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
        """Return a summary of the outcomes, such as `3 checks passed, 1 warning, 1 not applicable`."""
        counts = Counter(check.outcome for check in self.checks)
        parts = [f"{counts['fail']} failed"] if counts["fail"] else []
        parts += [f"{counts['pass']} {'check' if counts['pass'] == 1 else 'checks'} passed"]
        parts += [f"{counts['warn']} {'warning' if counts['warn'] == 1 else 'warnings'}"] if counts["warn"] else []
        parts += [f"{counts['skipped']} not applicable"] if counts["skipped"] else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Comparison:
    """A comparison of the candidate with a reference in one metric, over all rows or one slice (`column=value`).

    The reference is the production model unless `baseline` is set, in which case it is the baseline of that name.
    """

    metric: MetricName
    allowed: float
    candidate: Measured | Missing
    reference: Measured | Missing
    slice: str = ""
    baseline: str = ""

    @property
    def name(self) -> str:
        """The name of the check, which is unique within a verdict."""
        return " ".join(part for part in (self.kind, self.baseline, self.metric.text, self.slice) if part)

    @property
    def kind(self) -> CheckKind:
        return "baseline" if self.baseline else "slice" if self.slice else "delta"

    @property
    def num_queries(self) -> int:
        """The number of queries that the metric is based on, or 0 if it cannot be computed for both models."""
        return min(self.candidate.num_queries, self.reference.num_queries)

    @property
    def statistics(self) -> tuple[Statistic, Statistic]:
        """The statistics of candidate and reference.

        Raises ValueError if one of them is missing, so make sure that `not_comparable` has no reason first.
        """
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
        """Build the gate check for this comparison. `min_queries` is recorded if the comparison has fewer queries."""
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
    """Return the reason why two models cannot be compared, or an empty string if they can."""
    reference = comparison.baseline or "the production model"
    for model, result in (("the candidate", comparison.candidate), (reference, comparison.reference)):
        if isinstance(result, Missing):
            return f"cannot be computed for {model}: {result.reason}"
    if comparison.num_queries < min_queries:
        return f"not enough test queries: {comparison.num_queries:,}, at least {min_queries:,} needed"
    return ""


def judge_overall(comparison: Comparison, difference: PairedDifference, confidence: float) -> GateCheck:
    """Judge a comparison over all rows by a non-inferiority test.

    The check only passes if we can be confident that the candidate is worse by at most the allowed drop. If there are
    too few queries to decide, it fails.
    """
    interval, values, drop, worst, best = _losses(comparison, difference, confidence)
    if math.isnan(worst):
        return comparison.check("fail", f"{values}, but undefined in too many bootstrap resamples to judge")
    allowed = comparison.allowed
    if worst <= allowed:
        bound = "better" if worst < 0 else "not worse" if worst == 0 else f"at most {worst:.4f} worse"
        return comparison.check("pass", f"{values}, {bound} with {confidence:.1%} confidence", interval)
    if best > allowed:
        reason = f"{values}, at least {best:.4f} worse with {confidence:.1%} confidence"
        return comparison.check("fail", reason, interval)
    reason = f"{values}, up to {worst:.4f} worse with {confidence:.1%} confidence"
    room, num_queries, min_queries = allowed - drop, comparison.num_queries, 0
    if room > 0:  # the same difference would pass if there were more queries
        spread = t_quantile(confidence, num_queries - 1) * difference.standard_error
        needed = math.ceil(num_queries * (spread / room) ** 2)
        if needed > num_queries:  # otherwise the check failed because of the skewness, not because of the spread
            min_queries = needed
            reason += f" (ruling this out takes about {needed:,} queries, but there are only {num_queries:,})"
    return comparison.check("fail", reason, interval, min_queries=min_queries)


def judge_refusal(
    comparison: Comparison, difference: PairedDifference, confidence: float, worse: Outcome = "fail"
) -> GateCheck:
    """Judge a comparison on a slice or with a baseline.

    Unlike `judge_overall`, the outcome is only `worse` if we can be confident that the candidate is worse by more than
    the allowed drop, so that a slice with few queries does not block the promotion.
    """
    interval, values, drop, _, best = _losses(comparison, difference, confidence)
    allowed, tool, metric = comparison.allowed, comparison.baseline, comparison.metric.text
    if math.isnan(best):
        reason = f"{values}, but undefined in too many bootstrap resamples to judge"
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
    """Return the confidence interval, the formatted values, and how much worse the candidate is.

    The latter is returned as three numbers: as measured, in the worst case, and in the best case.
    """
    interval = difference.interval(confidence)
    drop = comparison.metric.loss(difference.difference)
    best, worst = sorted(map(comparison.metric.loss, interval))
    change = "equal" if drop == 0 else f"{abs(drop):.4f} {'worse' if drop > 0 else 'better'}"
    if comparison.allowed or not comparison.baseline:
        change += f", up to {comparison.allowed:g} worse is allowed"
    values = f"{comparison.candidate.value:.4f} vs {comparison.reference.value:.4f} ({change})"
    return interval, values, drop, worst, best


@dataclass(frozen=True, eq=False)
class GateInput(RowMetrics):
    """The results of one model that the gate needs, which include the retrieval metrics of each query."""

    retrieval: PerQuery | None = None

    def measure(self, name: MetricName) -> Measured | Missing:
        return measure_retrieval(self.retrieval, name) if name.is_retrieval else super().measure(name)

    def select(self, mask: Bools) -> "GateInput":
        """Return the results for the rows where `mask` [N] is true, without retrieval, which is not per row."""
        return replace(self, rows=self.rows.select(mask), retrieval=None)


def check_same_holdout(candidate: GateInput, reference: GateInput) -> None:
    """Verify that two models were scored on the same rows in the same order. Raises DataError if not.

    If both were also evaluated on retrieval, the retrieval queries must be the same.
    """
    names = ("labels", "query_id", "label", "gain")
    pairs = [(name, getattr(candidate.rows, name), getattr(reference.rows, name)) for name in names]
    if candidate.retrieval is not None and reference.retrieval is not None:
        pairs.append(("retrieval queries", candidate.retrieval.query_id, reference.retrieval.query_id))
    for name, first, second in pairs:
        if not np.array_equal(first, second):
            raise DataError(
                f"the candidate and the production model were not scored on the same test split, their {name} differ"
                f" ({len(first):,} and {len(second):,})",
                expected="the same labels, rows and queries for both models",
                next_command="run trnpipe evaluate again. If the labels have changed, set data.labels to those of the"
                " production model and train again, or use --evaluate.incumbent none",
            )
