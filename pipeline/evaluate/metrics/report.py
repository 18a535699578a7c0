"""All metrics of a holdout, and of its slices, as records that go into results."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pipeline.core.arrays import Bools, Int64s
from pipeline.core.errors import DataError
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.metrics.measure import Measured, RowMetrics, measure_retrieval
from pipeline.evaluate.metrics.names import MetricName
from pipeline.evaluate.metrics.retrieval import Judgements, retrieval_by_query
from pipeline.evaluate.metrics.statistic import Missing
from pipeline.evaluate.scored import PerQuery, ScoredRows


class MetricReport(BaseModel):
    """Metrics by name; one that could not be computed stands in `missing` with the reason, never as 0 or NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    values: dict[str, float]
    missing: dict[str, str]
    num_rows: int = Field(ge=0, description="Rows scored; of retrieval, items looked at")
    num_queries: int = Field(ge=0)


class SliceReport(BaseModel):
    """Metrics of the rows that share one value of a column."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    column: str
    value: str
    report: MetricReport


def metric_report(rows: ScoredRows, config: MetricsConfig, threshold: float | None = None) -> MetricReport:
    """Every metric of `metric_names`.

    Args:
        rows: what was scored.
        config: ranks and bins.
        threshold: of two labels, the probability from which a row is called a match; see `best_threshold`.

    Raises:
        DataError: there are no rows.
    """
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
    ranked = [f"ndcg@{k}" for k in config.ndcg_at] + ["mrr"] + [f"recall@{k}" for k in config.recall_at]
    ranked += [f"precision@{k}" for k in config.precision_at]
    classes = ["accuracy", "macro_f1", "micro_f1", *(f"f1:{label}" for label in labels)]
    two = ["precision", "recall", "f1", "roc_auc", "average_precision"] if len(labels) == 2 else []
    return [*ranked, *classes, *two, "ece", "loss"]


def slice_reports(rows: ScoredRows, config: MetricsConfig, threshold: float | None = None) -> tuple[SliceReport, ...]:
    """The report of each slice of each column; rows without a value belong to none. Raises DataError without rows."""
    return tuple(
        SliceReport(column=column, value=value, report=metric_report(rows.select(mask), config, threshold))
        for column, value, mask in slices_of(rows)
    )


def slices_of(rows: ScoredRows) -> Iterator[tuple[str, str, Bools]]:
    """Column, value and rows [N] of each slice that has rows."""
    for name, column in rows.slices.items():
        for code in np.unique(column.codes[column.codes >= 0]):
            yield name, column.names[code], column.codes == code


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
