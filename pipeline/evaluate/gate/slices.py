"""Comparisons slice by slice. Which slices are large enough is decided before anything is measured."""

from collections.abc import Iterator

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.evaluate.bootstrap import paired_bootstrap
from pipeline.evaluate.config import GateConfig
from pipeline.evaluate.gate.compare import Comparison, judge_slice, not_comparable
from pipeline.evaluate.gate.side import Side
from pipeline.evaluate.gate.verdict import GateCheck
from pipeline.evaluate.metrics.names import MetricName
from pipeline.evaluate.metrics.statistic import Missing
from pipeline.evaluate.scored import ScoredRows

_SHOWN = 3
"""Small slices that are named."""


def slice_checks(candidate: Side, incumbent: Side, config: GateConfig, seed: int) -> tuple[list[GateCheck], float]:
    """Every comparison of every slice, and the confidence of each that gives all together `config.confidence`."""
    if not config.slice_drops:
        return [], config.confidence
    checks: list[GateCheck] = []
    open_slices: list[list[Comparison]] = []
    for column in candidate.rows.slices:
        large, small = _by_size(candidate.rows, column, config.min_slice_queries)
        checks += [_small_slices(column, small, config.min_slice_queries)] if small else []
        for code in large:
            comparisons = list(_comparisons(candidate, incumbent, column, code, config))
            reasons = [not_comparable(one, config.min_slice_queries) for one in comparisons]
            checks += [_not_judged(one, reason) for one, reason in zip(comparisons, reasons, strict=True) if reason]
            open_slices.append([one for one, reason in zip(comparisons, reasons, strict=True) if not reason])
    confidence = 1 - (1 - config.confidence) / max(1, sum(map(len, open_slices)))
    for comparisons in open_slices:
        checks += _judged(comparisons, config.resamples, seed, confidence)
    return checks, confidence


def _judged(comparisons: list[Comparison], resamples: int, seed: int, confidence: float) -> Iterator[GateCheck]:
    """The comparisons of one slice, from the same draws."""
    pairs = {one.name: one.statistics for one in comparisons}
    purpose = comparisons[0].slice if comparisons else ""
    found = paired_bootstrap(pairs, resamples=resamples, seed=seed, purpose=f"slice {purpose}")
    yield from (judge_slice(one, found[one.name], confidence) for one in comparisons)


def _comparisons(candidate: Side, incumbent: Side, column: str, code: int, config: GateConfig) -> Iterator[Comparison]:
    rows = candidate.rows.slices[column]
    mask = rows.codes == code
    ours, theirs = candidate.select(mask), incumbent.select(mask)
    for text, allowed in config.slice_drops.items():
        name = MetricName.parse(text)
        yield Comparison(name, allowed, ours.measure(name), theirs.measure(name), f"{column}={rows.names[code]}")


def _not_judged(comparison: Comparison, reason: str) -> GateCheck:
    """To know, when it is the candidate that leaves a metric without a value the incumbent has."""
    only_ours = isinstance(comparison.candidate, Missing) and not isinstance(comparison.incumbent, Missing)
    return comparison.check("warn" if only_ours else "skipped", reason)


def _by_size(rows: ScoredRows, column: str, min_queries: int) -> tuple[Int64s, list[str]]:
    """Codes of the slices with enough queries, and the names of the others that have rows."""
    codes, names = rows.slices[column].codes, rows.slices[column].names
    queries = np.unique(np.stack([codes, rows.query_id])[:, codes >= 0], axis=1)[0]
    found, count = np.unique(queries, return_counts=True)
    return found[count >= min_queries], [names[code] for code in found[count < min_queries]]


def _small_slices(column: str, names: list[str], min_queries: int) -> GateCheck:
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    slices = "1 slice has" if len(names) == 1 else f"{len(names):,} slices have"
    return GateCheck(
        name=f"slice {column}",
        kind="slice",
        outcome="skipped",
        reason=f"{column}: {slices} fewer than {min_queries:,} queries and neither refuse nor promote ({shown})",
        slice=column,
    )
