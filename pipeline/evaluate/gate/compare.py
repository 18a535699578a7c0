"""Comparisons with the incumbent or a baseline: from two measurements and the bootstrap to a check with its reason."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.core.arrays import Bools
from pipeline.core.errors import DataError
from pipeline.evaluate.bootstrap import PairedDifference, t_quantile
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.gate.verdict import CheckKind, GateCheck, Outcome
from pipeline.evaluate.metrics.measure import Measured, RowMetrics, measure_retrieval
from pipeline.evaluate.metrics.names import MetricName
from pipeline.evaluate.metrics.statistic import Missing, Statistic
from pipeline.evaluate.scored import PerQuery, ScoredRows


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
    def title(self) -> str:
        if self.baseline:
            return f"{self.metric.text} against {self.baseline}"
        return f"{self.metric.text} of {self.slice}" if self.slice else self.metric.text

    @property
    def num_queries(self) -> int:
        """Queries that bear on it with both models; 0 where it cannot be computed."""
        sides = (self.candidate, self.incumbent)
        return min(one.num_queries if isinstance(one, Measured) else 0 for one in sides)

    @property
    def statistics(self) -> tuple[Statistic, Statistic]:
        """Of candidate and incumbent. Raises ValueError for a comparison that `not_comparable` names."""
        if isinstance(self.candidate, Missing) or isinstance(self.incumbent, Missing):
            raise ValueError(f"{self.title} was not measured for both models")
        return self.candidate.statistic, self.incumbent.statistic

    def check(
        self, outcome: Outcome, reason: str, interval: tuple[float, float] | None = None, title: str = ""
    ) -> GateCheck:
        """The record of this comparison."""
        low, high = interval or (math.nan, math.nan)
        other = _value(self.incumbent)
        return GateCheck(
            name=self.name,
            kind=self.kind,
            outcome=outcome,
            reason=f"{title or self.title}: {reason}",
            metric=self.metric.text,
            slice=self.slice,
            candidate=_value(self.candidate),
            incumbent=None if self.baseline else other,
            baseline=self.baseline,
            baseline_value=other if self.baseline else None,
            bound=self.allowed,
            low=None if math.isnan(low) else low,
            high=None if math.isnan(high) else high,
            num_queries=self.num_queries,
        )


def not_comparable(comparison: Comparison, min_queries: int) -> str:
    """Why there is nothing to compare; empty when there is."""
    other = comparison.baseline or "the incumbent"
    for role, side in (("the candidate", comparison.candidate), (other, comparison.incumbent)):
        if isinstance(side, Missing):
            return f"cannot be computed for {role}: {side.reason}"
    if comparison.num_queries < min_queries:
        return f"{comparison.num_queries:,} queries bear on it, {min_queries:,} are needed to tell it from chance"
    return ""


def judge_overall(comparison: Comparison, difference: PairedDifference, confidence: float) -> GateCheck:
    """The burden is on the candidate: it must be shown not to be worse by more than allowed (non-inferiority)."""
    interval = difference.interval(confidence)
    change, worst, best = _losses(comparison.metric, difference, interval)
    seen = _seen(comparison, change)
    if math.isnan(worst):
        return comparison.check("fail", f"{seen}; not defined in enough bootstrap draws to say how sure that is")
    allowed, sure = comparison.allowed, f"with {confidence:.1%} confidence"
    if worst <= allowed:
        shown = "better" if worst < 0 else "not worse" if worst == 0 else f"at most {worst:.4f} worse"
        return comparison.check("pass", f"{seen}; {sure} {shown} ({allowed:g} is allowed)", interval)
    if best > allowed:
        reason = f"{seen}; {sure} at least {best:.4f} worse, {allowed:g} is allowed"
        return comparison.check("fail", reason, interval)
    reason = f"{seen}; not shown to be at most {allowed:g} worse: {sure} it is at most {worst:.4f} worse"
    return comparison.check("fail", reason + _more_queries(comparison, difference, change, confidence), interval)


def judge_slice(comparison: Comparison, difference: PairedDifference, confidence: float) -> GateCheck:
    """The burden is on the refusal: a slice must be shown to be worse by more than allowed. Few queries show little."""
    interval = difference.interval(confidence)
    change, _, best = _losses(comparison.metric, difference, interval)
    seen, allowed = _seen(comparison, change), comparison.allowed
    if math.isnan(best):
        return comparison.check("skipped", f"{seen}; not defined in enough bootstrap draws to say how sure that is")
    if best > allowed:
        reason = f"{seen}; with {confidence:.2%} confidence at least {best:.4f} worse, {allowed:g} is allowed"
        return comparison.check("fail", reason, interval)
    if change > allowed:
        reason = f"{seen}, {allowed:g} is allowed; {comparison.num_queries:,} queries do not tell it from chance"
        return comparison.check("warn", reason, interval)
    return comparison.check("pass", f"{seen}, {allowed:g} worse is allowed", interval)


def judge_baseline(
    comparison: Comparison, difference: PairedDifference, confidence: float, worse: Outcome
) -> GateCheck:
    """The burden is on the refusal: the baseline must be shown to be better by more than allowed. `worse`: if it is."""
    interval = difference.interval(confidence)
    change, _, best = _losses(comparison.metric, difference, interval)
    seen, allowed = f"{comparison.metric.text} {_seen(comparison, change)}", comparison.allowed
    name = comparison.baseline
    if math.isnan(best):
        reason = f"{seen}; not defined in enough bootstrap draws to say how sure that is"
        return comparison.check("skipped", reason, title=name)
    limit = f", {allowed:g} is allowed" if allowed else ""
    if best > allowed:
        reason = f"{seen}; with {confidence:.2%} confidence at least {best:.4f} worse{limit}"
        return comparison.check(worse, reason, interval, title=f"{name} is better")
    if change > allowed:
        reason = f"{seen}{limit}; {comparison.num_queries:,} queries do not tell it from chance"
        return comparison.check("warn", reason, interval, title=f"{name} may be better")
    return comparison.check("pass", f"{seen}{limit}", interval, title=f"{name} is not better")


def _losses(
    metric: MetricName, difference: PairedDifference, interval: tuple[float, float]
) -> tuple[float, float, float]:
    """By how much the candidate is worse: as measured, at worst, at best."""
    if metric.lower_is_better:
        return difference.difference, interval[1], interval[0]
    return -difference.difference, -interval[0], -interval[1]


def _seen(comparison: Comparison, worse: float) -> str:
    candidate, incumbent = _value(comparison.candidate), _value(comparison.incumbent)
    change = "the same" if worse == 0 else f"{abs(worse):.4f} {'worse' if worse > 0 else 'better'}"
    return f"{candidate:.4f} against {incumbent:.4f}, {change}"


def _more_queries(comparison: Comparison, difference: PairedDifference, worse: float, confidence: float) -> str:
    """How many queries would show a difference like this one to be allowed; empty when none would."""
    room = comparison.allowed - worse
    if room <= 0:
        return ""
    spread = t_quantile(confidence, comparison.num_queries - 1) * difference.standard_error
    needed = math.ceil(comparison.num_queries * (spread / room) ** 2)
    if needed <= comparison.num_queries:  # skewness decided, not the spread
        return ""
    return (
        f"; it takes about {needed:,} queries to show a difference like this one, there are {comparison.num_queries:,}"
    )


def _value(side: Measured | Missing) -> float | None:
    return side.value if isinstance(side, Measured) else None


# One of the two models that are compared: its scores and what belongs to them.


@dataclass(frozen=True, eq=False)
class Side:
    """Scored rows, the threshold that belongs to the model, and its retrieval figures."""

    rows: ScoredRows
    config: MetricsConfig
    threshold: float | None
    retrieval: PerQuery | None

    @cached_property
    def metrics(self) -> RowMetrics:
        return RowMetrics(self.rows, self.config, self.threshold)

    def measure(self, name: MetricName) -> Measured | Missing:
        """One metric by name."""
        return measure_retrieval(self.retrieval, name) if name.of_retrieval else self.metrics.measure(name)

    def select(self, mask: Bools) -> "Side":
        """The rows where `mask` [N] is true; retrieval is not known by row."""
        return replace(self, rows=self.rows.select(mask), retrieval=None)


def check_same_holdout(candidate: Side, incumbent: Side) -> None:
    """Raises DataError unless both are scores of the same rows in the same order, and of the same queries."""
    ours, theirs = candidate.rows, incumbent.rows
    if ours.labels != theirs.labels:
        raise DataError(
            f"the candidate knows the labels {', '.join(ours.labels)}, the incumbent {', '.join(theirs.labels)}",
            expected="the same labels in the same order: else they are not scored on the same holdout",
            next_command="set data.labels to those of the incumbent and train again, or set --evaluate.incumbent none",
        )
    for name in ("query_id", "label", "gain"):
        if not np.array_equal(getattr(ours, name), getattr(theirs, name)):
            raise _differ(f"the {name} of {ours.num_rows:,} rows and of {theirs.num_rows:,} rows")
    if candidate.retrieval is not None and incumbent.retrieval is not None:
        queries, others = candidate.retrieval.query_id, incumbent.retrieval.query_id
        if not np.array_equal(queries, others):
            raise _differ(f"the queries of retrieval, {len(queries):,} and {len(others):,}")


def _differ(what: str) -> DataError:
    return DataError(
        f"candidate and incumbent were not scored on the same holdout: {what} differ",
        expected="both scored on the same rows",
        next_command="run trnpipe evaluate again",
    )
