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

Golden queries are judged beside these rules (evaluate/golden.py).

A first model that no floor and no baseline could judge is refused too, unless `gate.first_without_comparison` is set:
then the verdict says that it is promoted without a comparison.

A drop that is allowed each time adds up over many promotions; floors stop that.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from pipeline.core.optional import install_command
from pipeline.data.token_sets import SPLITS, Split, TokenSetInfo
from pipeline.evaluate.config import EvaluateConfig, GateConfig, MetricName
from pipeline.evaluate.gate.compare import (
    SEED,
    Comparison,
    GateCheck,
    Outcome,
    PairedDifference,
    Side,
    Verdict,
    check_same_holdout,
    judge_overall,
    judge_refusal,
    not_comparable,
    paired_bootstrap,
)
from pipeline.evaluate.metrics.measure import Measured
from pipeline.evaluate.metrics.scored_rows import Missing, PerQuery, ScoredRows

# Floors: values the candidate must reach whatever the incumbent does.


def floor_checks(candidate: Side, config: GateConfig) -> list[GateCheck]:
    checks = []
    for text, bound in config.floors.items():
        name, is_met, needed = MetricName.parse(text), False, None
        found = candidate.measure(name)
        if isinstance(found, Missing):
            reason = f"cannot be computed: {found.reason}"
        elif found.num_queries < config.min_queries:
            needed = config.min_queries
            reason = f"not enough test queries: {found.num_queries:,}, at least {needed:,} needed"
        else:
            is_met = found.value <= bound if name.lower_is_better else found.value >= bound
            side = "at most" if name.lower_is_better else "at least"
            reason = f"{found.value:.4f}, {side} {bound:g} is {'asked' if is_met else 'needed'}"
        checks.append(
            GateCheck(
                name=f"floor {name.text}",
                kind="floor",
                outcome="pass" if is_met else "fail",
                reason=f"{name.text}: {reason}",
                metric=name.text,
                candidate=found.value,
                bound=bound,
                num_queries=found.num_queries or None,
                needed_queries=needed,
            )
        )
    return checks


# Comparisons slice by slice. Which slices are large enough is decided before anything is measured.

_SHOWN = 3
"""Small slices that are named."""


def slice_checks(candidate: Side, incumbent: Side, config: GateConfig, seed: int) -> tuple[list[GateCheck], float]:
    """Every comparison of every slice, and the confidence of each that gives all together `config.confidence`."""
    if not config.slice_drops:
        return [], config.confidence
    checks: list[GateCheck] = []
    open_slices: dict[str, list[Comparison]] = {}
    for column, values in candidate.rows.slices.items():
        codes, names = values.codes, values.names
        queries = np.unique(np.stack([codes, candidate.rows.query_id])[:, codes >= 0], axis=1)[0]
        present, count = np.unique(queries, return_counts=True)
        if small := [names[code] for code in present[count < config.min_slice_queries]]:
            shown = ", ".join(small[:_SHOWN]) + (", ..." if len(small) > _SHOWN else "")
            slices = "1 slice has" if len(small) == 1 else f"{len(small):,} slices have"
            few = f"{slices} fewer than {config.min_slice_queries:,} queries and neither refuse nor promote ({shown})"
            name, reason = f"slice {column}", f"{column}: {few}"
            checks.append(GateCheck(name=name, kind="slice", outcome="skipped", reason=reason, slice=column))
        for code in present[count >= config.min_slice_queries]:
            one_slice, mask = f"{column}={names[code]}", codes == code
            ours, theirs = candidate.select(mask), incumbent.select(mask)
            open_slices[one_slice] = []
            for text, allowed in config.slice_drops.items():
                metric = MetricName.parse(text)
                comparison = Comparison(metric, allowed, ours.measure(metric), theirs.measure(metric), one_slice)
                if reason := not_comparable(comparison, config.min_slice_queries):
                    # To know, when it is the candidate that leaves a metric without a value the incumbent has.
                    only_ours = isinstance(comparison.candidate, Missing) and isinstance(comparison.incumbent, Measured)
                    checks.append(comparison.check("warn" if only_ours else "skipped", reason))
                else:
                    open_slices[one_slice].append(comparison)
    confidence = 1 - (1 - config.confidence) / max(1, sum(map(len, open_slices.values())))
    for one_slice, comparisons in open_slices.items():
        found = _differences(comparisons, config, seed, f"slice {one_slice}")
        checks += [judge_refusal(one, found[one.name], confidence) for one in comparisons]
    return checks, confidence


def _differences(
    comparisons: list[Comparison], config: GateConfig, seed: int, of_rows: str, of_retrieval: str = ""
) -> dict[str, PairedDifference]:
    """By name of the comparison. Metrics of rows share their draws, and so do those of retrieval: these have queries of
    their own. `of_rows`, `of_retrieval`: the purposes of both streams."""
    found: dict[str, PairedDifference] = {}
    for searched, purpose in ((False, of_rows), (True, of_retrieval)):
        pairs = {one.name: one.statistics for one in comparisons if one.metric.of_retrieval is searched}
        found |= paired_bootstrap(pairs, resamples=config.resamples, seed=seed, purpose=purpose)
    return found


# Comparisons with simple tools: is one of them shown to be better than the candidate?


@dataclass(frozen=True, eq=False)
class Baseline:
    """A simple tool on the same holdout: what it says of rows, what it finds, or why it was not scored.

    `weak`: why it is no proof to beat it, such as a search by words that finds nothing for most queries; else empty.
    """

    name: str
    rows: ScoredRows | None = None
    threshold: float | None = None
    retrieval: PerQuery | None = None
    missing: str = ""
    weak: str = ""


def baseline_checks(
    candidate: Side, baselines: Sequence[Baseline], config: GateConfig, *, first: bool, seed: int
) -> tuple[list[GateCheck], float]:
    """Every comparison with every baseline, and the confidence of each that gives all together `config.confidence`.

    `first`: there is no incumbent. f1 is of two labels, and left out where there are more. A weak baseline refuses as
    any other does, but passes nothing.
    """
    action = config.first_baselines if first else config.baselines
    if action == "off":
        return [], config.confidence
    worse: Outcome = "fail" if action == "refuse" else "warn"
    checks: list[GateCheck] = []
    for one in (one for one in baselines if one.missing):
        name, reason = f"baseline {one.name}", f"{one.name} was not scored: {one.missing}"
        checks.append(GateCheck(name=name, kind="baseline", outcome="skipped", reason=reason, baseline=one.name))
    open_ones: list[Comparison] = []
    for one in baselines:
        rows = candidate.rows if one.rows is None else one.rows
        other = Side(rows, candidate.config, one.threshold, one.retrieval)
        check_same_holdout(candidate, other)
        for text, allowed in config.baseline_drops.items():
            metric = MetricName.parse(text)
            if (one.retrieval if metric.of_retrieval else one.rows) is None:
                continue
            ours, theirs = candidate.measure(metric), other.measure(metric)
            comparison = Comparison(metric, allowed, ours, theirs, baseline=one.name)
            if isinstance(ours, Missing) and isinstance(theirs, Measured):
                reason = f"the candidate has none ({ours.reason}), {one.name} has {theirs.value:.4f}"
                checks.append(comparison.check(worse, reason))
            elif metric.text == "f1" and len(candidate.rows.labels) != 2:
                continue
            elif reason := not_comparable(comparison, config.min_queries):
                checks.append(comparison.check("skipped", reason, min_queries=config.min_queries))
            else:
                open_ones.append(comparison)
    confidence = 1 - (1 - config.confidence) / max(1, len(open_ones))
    open_ones.sort(key=lambda each: each.metric.of_retrieval)
    found = _differences(open_ones, config, seed, "baselines of rows", "baselines of retrieval")
    weak = {one.name: one.weak for one in baselines}
    for each in open_ones:
        check = judge_refusal(each, found[each.name], confidence, worse)
        if check.outcome == "pass" and (why := weak.get(each.baseline)):
            # Without its interval: nothing was shown, so it does not count as a comparison.
            check = each.check("warn", why, title=f"{each.baseline} is no comparison on {each.metric.text}")
        checks.append(check)
    return checks, confidence


def judge(
    ours: Side,
    theirs: Side | None,
    config: GateConfig,
    *,
    searched: bool = True,
    baselines: Sequence[Baseline] = (),
    warnings: Sequence[str] = (),
    golden: GateCheck | None = None,
    seed: int = SEED,
) -> Verdict:
    """Judge a candidate against the incumbent, if there is one. The same input gives the same verdict.

    Slices are those of the candidate. `searched`: whether retrieval is evaluated at all. Baselines are of the same rows
    and queries. `warnings`: what makes figures of this holdout doubtful, to be repeated in the verdict. `golden`: the
    check of golden queries. Raises DataError for scores of another holdout.
    """
    if theirs is not None:
        check_same_holdout(ours, theirs)
    unusable = []  # a failed check for each model with NaN or infinite scores: nothing can be said of it
    for role, side in (("candidate", ours), ("incumbent", theirs)):
        if side is not None and (bad := int(side.rows.unusable.sum())):
            reason = f"{bad:,} of {side.rows.num_rows:,} rows have NaN or infinite scores of the {role}"
            unusable.append(GateCheck(name=f"scores {role}", kind="scores", outcome="fail", reason=reason))
    slice_confidence, baseline_confidence, without_comparison = config.confidence, None, False
    checks: list[GateCheck] = unusable
    if not unusable:
        checks = floor_checks(ours, config)
        if theirs is None:
            reason = "no production model: the first one is held against floors and baselines"
            checks.append(GateCheck(name="incumbent", kind="incumbent", outcome="skipped", reason=reason))
        else:
            checks += _over_all_rows(ours, theirs, config.drops_for(searched=searched), config, seed)
            checks += _without_search(config, searched=searched)
            slices, slice_confidence = slice_checks(ours, theirs, config, seed)
            checks += slices
        against, baseline_confidence = baseline_checks(ours, baselines, config, first=theirs is None, seed=seed)
        checks += against
        without_comparison = not any(check.judges or check.outcome == "fail" for check in checks)
        if without_comparison:
            checks.append(nothing_compared(against, config, first=theirs is None))
    checks += [golden] if golden else []
    checks += [
        GateCheck(name=f"holdout {number}", kind="holdout", outcome="warn", reason=text)
        for number, text in enumerate(warnings, start=1)
    ]
    promote = all(check.outcome != "fail" for check in checks)
    return Verdict(
        promote=promote,
        without_comparison=promote and without_comparison,
        checks=tuple(checks),
        num_rows=ours.rows.num_rows,
        num_queries=ours.rows.num_queries,
        confidence=config.confidence,
        slice_confidence=slice_confidence,
        baseline_confidence=baseline_confidence,
        resamples=config.resamples,
        seed=seed,
    )


def _over_all_rows(
    ours: Side, theirs: Side, drops: Mapping[str, float], config: GateConfig, seed: int
) -> list[GateCheck]:
    """Rule 2."""
    if not drops:
        reason = "gate.drops is empty: the candidate is not compared with the incumbent over all rows"
        return [GateCheck(name="incumbent", kind="incumbent", outcome="warn", reason=reason)]
    names = sorted(map(MetricName.parse, drops), key=lambda name: name.of_retrieval)
    comparisons = [Comparison(name, drops[name.text], ours.measure(name), theirs.measure(name)) for name in names]
    reasons = {one.name: not_comparable(one, config.min_queries) for one in comparisons}
    found = _differences([one for one in comparisons if not reasons[one.name]], config, seed, "rows", "retrieval")
    checks = []
    for one in comparisons:
        if reason := reasons[one.name]:
            checks.append(one.check("fail", reason, min_queries=config.min_queries))
        else:
            checks.append(judge_overall(one, found[one.name], config.confidence))
    return checks


def _without_search(config: GateConfig, *, searched: bool) -> list[GateCheck]:
    """Note that search, which the vectors serve, is not compared with the incumbent's."""
    if any(MetricName.parse(text).of_retrieval for text in config.drops_for(searched=searched)) or not config.drops:
        return []
    outcome: Outcome = "skipped"
    reason = "evaluate.retrieval.enabled is false"
    if searched:
        outcome, reason = "warn", "gate.drops names no metric of retrieval"
    text = f"search with the vectors is not compared with that of the incumbent: {reason}"
    return [GateCheck(name="search", kind="comparison", outcome=outcome, reason=text)]


def nothing_compared(against: Sequence[GateCheck], config: GateConfig, *, first: bool) -> GateCheck:
    """Check a candidate that nothing judged: a first one is refused unless the settings promote it.

    A later one comes here only with empty `gate.drops`: whoever sets that wants no comparison.
    """
    if not first:
        reason = "promoted WITHOUT a comparison: gate.drops is empty"
        return GateCheck(name="comparison", kind="comparison", outcome="warn", reason=reason)
    few = [check for check in against if check.needed_queries is not None]
    reasons = [check.reason for check in against if check.needed_queries is None]
    num_queries = max((check.num_queries or 0 for check in few), default=None)
    if few:
        tools = " and ".join(dict.fromkeys(check.baseline for check in few))
        seen = f"{num_queries}, at least {config.min_queries} needed"
        reasons.append(f"not enough test queries to compare with {tools}: {seen}")
    if not against:
        off = config.first_baselines == "off"
        reasons = ["gate.first_baselines is off" if off else "no baseline was scored (evaluate.baselines)"]
    why = "; ".join(["no production model", *([] if config.floors else ["no gate.floors"]), *reasons])
    allowed = config.first_without_comparison
    head = "promoted WITHOUT a comparison (gate.first_without_comparison)" if allowed else "nothing to compare with"
    return GateCheck(
        name="comparison",
        kind="comparison",
        outcome="warn" if allowed else "fail",
        reason=f"{head}: {why}",
        num_queries=num_queries,
        needed_queries=config.min_queries if few else None,
    )


# What to do about a refusal: which test split would give enough queries, and what may help else.

FRACTIONS = tuple(step / 20 for step in range(1, 9))
"""Offered as `data.test_fraction` or `data.valid_fraction`: 0.05 to 0.4, which leaves most queries for training."""
MIN_QUERIES = "lower --gate.min-queries"
_LATER = (
    "production was trained on queries that move into it: add --train.start scratch and --evaluate.leak warn, or"
    " promote on record with --evaluate.force-reason TEXT"
)


def count_queries(infos: Iterable[TokenSetInfo]) -> dict[Split, int]:
    """Count the queries of each split, once in each partition; empty if an earlier version did not count them."""
    judged = [info.judged for info in infos]
    counts: dict[Split, int] = {
        split: sum(sum(one[split].query_best.values()) for one in judged if split in one) for split in SPLITS
    }
    return counts if any(judged) else {}


def fraction_for(total: int, needed: int) -> float | None:
    """Return the smallest share of `total` queries that holds `needed` of them, with room for the spread of a hash."""
    enough = (share for share in FRACTIONS if share * total - 2 * sqrt(share * (1 - share) * total) >= needed)
    return next(enough, None)


def size_advice(split: Split, queries: int, needed: int, counts: Mapping[Split, int], remedy: str = MIN_QUERIES) -> str:
    """Say what to do about a `split` of which too few `queries` bear on a metric.

    `counts`: queries of each split. Those of the others are taken to bear on the metric as often as those of `split`.
    `remedy`: what helps as well as more queries.
    """
    few = f"split {split} has {queries:,} queries to judge by, about {needed:,} are needed"
    total = sum(counts.values())
    if counts.get(split):
        total = round(total * min(1.0, queries / counts[split]))
    share = fraction_for(total, needed)
    if share is not None:
        return (
            f"{few}: where no split column decides, --data.{split}-fraction {share:g} gives about"
            f" {round(share * total):,} of {total:,} (prepare and train again with it); or {remedy}"
        )
    if total:
        few += f": all splits together have about {total:,}, so no {split} split is large enough"
    return f"{few}: judge more queries, or {remedy}"


def verdict_advice(
    verdict: Verdict,
    config: EvaluateConfig,
    infos: Iterable[TokenSetInfo],
    *,
    split: Split,
    rows: int,
    rows_in_split: int,
    all_partitions: bool,
    later: bool,
) -> str:
    """Say how a candidate can be judged that is refused because of too few queries; nothing for any other verdict.

    `rows`, `rows_in_split`: scored, and before evaluate.max_rows. `all_partitions`: the holdout is that of all
    partitions. `later`: there is an incumbent, which has seen the queries that another split would judge by.
    """
    few = [
        (check.needed_queries, check.num_queries or 0, check)
        for check in verdict.checks
        if check.outcome == "fail" and check.needed_queries
    ]
    if not few:
        return ""
    needed, queries, check = max(few, key=lambda one: one[0] / max(1, one[1]))
    remedy = MIN_QUERIES if check.kind != "delta" or check.low is None else "allow a larger drop (--gate.drops)"
    if check.kind == "comparison":
        remedy += ", or promote it unjudged (--gate.first-without-comparison)"
    if rows < rows_in_split:
        return f"evaluate.max_rows takes {rows:,} of {rows_in_split:,} rows of split {split}: raise it; or {remedy}"
    if not all_partitions:
        return f"only new partitions are judged: --evaluate.partitions all takes the others too; or {remedy}"
    if config.retrieval.catalogue and check.metric and MetricName.parse(check.metric).of_retrieval:
        return (
            f"the catalogue asks {queries:,} queries, about {needed:,} are needed: add items with other queries to"
            f" {config.retrieval.catalogue}, or raise --evaluate.retrieval.max-queries; or {remedy}"
        )
    advice = size_advice(split, queries, needed, count_queries(infos), remedy)
    return f"{advice}; {_LATER}" if later and f"--data.{split}-fraction" in advice else advice


def way_out(verdict: Verdict) -> str:
    """Say what may help a refused candidate."""
    failed = [check for check in verdict.checks if check.outcome == "fail"]
    if verdict.advice:
        return verdict.advice
    if any(check.kind == "comparison" for check in failed):
        return (
            f"let a baseline judge it (evaluate.baselines; boosting needs {install_command('sklearn')}), set a floor"
            " (--gate.floors ndcg@10=0.6), or --gate.first-without-comparison"
        )
    if any(check.name == "scores incumbent" or (check.kind == "delta" and check.incumbent is None) for check in failed):
        return "trnpipe registry rollback --reason TEXT, or on record --evaluate.force-reason TEXT"
    return "train again, or on record --evaluate.force-reason TEXT"
