"""Compute metrics by name. The result is either a value, or the reason why the metric cannot be computed."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from pydantic import Field

from pipeline.core.arrays import Bools, Int64s
from pipeline.core.record import Record
from pipeline.evaluate.config import PRECISION_AT, RECALL_AT, MetricName, MetricsConfig
from pipeline.evaluate.metrics.labels import (
    ThresholdCurve,
    accuracy,
    at_threshold,
    calibration_error,
    label_f1,
    log_loss,
)
from pipeline.evaluate.metrics.ranking import (
    Judgements,
    Ranking,
    hits_by_query,
    ndcg_by_query,
    reciprocal_rank_by_query,
    retrieval_by_query,
)
from pipeline.evaluate.metrics.scored_rows import (
    GAIN_TOLERANCE,
    Missing,
    PerQuery,
    QueryGroups,
    ScoredRows,
    SliceColumn,
    Statistic,
    mean_over_queries,
    value_of,
)

_BINARY_METRICS = {
    "precision": "no row is predicted to match at the threshold",
    "recall": "no row is a match",
    "f1": "no row is a match or predicted to be one",
    "roc_auc": "rows of both labels are needed",
    "average_precision": "no row is a match",
}
"""Metrics that require two labels, each with the reason to report if it is undefined."""


@dataclass(frozen=True, eq=False)
class Measured:
    value: float
    statistic: Statistic

    @property
    def num_queries(self) -> int:
        return int(self.statistic.counted.sum())


@dataclass(frozen=True, eq=False)
class RowMetrics:
    """Computes all metrics of scored rows, that is, all except retrieval. Caches intermediate results.

    `threshold` is the probability from which on a row is a match (two labels only).
    """

    rows: ScoredRows
    config: MetricsConfig
    threshold: float | None = None

    @cached_property
    def queries(self) -> QueryGroups:
        return QueryGroups.of(self.rows.query_id)

    @cached_property
    def ranking(self) -> Ranking:
        return Ranking.of(self.queries, self.rows.relevance)

    @cached_property
    def predicted(self) -> Int64s:
        predicted: Int64s = self.rows.probabilities.argmax(axis=1)
        return predicted

    @cached_property
    def relevant(self) -> Bools:
        """Return a mask [N] of the rows that count as relevant in MRR, recall@k and precision@k."""
        if self.config.relevant_gain is None:
            return np.equal(self.rows.label, len(self.rows.labels) - 1)
        return np.greater_equal(self.rows.gain, self.config.relevant_gain - GAIN_TOLERANCE)

    def measure(self, name: MetricName) -> Measured | Missing:
        """Compute a metric, or return the reason why it cannot be computed."""
        if reason := self._obstacle(name):
            return Missing(reason)
        return _measured(*self._statistic(name))

    def _obstacle(self, name: MetricName) -> str:
        rows, num_labels = self.rows, len(self.rows.labels)
        if rows.meaningless:
            return rows.meaningless
        if rows.unusable.any():
            return f"{int(rows.unusable.sum()):,} of {rows.num_rows:,} rows have NaN or infinite scores"
        if name.rank is not None or name.family == "mrr":
            same_gains = "all labels have the same gain: list them in data.labels from least to most relevant"
            return same_gains if len(set(rows.label_gains)) < 2 else ""
        if not (rows.label >= 0).any():
            return "no row has a label"
        if name.label is not None:
            unknown_label = f"unknown label {name.label!r}, expected one of {', '.join(rows.labels)}"
            return unknown_label if name.label not in rows.labels else ""
        if name.family in _BINARY_METRICS and num_labels != 2:
            return f"it requires two labels, but there are {num_labels}"
        if name.family in ("precision", "recall", "f1") and self.threshold is None:
            return "no threshold was chosen on the valid split"
        return ""

    def _statistic(self, name: MetricName) -> tuple[Statistic, str]:
        """Return the statistic of a metric, and the reason to report if it turns out to be undefined."""
        rows, queries, k, family = self.rows, self.queries, name.rank or 0, name.family
        label, probabilities, num_labels = rows.label, rows.probabilities, len(rows.labels)
        reason = _BINARY_METRICS.get(family, "no row has a label")
        if family == "ndcg":
            return mean_over_queries(ndcg_by_query(self.ranking, rows.gain, k)), "no query has a row with a gain"
        if family == "mrr" or name.rank is not None:
            if family == "mrr":
                by_query = reciprocal_rank_by_query(self.ranking, self.relevant)
            else:
                by_query = hits_by_query(self.ranking, self.relevant, k, family)
            return mean_over_queries(by_query), "no query has a relevant row"
        if name.label is not None:
            index, reason = rows.labels.index(name.label), f"no row is labelled or predicted {name.label}"
            return label_f1(queries, label, self.predicted, num_labels, index), reason
        if family in ("roc_auc", "average_precision"):
            return ThresholdCurve.of(queries, label, probabilities[:, -1], family), reason
        if family in _BINARY_METRICS:
            return at_threshold(queries, label, probabilities[:, -1], self.threshold or 0.0, family), reason
        if family == "macro_f1":
            return label_f1(queries, label, self.predicted, num_labels), reason
        if family in ("ece", "loss"):
            return (calibration_error if family == "ece" else log_loss)(queries, label, probabilities), reason
        return accuracy(queries, label, self.predicted), reason  # also micro F1


def measure_retrieval(per_query: PerQuery | None, name: MetricName) -> Measured | Missing:
    """Average a retrieval metric over queries, or return the reason why it cannot be computed."""
    if per_query is None:
        return Missing("retrieval was not evaluated")
    if name.text not in per_query.values:
        return Missing(f"it was not evaluated, only {', '.join(per_query.values)} were")
    return _measured(mean_over_queries(per_query.values[name.text]), "no query has a relevant item in the catalogue")


def _measured(statistic: Statistic, undefined: str) -> Measured | Missing:
    value = value_of(statistic)
    return Missing(undefined) if math.isnan(value) else Measured(value, statistic)


# Records with all metrics of a holdout and of its slices.

RELEVANT_PRODUCTS = "relevant_products"  # name of the slices of queries, by whether any of these was trained on


class MetricReport(Record):
    """Metrics by name. If a metric could not be computed, `missing` has the reason."""

    values: dict[str, float]
    missing: dict[str, str]
    num_rows: int = Field(ge=0, description="Number of rows scored, or of items returned by search")
    num_queries: int = Field(ge=0)


class SliceReport(Record):
    """Metrics of a slice, which consists of all rows with the same value in a column."""

    column: str
    value: str
    report: MetricReport


def metric_report(rows: ScoredRows, config: MetricsConfig, threshold: float | None = None) -> MetricReport:
    """Compute all metrics listed by `metric_names`. `threshold` should be chosen by `best_threshold`."""
    metrics = RowMetrics(rows, config, threshold)
    return _report(metric_names(rows.labels, config), metrics.measure, rows.num_rows, rows.num_queries)


def metric_names(labels: tuple[str, ...], config: MetricsConfig) -> list[str]:
    """Return the names of all metrics of a report, in display order."""
    ranked = [f"ndcg@{k}" for k in config.ndcg_at] + ["mrr"] + [f"recall@{k}" for k in RECALL_AT]
    ranked += [f"precision@{k}" for k in PRECISION_AT]
    classes = ["accuracy", "macro_f1", "micro_f1", *(f"f1:{label}" for label in labels)]
    two = _BINARY_METRICS if len(labels) == 2 else ()
    return [*ranked, *classes, *two, "ece", "loss"]


def slice_reports(rows: ScoredRows, config: MetricsConfig, threshold: float | None = None) -> tuple[SliceReport, ...]:
    """Compute the metrics of every slice. Rows without a value in a column are ignored."""
    return tuple(
        SliceReport(
            column=name,
            value=column.names[code],
            report=metric_report(rows.select(column.codes == code), config, threshold),
        )
        for name, column in rows.slices.items()
        for code in np.unique(column.codes[column.codes >= 0])
    )


def retrieval_slices(per_query: PerQuery | None, column: SliceColumn | None) -> tuple[SliceReport, ...]:
    """Average retrieval metrics over the queries with each code in `column`, if there are several."""
    if per_query is None or column is None or len(np.unique(column.codes)) < 2:
        return ()
    reports = list[SliceReport]()
    for code in np.unique(column.codes[column.codes >= 0]):
        mask = column.codes == code
        part = PerQuery(per_query.query_id[mask], {name: values[mask] for name, values in per_query.values.items()})
        report = _report(part.values, partial(measure_retrieval, part), 0, int(mask.sum()))
        reports.append(SliceReport(column=RELEVANT_PRODUCTS, value=column.names[code], report=report))
    return tuple(reports)


def retrieval_report(
    query_id: Int64s, ranked: Int64s, judged: Judgements, config: MetricsConfig
) -> tuple[PerQuery, MetricReport]:
    """Compute retrieval metrics, both per query (see `retrieval_by_query`) and averaged over queries.

    If `ranked` has fewer items than a rank requires, the metrics at that rank are reported as missing.
    """
    per_query = retrieval_by_query(query_id, ranked, judged, config)
    names = [f"retrieval_{metric}@{k}" for k in config.retrieval_at for metric in ("recall", "ndcg", "success")]
    beyond = {name: f"only {ranked.shape[1]} items were retrieved" for name in names if name not in per_query.values}
    report = _report(per_query.values, lambda name: measure_retrieval(per_query, name), ranked.size, len(query_id))
    return per_query, report.model_copy(update={"missing": {**report.missing, **beyond}})


def _report(
    names: Iterable[str], measure: Callable[[MetricName], Measured | Missing], num_rows: int, num_queries: int
) -> MetricReport:
    results = {name: measure(MetricName.parse(name)) for name in names}
    return MetricReport(
        values={name: result.value for name, result in results.items() if isinstance(result, Measured)},
        missing={name: result.reason for name, result in results.items() if isinstance(result, Missing)},
        num_rows=num_rows,
        num_queries=num_queries,
    )
