"""Comparisons with the incumbent or a baseline: from two measurements and the bootstrap to a check with its reason."""

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

# Paired bootstrap over queries: how far the difference of two models could be chance.
# Queries are drawn with replacement, each with all its rows, the same draw for both models (Efron and Tibshirani, "An
# Introduction to the Bootstrap", 1993). Rows of a query depend on each other; queries do not.

SEED = 1
_BLOCK_CELLS = 4_000_000  # weights held at a time: 32 MB
_LEAST_DEFINED = 0.95
"""Share of the draws in which both metrics must be defined."""
_ROUNDING = 1e-12
"""A standard error below this is rounding: every query changed by the same."""


@dataclass(frozen=True, eq=False)
class PairedDifference:
    """Candidate minus incumbent, and the same of each draw, [R]; NaN in a draw where a metric is not defined."""

    difference: float
    draws: Float64s
    num_queries: int

    @property
    def standard_error(self) -> float:
        """Of the draws; NaN when fewer than 95 % of them are defined."""
        defined = self.draws[~np.isnan(self.draws)]
        if len(defined) < max(2, _LEAST_DEFINED * len(self.draws)) or self.num_queries < 2:
            return math.nan
        return float(defined.std(ddof=1)) * math.sqrt(self.num_queries / (self.num_queries - 1))

    def interval(self, confidence: float) -> tuple[float, float]:
        """Lower and upper end; each holds alone with the one-sided `confidence`. NaN without a standard error.

        Each end is the farther of two: difference -+ t * standard error, and Hall's correction of it for skewness
        ("On the Removal of Skewness by Transformation", JRSS B 1992). When a few queries lose a lot the first is
        too sure (with 100 queries of which 3 % lose 0.5, wrong in 17 % of cases instead of 5 %); when the spread is
        even and queries are few, the second is (8 %). The farther one is right or careful in both.
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
    """Differences of pairs (candidate, incumbent) by name, over the same Q queries in the same order.

    All are from the same draws; the same `seed` and `purpose`, such as the slice that is judged, give the same ones.
    """
    if not pairs:
        return {}
    num_queries = len(next(iter(pairs.values()))[0].counted)
    draws = {name: np.empty(resamples) for name in pairs}
    stream = np.random.default_rng([seed, hash63(purpose)])
    block = max(1, _BLOCK_CELLS // num_queries)
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        taken = stream.integers(0, num_queries, (size, num_queries))
        taken += np.arange(size)[:, None] * num_queries
        # [size, Q]: how often each query was taken in Q takes with replacement.
        weights = np.bincount(taken.ravel(), minlength=size * num_queries).reshape(size, -1).astype(np.float64)
        for name, (candidate, incumbent) in pairs.items():
            draws[name][start : start + size] = candidate.at(weights) - incumbent.at(weights)
    return {
        name: PairedDifference(
            value_of(candidate) - value_of(incumbent), draws[name], int((candidate.counted | incumbent.counted).sum())
        )
        for name, (candidate, incumbent) in pairs.items()
    }


def t_quantile(confidence: float, freedom: int) -> float:
    """Student's t by the expansion around the normal (Abramowitz and Stegun 26.7.5).

    Within 0.06 % from 10 degrees of freedom on, for confidences up to 0.9999.
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
    """Invert Hall's cubic transformation: return the quantile of a studentised value of this skewness."""
    if abs(skewness) < 1e-6:
        return quantile
    return 3 / skewness * (float(np.cbrt(1 + skewness * (quantile - skewness / 6))) - 1)


# What the gate says, in records that go into results and in lines for people.

Outcome = Literal["fail", "warn", "skipped", "pass"]
CheckKind = Literal["scores", "holdout", "incumbent", "comparison", "floor", "delta", "slice", "baseline", "golden"]

_SLICES_SHOWN: dict[Outcome, int] = {"fail": 1000, "warn": 1000, "skipped": 5, "pass": 0}
"""In lines for people, in this order; the others are counted."""


class GateCheck(Record):
    """One thing that was looked at. Figures that do not exist are null."""

    name: str = Field(description="Kind, metric and slice in one, unique within a verdict")
    kind: CheckKind
    outcome: Outcome = Field(description="fail refuses; warn is to be known; skipped is not applicable")
    reason: str = Field(description="One plain sentence")
    metric: str = ""
    slice: str = Field("", description="column=value, or the column when all its slices are meant; empty: all rows")
    candidate: float | None = None
    incumbent: float | None = None
    baseline: str = Field("", description="The tool it was compared with")
    baseline_value: float | None = None
    bound: float | None = Field(None, description="The floor, or the allowed drop")
    low: float | None = Field(None, description="Lower end of candidate minus incumbent or baseline")
    high: float | None = Field(None, description="Upper end; each end holds alone with the one-sided confidence")
    num_queries: int | None = Field(None, description="Queries that bear on the metric")
    needed_queries: int | None = Field(None, description="Queries it takes, where there are fewer")

    @property
    def judges(self) -> bool:
        """True if the candidate was held against something: a floor, or another model or tool with an interval."""
        return self.outcome == "pass" if self.kind == "floor" else self.low is not None


class Verdict(Record):
    """Promote or refuse, with every check."""

    promote: bool
    without_comparison: bool = Field(False, description="Promote although no check held the candidate against anything")
    advice: str = Field("", description="Which test split would give enough queries, where that is why it is refused")
    checks: tuple[GateCheck, ...]
    num_rows: int = Field(ge=0)
    num_queries: int = Field(ge=0)
    confidence: float = Field(description="One-sided confidence of each comparison over all rows")
    slice_confidence: float = Field(description="The same of each slice, so that all of them together have the former")
    baseline_confidence: float | None = Field(None, description="The same of each comparison with a baseline")
    resamples: int
    seed: int

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it was refused; of a promotion, what was shown over all rows and what was not."""
        if not self.promote:
            return tuple(check.reason for check in self.checks if check.outcome == "fail")
        kept = ("warn", "pass") if self.without_comparison else ("warn", "pass", "skipped")
        return tuple(
            check.reason
            for check in self.checks
            if check.outcome in kept and (check.kind != "slice" or check.outcome == "warn")
        )

    def lines(self) -> list[str]:
        """For a terminal: the verdict, then what refuses, what to know and what passed; good slices are counted."""
        head = (
            "refuse" if not self.promote else "promote WITHOUT a comparison" if self.without_comparison else "promote"
        )
        lines = [f"{head}: {self.counts} ({self.num_queries:,} queries, {self.num_rows:,} rows)"]
        for outcome, shown in _SLICES_SHOWN.items():
            found = [check for check in self.checks if check.outcome == outcome]
            hidden = [check for check in found if check.kind == "slice"][shown:]
            lines += [f"  {outcome:<7} {check.reason}" for check in found if check not in hidden]
            lines += [f"  {outcome:<7} {len(hidden):,} comparisons of slices"] if hidden else []
        return [*lines, f"  {self.advice}"] if self.advice else lines

    @property
    def counts(self) -> str:
        """`3 checks passed, 1 warning, 1 not applicable`."""
        number = Counter(check.outcome for check in self.checks)
        said = [f"{number['fail']} failed"] if number["fail"] else []
        said += [f"{number['pass']} {'check' if number['pass'] == 1 else 'checks'} passed"]
        said += [f"{number['warn']} {'warning' if number['warn'] == 1 else 'warnings'}"] if number["warn"] else []
        said += [f"{number['skipped']} not applicable"] if number["skipped"] else []
        return ", ".join(said)


@dataclass(frozen=True)
class Comparison:
    """One metric of both models, over all rows or those of one slice (`column=value`).

    `baseline`: the name of the tool that stands in the place of the incumbent.
    """

    metric: MetricName
    allowed: float
    candidate: Measured | Missing
    incumbent: Measured | Missing
    slice: str = ""
    baseline: str = ""

    @property
    def name(self) -> str:
        """Unique within a verdict."""
        return " ".join(word for word in (self.kind, self.baseline, self.metric.text, self.slice) if word)

    @property
    def kind(self) -> CheckKind:
        return "baseline" if self.baseline else "slice" if self.slice else "delta"

    @property
    def num_queries(self) -> int:
        """Queries that bear on it with both models; 0 where it cannot be computed."""
        return min(self.candidate.num_queries, self.incumbent.num_queries)

    @property
    def statistics(self) -> tuple[Statistic, Statistic]:
        """Of candidate and incumbent. Raises ValueError for a comparison that `not_comparable` names."""
        if isinstance(self.candidate, Missing) or isinstance(self.incumbent, Missing):
            raise ValueError(f"{self.name} was not measured for both models")
        return self.candidate.statistic, self.incumbent.statistic

    def check(
        self,
        outcome: Outcome,
        reason: str,
        interval: tuple[float, float] | None = None,
        title: str = "",
        min_queries: int = 0,
    ) -> GateCheck:
        """`min_queries`: how many must bear on it, where it could be measured and that is why it is not judged."""
        measured = isinstance(self.candidate, Measured) and isinstance(self.incumbent, Measured)
        low, high = interval or (math.nan, math.nan)
        other = self.incumbent.value
        other_side = f" against {self.baseline}" if self.baseline else f" of {self.slice}" if self.slice else ""
        return GateCheck(
            name=self.name,
            kind=self.kind,
            outcome=outcome,
            reason=f"{title or self.metric.text + other_side}: {reason}",
            metric=self.metric.text,
            slice=self.slice,
            candidate=self.candidate.value,
            incumbent=None if self.baseline else other,
            baseline=self.baseline,
            baseline_value=other if self.baseline else None,
            bound=self.allowed,
            low=None if math.isnan(low) else low,
            high=None if math.isnan(high) else high,
            num_queries=self.num_queries,
            needed_queries=min_queries if measured and self.num_queries < min_queries else None,
        )


def not_comparable(comparison: Comparison, min_queries: int) -> str:
    """Return why a comparison is impossible, or nothing."""
    other = comparison.baseline or "the incumbent"
    for role, side in (("the candidate", comparison.candidate), (other, comparison.incumbent)):
        if isinstance(side, Missing):
            return f"cannot be computed for {role}: {side.reason}"
    if comparison.num_queries < min_queries:
        return f"not enough test queries: {comparison.num_queries:,}, at least {min_queries:,} needed"
    return ""


def judge_overall(comparison: Comparison, difference: PairedDifference, confidence: float) -> GateCheck:
    """Require the candidate to be shown not to be worse by more than allowed (non-inferiority)."""
    interval, seen, change, worst, best = _losses(comparison, difference, confidence)
    if math.isnan(worst):
        return comparison.check("fail", f"{seen}; not defined in enough bootstrap draws to say how sure that is")
    allowed, sure = comparison.allowed, f"with {confidence:.1%} confidence"
    if worst <= allowed:
        shown = "better" if worst < 0 else "not worse" if worst == 0 else f"at most {worst:.4f} worse"
        return comparison.check("pass", f"{seen}; {sure} {shown} ({allowed:g} is allowed)", interval)
    if best > allowed:
        reason = f"{seen}; {sure} at least {best:.4f} worse, {allowed:g} is allowed"
        return comparison.check("fail", reason, interval)
    reason, takes = f"{seen}; not shown to be at most {allowed:g} worse: {sure} it is at most {worst:.4f} worse", 0
    room, num_queries = allowed - change, comparison.num_queries
    if room > 0:  # so many queries would show a difference like this one to be allowed
        spread = t_quantile(confidence, num_queries - 1) * difference.standard_error
        needed = math.ceil(num_queries * (spread / room) ** 2)
        if needed > num_queries:  # else skewness decided, not the spread
            takes = needed
            reason += (
                f"; it takes about {needed:,} queries to show a difference like this one, there are {num_queries:,}"
            )
    return comparison.check("fail", reason, interval, min_queries=takes)


def judge_refusal(
    comparison: Comparison, difference: PairedDifference, confidence: float, worse: Outcome = "fail"
) -> GateCheck:
    """Refuse only if a slice is shown to be worse by more than allowed, or a baseline to be better.

    Few queries show little. `worse`: the outcome where that is shown.
    """
    interval, seen, change, _, best = _losses(comparison, difference, confidence)
    allowed, tool, on = comparison.allowed, comparison.baseline, f" on {comparison.metric.text}"
    limit = f", {allowed:g} is allowed" if allowed else ""
    if math.isnan(best):
        reason = f"{seen}; not defined in enough bootstrap draws to say how sure that is"
        return comparison.check("skipped", reason, interval, title=tool and f"{tool}{on}")
    if best > allowed:
        reason = f"{seen}; with {confidence:.2%} confidence at least {best:.4f} worse{limit}"
        return comparison.check(worse, reason, interval, title=tool and f"{tool} is better{on}")
    if change > allowed:
        reason = f"{seen}{limit}; {comparison.num_queries:,} queries do not tell it from chance"
        return comparison.check("warn", reason, interval, title=tool and f"{tool} may be better{on}")
    if not tool:
        return comparison.check("pass", f"{seen}, {allowed:g} worse is allowed", interval)
    title = f"beats {tool}{on}" if change < 0 else f"{tool} is not better{on}"
    return comparison.check("pass", f"{seen}{limit}", interval, title=title)


def _losses(
    comparison: Comparison, difference: PairedDifference, confidence: float
) -> tuple[tuple[float, float], str, float, float, float]:
    """Return the interval, the values in words, and by how much the candidate is worse: measured, at worst, at best."""
    low, high = interval = difference.interval(confidence)
    change, worst, best = -difference.difference, -low, -high
    if comparison.metric.lower_is_better:
        change, worst, best = difference.difference, high, low
    text = "the same" if change == 0 else f"{abs(change):.4f} {'worse' if change > 0 else 'better'}"
    return (
        interval,
        f"{comparison.candidate.value:.4f} against {comparison.incumbent.value:.4f}, {text}",
        change,
        worst,
        best,
    )


# One of the two models that are compared: its scores and what belongs to them.


@dataclass(frozen=True, eq=False)
class Side:
    """Scored rows of a model, its threshold (of two labels, chosen on valid), and figures of retrieval by query."""

    rows: ScoredRows
    config: MetricsConfig
    threshold: float | None = None
    retrieval: PerQuery | None = None

    @cached_property
    def metrics(self) -> RowMetrics:
        return RowMetrics(self.rows, self.config, self.threshold)

    def measure(self, name: MetricName) -> Measured | Missing:
        return measure_retrieval(self.retrieval, name) if name.of_retrieval else self.metrics.measure(name)

    def select(self, mask: Bools) -> "Side":
        """Return the rows where `mask` [N] is true; retrieval is not known by row."""
        return replace(self, rows=self.rows.select(mask), retrieval=None)


def check_same_holdout(candidate: Side, incumbent: Side) -> None:
    """Raise DataError unless both are scores of the same rows in the same order, and of the same queries."""
    ours, theirs = candidate.rows, incumbent.rows
    names = ("labels", "query_id", "label", "gain")
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    if candidate.retrieval is not None and incumbent.retrieval is not None:
        pairs.append(("queries of retrieval", candidate.retrieval.query_id, incumbent.retrieval.query_id))
    for name, one, other in pairs:
        if not np.array_equal(one, other):
            raise DataError(
                f"candidate and incumbent were not scored on the same holdout: the {name}, {len(one):,} and"
                f" {len(other):,}, differ",
                expected="the same labels, rows and queries of both",
                next_command="run trnpipe evaluate again; for other labels set data.labels to those of the incumbent"
                " and train again, or --evaluate.incumbent none",
            )
