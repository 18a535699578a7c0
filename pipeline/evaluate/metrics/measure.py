"""From the name of a metric and scored rows to its value, or to the reason why there is none."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from pydantic import Field

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.errors import DataError
from pipeline.core.record import Record
from pipeline.evaluate.config import PRECISION_AT, RECALL_AT, MetricName, MetricsConfig
from pipeline.evaluate.metrics.labels import (
    Curve,
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
    Queries,
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
    """The metrics of scored rows by name, but those of retrieval; what several of them need is computed once."""

    rows: ScoredRows
    config: MetricsConfig
    threshold: float | None = None

    def measure(self, name: MetricName) -> Measured | Missing:
        if self.rows.meaningless:
            return Missing(self.rows.meaningless)
        if self.rows.unusable.any():
            bad, rows = int(self.rows.unusable.sum()), self.rows.num_rows
            return Missing(f"{bad:,} of {rows:,} rows have NaN or infinite scores")
        if name.rank is not None or name.word == "mrr":
            return self._ranked(name)
        if not (self.rows.label >= 0).any():
            return Missing("no row has a label")
        if name.label is None and name.word in _NOTHING_OF_TWO:
            return self._matched(name)
        return self._classified(name)

    @cached_property
    def queries(self) -> Queries:
        return Queries.of(self.rows.query_id)

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

    def _ranked(self, name: MetricName) -> Measured | Missing:
        if len(set(self.rows.label_gains)) < 2:
            return Missing("all labels have the same gain; set data.labels, from least to most relevant")
        k = name.rank or 0
        by_query: dict[str, Callable[[], Float64s]] = {
            "ndcg": lambda: ndcg_by_query(self.ranking, self.rows.gain, k),
            "mrr": lambda: reciprocal_rank_by_query(self.ranking, self.relevant),
            "recall": lambda: recall_by_query(self.ranking, self.relevant, k),
            "precision": lambda: precision_by_query(self.ranking, self.relevant, k),
        }
        nothing = "no query has a row with a gain" if name.word == "ndcg" else "no query has a relevant row"
        return _measured(mean_over_queries(by_query[name.word]()), nothing)

    def _matched(self, name: MetricName) -> Measured | Missing:
        rows, score = self.rows, self.rows.probabilities[:, -1]
        if len(rows.labels) != 2:
            return Missing(f"it is for two labels, there are {len(rows.labels)}")
        nothing = _NOTHING_OF_TWO[name.word]
        if name.word in ("roc_auc", "average_precision"):
            return _measured(Curve.of(self.queries, rows.label, score, name.word), nothing)
        if self.threshold is None:
            return Missing("no threshold was chosen on the valid split")
        return _measured(at_threshold(self.queries, rows.label, score, self.threshold, name.word), nothing)

    def _classified(self, name: MetricName) -> Measured | Missing:
        rows, num_labels = self.rows, len(self.rows.labels)
        if name.label is not None:
            if name.label not in rows.labels:
                return Missing(f"there is no label {name.label!r}; there are {', '.join(rows.labels)}")
            wanted = rows.labels.index(name.label)
            found = label_f1(self.queries, rows.label, self.predicted, num_labels, wanted)
            return _measured(found, f"no row is labelled or predicted {name.label}")
        build: dict[str, Callable[[], Statistic]] = {
            "accuracy": lambda: accuracy(self.queries, rows.label, self.predicted),
            "micro_f1": lambda: accuracy(self.queries, rows.label, self.predicted),
            "macro_f1": lambda: label_f1(self.queries, rows.label, self.predicted, num_labels),
            "ece": lambda: calibration_error(self.queries, rows.label, rows.probabilities),
            "loss": lambda: log_loss(self.queries, rows.label, rows.probabilities),
        }
        return _measured(build[name.word](), "no row has a label")


def measure_retrieval(found: PerQuery | None, name: MetricName) -> Measured | Missing:
    """One metric of retrieval, from its value for each query."""
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
    """Every metric of `metric_names`; `threshold` as of `best_threshold`. Raises DataError when there are no rows."""
    if not rows.num_rows:
        raise DataError(
            "the holdout is empty",
            expected="rows with a query and a label",
            next_command="raise data.valid_fraction or data.test_fraction, or give a split column",
        )
    metrics = RowMetrics(rows, config, threshold)
    return _report(metric_names(rows.labels, config), metrics.measure, rows.num_rows, rows.num_queries)


def metric_names(labels: tuple[str, ...], config: MetricsConfig) -> list[str]:
    """The metrics of a report, in the order people read them."""
    ranked = [f"ndcg@{k}" for k in config.ndcg_at] + ["mrr"] + [f"recall@{k}" for k in RECALL_AT]
    ranked += [f"precision@{k}" for k in PRECISION_AT]
    classes = ["accuracy", "macro_f1", "micro_f1", *(f"f1:{label}" for label in labels)]
    two = _NOTHING_OF_TWO if len(labels) == 2 else ()
    return [*ranked, *classes, *two, "ece", "loss"]


def slice_reports(rows: ScoredRows, config: MetricsConfig, threshold: float | None = None) -> tuple[SliceReport, ...]:
    """The report of each slice of each column; rows without a value belong to none. Raises DataError without rows."""
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
