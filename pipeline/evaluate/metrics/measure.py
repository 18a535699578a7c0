"""From the name of a metric and scored rows to its value, or to the reason why there is none."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

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
    ndcg_by_query,
    precision_by_query,
    recall_by_query,
    reciprocal_rank_by_query,
    retrieval_by_query,
)
from pipeline.evaluate.metrics.scored_rows import (
    GAIN_TOLERANCE,
    Missing,
    PerQuery,
    QueryGroups,
    ScoredRows,
    Statistic,
    mean_over_queries,
    value_of,
)

_NOTHING_OF_TWO = {
    "precision": "no row is called a match at the threshold",
    "recall": "no row is a match",
    "f1": "no row is a match or called one",
    "roc_auc": "labelled rows of both labels are needed",
    "average_precision": "no row is a match",
}
"""Metrics of two labels, and why there may be none."""


@dataclass(frozen=True, eq=False)
class Measured:
    value: float
    statistic: Statistic

    @property
    def num_queries(self) -> int:
        return int(self.statistic.counted.sum())


@dataclass(frozen=True, eq=False)
class RowMetrics:
    """The metrics of scored rows by name, but those of retrieval. What several of them need is computed once."""

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
        """[N]: the rows that MRR, recall@k and precision@k look for."""
        if self.config.relevant_gain is None:
            return np.equal(self.rows.label, len(self.rows.labels) - 1)
        return np.greater_equal(self.rows.gain, self.config.relevant_gain - GAIN_TOLERANCE)

    def measure(self, name: MetricName) -> Measured | Missing:
        """Measure one metric, or return why that is impossible."""
        if reason := self._obstacle(name):
            return Missing(reason)
        return _measured(*self._statistic(name))

    def _obstacle(self, name: MetricName) -> str:
        rows, num_labels = self.rows, len(self.rows.labels)
        if rows.meaningless:
            return rows.meaningless
        if rows.unusable.any():
            return f"{int(rows.unusable.sum()):,} of {rows.num_rows:,} rows have NaN or infinite scores"
        if name.rank is not None or name.word == "mrr":
            same = "all labels have the same gain; set data.labels, from least to most relevant"
            return same if len(set(rows.label_gains)) < 2 else ""
        if not (rows.label >= 0).any():
            return "no row has a label"
        if name.label is not None:
            known = f"there is no label {name.label!r}; there are {', '.join(rows.labels)}"
            return known if name.label not in rows.labels else ""
        if name.word in _NOTHING_OF_TWO and num_labels != 2:
            return f"it is for two labels, there are {num_labels}"
        if name.word in ("precision", "recall", "f1") and self.threshold is None:
            return "no threshold was chosen on the valid split"
        return ""

    def _statistic(self, name: MetricName) -> tuple[Statistic, str]:
        """Return the statistic of a metric, and the reason if it turns out to be undefined."""
        rows, queries, k, word = self.rows, self.queries, name.rank or 0, name.word
        label, probabilities, num_labels = rows.label, rows.probabilities, len(rows.labels)
        nothing = _NOTHING_OF_TWO.get(word, "no row has a label")
        if word == "ndcg":
            return mean_over_queries(ndcg_by_query(self.ranking, rows.gain, k)), "no query has a row with a gain"
        if word == "mrr" or name.rank is not None:
            if word == "mrr":
                by_query = reciprocal_rank_by_query(self.ranking, self.relevant)
            else:
                measure = recall_by_query if word == "recall" else precision_by_query
                by_query = measure(self.ranking, self.relevant, k)
            return mean_over_queries(by_query), "no query has a relevant row"
        if name.label is not None:
            wanted, nothing = rows.labels.index(name.label), f"no row is labelled or predicted {name.label}"
            return label_f1(queries, label, self.predicted, num_labels, wanted), nothing
        if word in ("roc_auc", "average_precision"):
            return ThresholdCurve.of(queries, label, probabilities[:, -1], word), nothing
        if word in _NOTHING_OF_TWO:
            return at_threshold(queries, label, probabilities[:, -1], self.threshold or 0.0, word), nothing
        if word == "macro_f1":
            return label_f1(queries, label, self.predicted, num_labels), nothing
        if word in ("ece", "loss"):
            return (calibration_error if word == "ece" else log_loss)(queries, label, probabilities), nothing
        return accuracy(queries, label, self.predicted), nothing  # micro F1 is the same


def measure_retrieval(found: PerQuery | None, name: MetricName) -> Measured | Missing:
    """Measure one metric of retrieval, from its value for each query."""
    if found is None:
        return Missing("retrieval was not evaluated")
    if name.text not in found.values:
        return Missing(f"it was not evaluated; there are {', '.join(found.values)}")
    return _measured(mean_over_queries(found.values[name.text]), "no query has a relevant item in the catalogue")


def _measured(statistic: Statistic, nothing: str) -> Measured | Missing:
    value = value_of(statistic)
    return Missing(nothing) if math.isnan(value) else Measured(value, statistic)


# All metrics of a holdout, and of its slices, as records that go into results.


class MetricReport(Record):
    """Metrics by name; one that could not be computed stands in `missing` with the reason, never as 0 or NaN."""

    values: dict[str, float]
    missing: dict[str, str]
    num_rows: int = Field(ge=0, description="Rows scored; of retrieval, items looked at")
    num_queries: int = Field(ge=0)


class SliceReport(Record):
    """Metrics of the rows that share one value of a column."""

    column: str
    value: str
    report: MetricReport


def metric_report(rows: ScoredRows, config: MetricsConfig, threshold: float | None = None) -> MetricReport:
    """Measure every metric of `metric_names`; `threshold` as of `best_threshold`."""
    metrics = RowMetrics(rows, config, threshold)
    return _report(metric_names(rows.labels, config), metrics.measure, rows.num_rows, rows.num_queries)


def metric_names(labels: tuple[str, ...], config: MetricsConfig) -> list[str]:
    """Name the metrics of a report, in the order people read them."""
    ranked = [f"ndcg@{k}" for k in config.ndcg_at] + ["mrr"] + [f"recall@{k}" for k in RECALL_AT]
    ranked += [f"precision@{k}" for k in PRECISION_AT]
    classes = ["accuracy", "macro_f1", "micro_f1", *(f"f1:{label}" for label in labels)]
    two = _NOTHING_OF_TWO if len(labels) == 2 else ()
    return [*ranked, *classes, *two, "ece", "loss"]


def slice_reports(rows: ScoredRows, config: MetricsConfig, threshold: float | None = None) -> tuple[SliceReport, ...]:
    """Measure each slice of each column. Rows without a value belong to none."""
    return tuple(
        SliceReport(
            column=name,
            value=column.names[code],
            report=metric_report(rows.select(column.codes == code), config, threshold),
        )
        for name, column in rows.slices.items()
        for code in np.unique(column.codes[column.codes >= 0])
    )


def retrieval_report(
    query_id: Int64s, ranked: Int64s, judged: Judgements, config: MetricsConfig
) -> tuple[PerQuery, MetricReport]:
    """See `retrieval_by_query`; the report also names the ranks that lists of K items cannot answer."""
    found = retrieval_by_query(query_id, ranked, judged, config)
    words = ("recall", "ndcg", "success")
    wanted = [f"retrieval_{word}@{k}" for k in config.retrieval_at for word in words]
    short = {name: f"the lists hold {ranked.shape[1]} items" for name in wanted if name not in found.values}
    report = _report(found.values, lambda name: measure_retrieval(found, name), ranked.size, len(query_id))
    return found, report.model_copy(update={"missing": {**report.missing, **short}})


def _report(
    names: Iterable[str], measure: Callable[[MetricName], Measured | Missing], num_rows: int, num_queries: int
) -> MetricReport:
    found = {name: measure(MetricName.parse(name)) for name in names}
    return MetricReport(
        values={name: one.value for name, one in found.items() if isinstance(one, Measured)},
        missing={name: one.reason for name, one in found.items() if isinstance(one, Missing)},
        num_rows=num_rows,
        num_queries=num_queries,
    )
