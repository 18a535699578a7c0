"""The gate: may this candidate replace the model in production?

Four rules, each with its burden of proof; how often each errs is measured by bench/gate_rates.py.

1. Floors are met by the measured value.
2. Over all rows the candidate must be shown, with the confidence, not to be worse than the incumbent by more than is
   allowed, in every metric compared. One that is worse by more in any of them is promoted with a chance of at most
   1 - confidence, however many metrics there are. A holdout too small to show anything refuses.
3. A slice refuses when it is shown to be worse by more than is allowed. Bonferroni shares 1 - confidence among all
   comparisons of slices: a candidate that is worse nowhere is refused with at most that chance, however many slices
   there are. Slices with few queries are named, not judged.
4. A simple tool (BM25, boosting) that is shown to be better refuses a first model, and by default only warns of a later
   one. Bonferroni shares 1 - confidence among all these comparisons: a candidate that is worse than no baseline is
   refused with at most that chance.

A drop that is allowed each time adds up over many promotions; floors stop that.
"""

from collections.abc import Sequence

from pipeline.core.errors import DataError
from pipeline.evaluate.bootstrap import paired_bootstrap
from pipeline.evaluate.config import GateConfig, MetricsConfig
from pipeline.evaluate.gate.baselines import Baseline, baseline_checks
from pipeline.evaluate.gate.compare import Comparison, judge_overall, not_comparable
from pipeline.evaluate.gate.floors import floor_checks
from pipeline.evaluate.gate.side import Side, check_same_holdout
from pipeline.evaluate.gate.slices import slice_checks
from pipeline.evaluate.gate.verdict import GateCheck, Outcome, Verdict
from pipeline.evaluate.metrics.names import MetricName
from pipeline.evaluate.scored import PerQuery, ScoredRows


def judge(
    candidate: ScoredRows,
    incumbent: ScoredRows | None,
    config: GateConfig,
    *,
    metrics: MetricsConfig,
    candidate_threshold: float | None = None,
    incumbent_threshold: float | None = None,
    candidate_retrieval: PerQuery | None = None,
    incumbent_retrieval: PerQuery | None = None,
    baselines: Sequence[Baseline] = (),
    seed: int = 0,
) -> Verdict:
    """Judge a candidate against the incumbent on the same rows. The same input gives the same verdict.

    Args:
        candidate: its scores; the slices are taken from here.
        incumbent: scores of the model in production, None when there is none.
        config: what is judged, and how strictly.
        metrics: what counts as relevant, and the bins of the calibration error.
        candidate_threshold: of two labels, its threshold, chosen on valid (`best_threshold`).
        incumbent_threshold: the same of the incumbent.
        candidate_retrieval: figures of each query, for metrics called retrieval_...
        incumbent_retrieval: the same of the incumbent.
        baselines: simple tools, on the same rows and queries.
        seed: of the bootstrap.

    Raises:
        DataError: no rows, or the two were not scored on the same holdout.
    """
    if not candidate.num_rows:
        raise DataError("the holdout is empty", expected="rows to judge the candidate by")
    ours = Side(candidate, metrics, candidate_threshold, candidate_retrieval)
    theirs = None
    if incumbent is not None:
        theirs = Side(incumbent, metrics, incumbent_threshold, incumbent_retrieval)
        check_same_holdout(ours, theirs)
    if unusable := _unusable_scores(ours, theirs):
        checks, slice_confidence, baseline_confidence = unusable, config.confidence, None
    else:
        checks, slice_confidence = _checks(ours, theirs, config, seed)
        against, baseline_confidence = baseline_checks(ours, baselines, config, first=theirs is None, seed=seed)
        checks += against
    return Verdict(
        promote=all(check.outcome != "fail" for check in checks),
        checks=tuple(checks),
        num_rows=candidate.num_rows,
        num_queries=candidate.num_queries,
        confidence=config.confidence,
        slice_confidence=slice_confidence,
        baseline_confidence=baseline_confidence,
        resamples=config.resamples,
        seed=seed,
    )


def _checks(ours: Side, theirs: Side | None, config: GateConfig, seed: int) -> tuple[list[GateCheck], float]:
    """Rules 1 to 3: all checks, and the confidence of one comparison of a slice."""
    checks = floor_checks(ours, config)
    if theirs is None:
        return [*checks, _without_incumbent(config)], config.confidence
    checks += _over_all_rows(ours, theirs, config, seed)
    slices, confidence = slice_checks(ours, theirs, config, seed)
    return [*checks, *slices], confidence


def _unusable_scores(ours: Side, theirs: Side | None) -> list[GateCheck]:
    """A failed check for each model with NaN or infinite scores: nothing can be said of it."""
    checks = []
    for role, side in (("candidate", ours), ("incumbent", theirs)):
        if side is not None and (bad := int(side.rows.unusable.sum())):
            reason = f"{bad:,} of {side.rows.num_rows:,} rows have NaN or infinite scores of the {role}"
            checks.append(GateCheck(name=f"scores {role}", kind="scores", outcome="fail", reason=reason))
    return checks


def _without_incumbent(config: GateConfig) -> GateCheck:
    outcome: Outcome = "pass"
    reason = "no model is in production: only floors are judged"
    if config.without_incumbent == "refuse":
        outcome, reason = "fail", "no model is in production, and gate.without_incumbent is refuse"
    elif not config.floors:
        outcome, reason = "warn", "no model is in production and gate.floors is empty: any candidate passes"
    return GateCheck(name="incumbent", kind="incumbent", outcome=outcome, reason=reason)


def _over_all_rows(ours: Side, theirs: Side, config: GateConfig, seed: int) -> list[GateCheck]:
    """Rule 2. Metrics of rows share their draws, and so do those of retrieval: these have queries of their own."""
    if not config.drops:
        reason = "gate.drops is empty: the candidate is not compared with the incumbent over all rows"
        return [GateCheck(name="incumbent", kind="incumbent", outcome="warn", reason=reason)]
    names = [(MetricName.parse(text), allowed) for text, allowed in config.drops.items()]
    comparisons = [Comparison(name, allowed, ours.measure(name), theirs.measure(name)) for name, allowed in names]
    checks: list[GateCheck] = []
    for of_retrieval in (False, True):
        group = [one for one in comparisons if one.metric.of_retrieval is of_retrieval]
        reasons = {one.name: not_comparable(one, config.min_queries) for one in group}
        pairs = {one.name: one.statistics for one in group if not reasons[one.name]}
        purpose = "retrieval" if of_retrieval else "rows"
        found = paired_bootstrap(pairs, resamples=config.resamples, seed=seed, purpose=purpose)
        for one in group:
            if reason := reasons[one.name]:
                checks.append(one.check("fail", reason))
            else:
                checks.append(judge_overall(one, found[one.name], config.confidence))
    return checks
