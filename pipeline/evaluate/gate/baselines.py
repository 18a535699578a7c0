"""Comparisons with simple tools: is one of them shown to be better than the candidate?"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.evaluate.bootstrap import paired_bootstrap
from pipeline.evaluate.config import GateConfig
from pipeline.evaluate.gate.compare import Comparison, judge_baseline, not_comparable
from pipeline.evaluate.gate.side import Side, check_same_holdout
from pipeline.evaluate.gate.verdict import GateCheck, Outcome
from pipeline.evaluate.metrics.measure import Measured
from pipeline.evaluate.metrics.names import MetricName
from pipeline.evaluate.metrics.statistic import Missing
from pipeline.evaluate.scored import PerQuery, ScoredRows


@dataclass(frozen=True, eq=False)
class Baseline:
    """A simple tool on the same holdout: what it says of rows, what it finds, or why it was not scored."""

    name: str
    rows: ScoredRows | None = None
    threshold: float | None = None
    retrieval: PerQuery | None = None
    missing: str = ""


def baseline_checks(
    candidate: Side, baselines: Sequence[Baseline], config: GateConfig, *, first: bool, seed: int
) -> tuple[list[GateCheck], float]:
    """Every comparison with every baseline, and the confidence of each that gives all together `config.confidence`.

    `first`: no model is in production. A metric that neither side has is left out.
    """
    action = config.first_baselines if first else config.baselines
    if action == "off":
        return [], config.confidence
    worse: Outcome = "fail" if action == "refuse" else "warn"
    checks = [_not_scored(one) for one in baselines if one.missing]
    open_ones: list[Comparison] = []
    for comparison in _comparisons(candidate, baselines, config):
        if isinstance(comparison.candidate, Missing) and isinstance(comparison.incumbent, Measured):
            theirs = f"{comparison.baseline} has {comparison.incumbent.value:.4f}"
            checks.append(comparison.check(worse, f"the candidate has none ({comparison.candidate.reason}), {theirs}"))
        elif reason := not_comparable(comparison, config.min_queries):
            checks.append(comparison.check("skipped", reason))
        else:
            open_ones.append(comparison)
    confidence = 1 - (1 - config.confidence) / max(1, len(open_ones))
    for of_retrieval in (False, True):  # queries of their own, so draws of their own
        group = [one for one in open_ones if one.metric.of_retrieval is of_retrieval]
        purpose = "baselines of retrieval" if of_retrieval else "baselines of rows"
        pairs = {one.name: one.statistics for one in group}
        found = paired_bootstrap(pairs, resamples=config.resamples, seed=seed, purpose=purpose)
        checks += [judge_baseline(one, found[one.name], confidence, worse) for one in group]
    return checks, confidence


def _comparisons(candidate: Side, baselines: Sequence[Baseline], config: GateConfig) -> list[Comparison]:
    """Every metric that either side of it has, of what the baseline does."""
    found = []
    for baseline in baselines:
        rows = candidate.rows if baseline.rows is None else baseline.rows
        theirs = Side(rows, candidate.config, baseline.threshold, baseline.retrieval)
        check_same_holdout(candidate, theirs)
        for text, allowed in config.baseline_drops.items():
            name = MetricName.parse(text)
            if (baseline.retrieval if name.of_retrieval else baseline.rows) is None:
                continue
            sides = (candidate.measure(name), theirs.measure(name))
            if any(isinstance(side, Measured) for side in sides):
                found.append(Comparison(name, allowed, *sides, baseline=baseline.name))
    return found


def _not_scored(baseline: Baseline) -> GateCheck:
    return GateCheck(
        name=f"baseline {baseline.name}",
        kind="baseline",
        outcome="skipped",
        reason=f"{baseline.name} was not scored: {baseline.missing}",
        baseline=baseline.name,
    )
