"""The gate: decide whether the candidate may replace the production model.

The gate applies four rules, whose error rates are measured by bench/gate_rates.py:

1. Floors: each metric with a floor must reach it.
2. All rows: in every compared metric we must be confident that the candidate is worse than production by at most the
   allowed drop. As a result, a candidate that is worse by more than that in any metric is promoted with a probability
   of at most 1 - confidence, no matter how many metrics are compared. If the test split is too small to decide, the
   candidate is refused. With fewer than about 100 queries, a large loss in 3 % of them may go unnoticed, because the
   split may not contain any of them.
3. Slices: the candidate is refused if it is significantly worse than allowed in any slice. The Bonferroni correction
   divides 1 - confidence by the number of slice comparisons. This ensures that a candidate that is not worse in any
   slice is refused with at most that probability, no matter how many slices there are. Slices with few queries are
   listed but not judged.
4. Baselines: if BM25 or boosting is significantly better, a first model is refused. For later models this is only a
   warning by default. The Bonferroni correction is also applied to these comparisons.

In addition, the candidate is checked on the golden queries (see evaluate/golden.py).

If neither a floor nor a baseline could judge a first model, it is refused. Users can change this by setting
`gate.first_without_comparison`, in which case the verdict states that the model was promoted without a comparison.

Note that the allowed drops of many promotions can add up. Use floors to limit this.
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
    GateInput,
    Outcome,
    PairedDifference,
    Verdict,
    check_same_holdout,
    judge_overall,
    judge_refusal,
    not_comparable,
    paired_bootstrap,
)
from pipeline.evaluate.metrics.measure import Measured
from pipeline.evaluate.metrics.scored_rows import Missing, PerQuery, ScoredRows

# Floors, which the candidate must reach regardless of how good the production model is.


def floor_checks(candidate: GateInput, config: GateConfig) -> list[GateCheck]:
    """Check that each metric with a floor reaches it, and that it is based on enough queries."""
    checks = []
    for text, bound in config.floors.items():
        name, is_met, needed = MetricName.parse(text), False, None
        result = candidate.measure(name)
        if isinstance(result, Missing):
            reason = f"cannot be computed: {result.reason}"
        elif result.num_queries < config.min_queries:
            needed = config.min_queries
            reason = f"not enough test queries: {result.num_queries:,}, at least {needed:,} needed"
        else:
            is_met = result.value <= bound if name.lower_is_better else result.value >= bound
            side = "at most" if name.lower_is_better else "at least"
            reason = f"{result.value:.4f}, {side} {bound:g} required"
        checks.append(
            GateCheck(
                name=f"floor {name.text}",
                kind="floor",
                outcome="pass" if is_met else "fail",
                reason=f"{name.text}: {reason}",
                metric=name.text,
                candidate=result.value,
                bound=bound,
                num_queries=result.num_queries or None,
                needed_queries=needed,
            )
        )
    return checks


# Slice comparisons. Which slices to judge only depends on their size, and is decided before any metric is computed.

_SHOWN = 3  # maximum number of small slices to list by name


def slice_checks(
    candidate: GateInput, production: GateInput, config: GateConfig, seed: int
) -> tuple[list[GateCheck], float]:
    """Compare the candidate with the production model in every slice that has enough queries.

    Returns the checks and the confidence level of each comparison after Bonferroni correction.
    """
    if not config.slice_drops:
        return [], config.confidence
    checks: list[GateCheck] = []
    pending: dict[str, list[Comparison]] = {}
    for column, values in candidate.rows.slices.items():
        codes, names = values.codes, values.names
        queries = np.unique(np.stack([codes, candidate.rows.query_id])[:, codes >= 0], axis=1)[0]
        present, count = np.unique(queries, return_counts=True)
        if small := [names[code] for code in present[count < config.min_slice_queries]]:
            shown = ", ".join(small[:_SHOWN]) + (", ..." if len(small) > _SHOWN else "")
            slices = "1 slice has" if len(small) == 1 else f"{len(small):,} slices have"
            reason = f"{column}: {slices} fewer than {config.min_slice_queries:,} queries, not judged ({shown})"
            check = GateCheck(name=f"slice {column}", kind="slice", outcome="skipped", reason=reason, slice=column)
            checks.append(check)
        for code in present[count >= config.min_slice_queries]:
            slice_name, mask = f"{column}={names[code]}", codes == code
            candidate_slice, production_slice = candidate.select(mask), production.select(mask)
            pending[slice_name] = []
            for text, allowed in config.slice_drops.items():
                metric = MetricName.parse(text)
                results = candidate_slice.measure(metric), production_slice.measure(metric)
                comparison = Comparison(metric, allowed, *results, slice_name)
                if reason := not_comparable(comparison, config.min_slice_queries):
                    # Warn if the metric could be computed for the production model but not for the candidate.
                    only_missing = isinstance(results[0], Missing) and isinstance(results[1], Measured)
                    checks.append(comparison.check("warn" if only_missing else "skipped", reason))
                else:
                    pending[slice_name].append(comparison)
    confidence = 1 - (1 - config.confidence) / max(1, sum(map(len, pending.values())))
    for slice_name, comparisons in pending.items():
        differences = _differences(comparisons, config, seed, f"slice {slice_name}")
        checks += [judge_refusal(comparison, differences[comparison.name], confidence) for comparison in comparisons]
    return checks, confidence


def _differences(
    comparisons: list[Comparison], config: GateConfig, seed: int, rows_purpose: str, retrieval_purpose: str = ""
) -> dict[str, PairedDifference]:
    """Bootstrap comparisons and return the differences by name.

    Row metrics and retrieval metrics are resampled separately, because they are based on different queries.
    """
    differences: dict[str, PairedDifference] = {}
    for searched, purpose in ((False, rows_purpose), (True, retrieval_purpose)):
        pairs = {each.name: each.statistics for each in comparisons if each.metric.is_retrieval is searched}
        differences |= paired_bootstrap(pairs, resamples=config.resamples, seed=seed, purpose=purpose)
    return differences


# Comparisons with the baselines, which must not be significantly better than the candidate.


@dataclass(frozen=True, eq=False)
class Baseline:
    """The results of a baseline on the test split, which are scored rows or retrieval metrics.

    If the baseline could not be scored, `missing` is the reason. If it was scored but beating it would prove nothing,
    for example because BM25 has no results for most queries, `weak` is the reason.
    """

    name: str
    rows: ScoredRows | None = None
    threshold: float | None = None
    retrieval: PerQuery | None = None
    missing: str = ""
    weak: str = ""


def baseline_checks(
    candidate: GateInput, baselines: Sequence[Baseline], config: GateConfig, *, first: bool, seed: int
) -> tuple[list[GateCheck], float]:
    """Compare the candidate with every baseline.

    If the candidate loses to a weak baseline it can be refused, but winning against one does not count as a comparison.
    The metric f1 is skipped unless there are two labels. `first` is True if there is no production model yet.

    Returns the checks and the confidence level of each comparison after Bonferroni correction.
    """
    action = config.first_baselines if first else config.baselines
    if action == "off":
        return [], config.confidence
    worse: Outcome = "fail" if action == "refuse" else "warn"
    checks: list[GateCheck] = []
    for baseline in (baseline for baseline in baselines if baseline.missing):
        name, reason = f"baseline {baseline.name}", f"{baseline.name} was not scored: {baseline.missing}"
        checks.append(GateCheck(name=name, kind="baseline", outcome="skipped", reason=reason, baseline=baseline.name))
    pending: list[Comparison] = []
    for baseline in baselines:
        rows = candidate.rows if baseline.rows is None else baseline.rows
        reference = GateInput(rows, candidate.config, baseline.threshold, baseline.retrieval)
        check_same_holdout(candidate, reference)
        for text, allowed in config.baseline_drops.items():
            metric = MetricName.parse(text)
            if (baseline.retrieval if metric.is_retrieval else baseline.rows) is None:
                continue
            result, other = candidate.measure(metric), reference.measure(metric)
            comparison = Comparison(metric, allowed, result, other, baseline=baseline.name)
            if isinstance(result, Missing) and isinstance(other, Measured):
                reason = f"{baseline.name} has {other.value:.4f}, but the candidate has no value: {result.reason}"
                checks.append(comparison.check(worse, reason))
            elif metric.text == "f1" and len(candidate.rows.labels) != 2:
                continue
            elif reason := not_comparable(comparison, config.min_queries):
                checks.append(comparison.check("skipped", reason, min_queries=config.min_queries))
            else:
                pending.append(comparison)
    confidence = 1 - (1 - config.confidence) / max(1, len(pending))
    pending.sort(key=lambda comparison: comparison.metric.is_retrieval)
    differences = _differences(pending, config, seed, "baselines of rows", "baselines of retrieval")
    weak = {baseline.name: baseline.weak for baseline in baselines}
    for comparison in pending:
        check = judge_refusal(comparison, differences[comparison.name], confidence, worse)
        if check.outcome == "pass" and (why := weak.get(comparison.baseline)):
            # Leave out the interval, so that the check does not count as a comparison.
            title = f"{comparison.baseline} is too weak to compare with on {comparison.metric.text}"
            check = comparison.check("warn", why, title=title)
        checks.append(check)
    return checks, confidence


def judge(
    candidate: GateInput,
    production: GateInput | None,
    config: GateConfig,
    *,
    searched: bool = True,
    baselines: Sequence[Baseline] = (),
    warnings: Sequence[str] = (),
    golden: GateCheck | None = None,
    seed: int = SEED,
) -> Verdict:
    """Decide whether to promote a candidate. The same inputs always result in the same verdict.

    Raises DataError if the models were not scored on the same rows and queries.

    Args:
        candidate: The results of the candidate, whose slice columns define the slices.
        production: The results of the production model, if there is one.
        config: The settings of the gate.
        searched: Whether retrieval was evaluated.
        baselines: The results of the baselines.
        warnings: Problems with the test split, which are added to the checks.
        golden: The check of the golden queries, if any.
        seed: The seed of the bootstrap.
    """
    if production is not None:
        check_same_holdout(candidate, production)
    unusable = []  # failed checks of models with NaN or infinite scores, which cannot be judged
    for role, side in (("candidate", candidate), ("incumbent", production)):
        if side is not None and (bad := int(side.rows.unusable.sum())):
            reason = f"{bad:,} of {side.rows.num_rows:,} rows have NaN or infinite scores of the {role}"
            unusable.append(GateCheck(name=f"scores {role}", kind="scores", outcome="fail", reason=reason))
    slice_confidence, baseline_confidence, without_comparison = config.confidence, None, False
    checks: list[GateCheck] = unusable
    if not unusable:
        checks = floor_checks(candidate, config)
        if production is None:
            reason = "there is no production model yet, so the candidate is only compared with floors and baselines"
            checks.append(GateCheck(name="incumbent", kind="incumbent", outcome="skipped", reason=reason))
        else:
            checks += _overall_checks(candidate, production, config.drops_for(searched=searched), config, seed)
            checks += _search_checks(config, searched=searched)
            slices, slice_confidence = slice_checks(candidate, production, config, seed)
            checks += slices
        baseline_results, baseline_confidence = baseline_checks(
            candidate, baselines, config, first=production is None, seed=seed
        )
        checks += baseline_results
        without_comparison = not any(check.judges or check.outcome == "fail" for check in checks)
        if without_comparison:
            checks.append(nothing_compared(baseline_results, config, first=production is None))
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
        num_rows=candidate.rows.num_rows,
        num_queries=candidate.rows.num_queries,
        confidence=config.confidence,
        slice_confidence=slice_confidence,
        baseline_confidence=baseline_confidence,
        resamples=config.resamples,
        seed=seed,
    )


def _overall_checks(
    candidate: GateInput, production: GateInput, drops: Mapping[str, float], config: GateConfig, seed: int
) -> list[GateCheck]:
    """Compare the candidate with the production model over all rows (rule 2 of this module)."""
    if not drops:
        reason = "gate.drops is empty, so the candidate is not compared with the production model over all rows"
        return [GateCheck(name="incumbent", kind="incumbent", outcome="warn", reason=reason)]
    names = sorted(map(MetricName.parse, drops), key=lambda name: name.is_retrieval)
    comparisons = [
        Comparison(name, drops[name.text], candidate.measure(name), production.measure(name)) for name in names
    ]
    reasons = {each.name: not_comparable(each, config.min_queries) for each in comparisons}
    comparable = [each for each in comparisons if not reasons[each.name]]
    differences = _differences(comparable, config, seed, "rows", "retrieval")
    checks = []
    for each in comparisons:
        if reason := reasons[each.name]:
            checks.append(each.check("fail", reason, min_queries=config.min_queries))
        else:
            checks.append(judge_overall(each, differences[each.name], config.confidence))
    return checks


def _search_checks(config: GateConfig, *, searched: bool) -> list[GateCheck]:
    """Return a check that points out that retrieval is not compared with the production model, if that is the case."""
    if any(MetricName.parse(text).is_retrieval for text in config.drops_for(searched=searched)) or not config.drops:
        return []
    outcome: Outcome = "skipped"
    reason = "evaluate.retrieval.enabled is false"
    if searched:
        outcome, reason = "warn", "gate.drops has no retrieval metric"
    text = f"vector search is not compared with the production model: {reason}"
    return [GateCheck(name="search", kind="comparison", outcome=outcome, reason=text)]


def nothing_compared(baseline_results: Sequence[GateCheck], config: GateConfig, *, first: bool) -> GateCheck:
    """Return the check for a candidate that could not be compared with anything.

    A first model is refused unless the settings allow it. A later model only gets a warning, because this can only
    happen if the user has emptied `gate.drops`.
    """
    if not first:
        reason = "promoted WITHOUT a comparison: gate.drops is empty"
        return GateCheck(name="comparison", kind="comparison", outcome="warn", reason=reason)
    few = [check for check in baseline_results if check.needed_queries is not None]
    reasons = [check.reason for check in baseline_results if check.needed_queries is None]
    num_queries = max((check.num_queries or 0 for check in few), default=None)
    if few:
        tools = " and ".join(dict.fromkeys(check.baseline for check in few))
        reasons.append(
            f"not enough test queries to compare with {tools}: {num_queries}, at least {config.min_queries} needed"
        )
    if not baseline_results:
        off = config.first_baselines == "off"
        reasons = ["gate.first_baselines is off" if off else "no baseline was scored (evaluate.baselines)"]
    why = ", ".join(["no production model", *([] if config.floors else ["no gate.floors"]), *reasons])
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


# Advice for users whose candidate was refused, such as how to get enough test queries.

FRACTIONS = tuple(step / 20 for step in range(1, 9))
"""Values to suggest for `data.test_fraction` and `data.valid_fraction`. Even 0.4 leaves most queries for training."""
MIN_QUERIES = "lower --gate.min-queries"
_LATER = (
    "Production was trained on the queries that would move into this split, so also add --train.start scratch and"
    " --evaluate.leak warn, or promote with --evaluate.force-reason TEXT"
)


def count_queries(infos: Iterable[TokenSetInfo]) -> dict[Split, int]:
    """Count the queries of each split. A query that occurs in several partitions is counted in each of them.

    Returns an empty dict if the data was prepared by a version that did not count queries.
    """
    judgements = [info.judged for info in infos]
    counts: dict[Split, int] = {
        split: sum(sum(by_split[split].query_best.values()) for by_split in judgements if split in by_split)
        for split in SPLITS
    }
    return counts if any(judgements) else {}


def fraction_for(total: int, needed: int) -> float | None:
    """Return the smallest fraction in FRACTIONS that results in at least `needed` of `total` queries, if any.

    Queries are assigned to splits by a hash, so we allow for a deviation of two standard deviations.
    """
    return next((p for p in FRACTIONS if p * total - 2 * sqrt(p * (1 - p) * total) >= needed), None)


def size_advice(split: Split, queries: int, needed: int, counts: Mapping[Split, int], remedy: str = MIN_QUERIES) -> str:
    """Explain how to get enough queries into a split in which only `queries` of them contribute to a metric.

    `counts` is the number of queries in each split. We assume that the same fraction of queries contributes in every
    split. `remedy` is what to suggest to users who cannot get more queries.
    """
    few = f"split {split} has {queries:,} queries that count, but about {needed:,} are needed"
    total = sum(counts.values())
    if counts.get(split):
        total = round(total * min(1.0, queries / counts[split]))
    fraction = fraction_for(total, needed)
    if fraction is not None:
        return (
            f"{few}: without a split column, --data.{split}-fraction {fraction:g} gives about"
            f" {round(fraction * total):,} of {total:,} (prepare and train again), or {remedy}"
        )
    if total:
        few += f", and all splits together have about {total:,}"
    return f"{few}: judge more queries, or {remedy}"


HALF_WIDTH = 0.5
"""Half the width of the 95% confidence interval of a mean nDCG difference, multiplied by the square root of the number
of queries. This is 1.96 times an assumed standard deviation of 0.25."""


def precision_warning(split: Split, counts: Mapping[Split, int]) -> str:
    """Return a warning if a split has too few queries to reveal an nDCG difference of 0.01, or an empty string."""
    queries, needed = counts.get(split, 0), round((HALF_WIDTH / 0.01) ** 2)
    remedy = f"do not rely on nDCG differences below {HALF_WIDTH / sqrt(max(1, queries)):.2g} (0.01 needs {needed:,})"
    return size_advice(split, queries, needed, counts, remedy) if 0 < queries < needed else ""


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
    """Explain how to get enough queries for a candidate that was refused because there were too few.

    Returns an empty string if there were enough queries.

    Args:
        verdict: The verdict of the gate.
        config: The settings of the evaluation.
        infos: The metadata of the prepared partitions.
        split: The split that was evaluated.
        rows: The number of rows that were scored.
        rows_in_split: The number of rows without the limit `evaluate.max_rows`.
        all_partitions: Whether all partitions were evaluated.
        later: Whether there is a production model. It was trained on queries that would move to a larger test split.
    """
    few = [
        (check.needed_queries, check.num_queries or 0, check)
        for check in verdict.checks
        if check.outcome == "fail" and check.needed_queries
    ]
    if not few:
        return ""
    needed, queries, check = max(few, key=lambda item: item[0] / max(1, item[1]))
    remedy = MIN_QUERIES if check.kind != "delta" or check.low is None else "allow a larger drop (--gate.drops)"
    if check.kind == "comparison":
        remedy += ", or promote without a comparison (--gate.first-without-comparison)"
    if rows < rows_in_split:
        return (
            f"only {rows:,} of {rows_in_split:,} rows of split {split} are scored: raise evaluate.max_rows, or {remedy}"
        )
    if not all_partitions:
        return f"only new partitions are scored: add --evaluate.partitions all, or {remedy}"
    if config.retrieval.catalogue and check.metric and MetricName.parse(check.metric).is_retrieval:
        return (
            f"the catalogue has {queries:,} queries, but about {needed:,} are needed: add items with other queries to"
            f" {config.retrieval.catalogue}, raise --evaluate.retrieval.max-queries, or {remedy}"
        )
    advice = size_advice(split, queries, needed, count_queries(infos), remedy)
    return f"{advice}. {_LATER}" if later and f"--data.{split}-fraction" in advice else advice


def refusal_advice(verdict: Verdict, *, from_published_weights: bool) -> str:
    """Explain what to do about a refused candidate, given how its training started."""
    failed = [check for check in verdict.checks if check.outcome == "fail"]
    if verdict.advice:
        return verdict.advice
    if any(check.kind == "comparison" for check in failed):
        return (
            f"enable a baseline (evaluate.baselines, boosting requires {install_command('sklearn')}), set a floor"
            " (--gate.floors ndcg@10=0.6), or add --gate.first-without-comparison"
        )
    deltas = [check for check in failed if check.kind == "delta" and check.incumbent is None]
    if any(check.candidate is None for check in deltas):
        return "correct --gate.drops or, for metrics of retrieval, set --evaluate.retrieval.enabled true"
    if deltas or any(check.name == "scores incumbent" for check in failed):
        return "trnpipe registry rollback --reason TEXT, or promote with --evaluate.force-reason TEXT"
    if not from_published_weights and any(check.kind == "baseline" for check in failed):
        return "start from published weights (docs/quality.md), or promote with --evaluate.force-reason TEXT"
    return "train again, or promote with --evaluate.force-reason TEXT"
