"""One of the two models that are compared: its scores and what belongs to them."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.core.arrays import Bools
from pipeline.core.errors import DataError
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.metrics.measure import Measured, RowMetrics, measure_retrieval
from pipeline.evaluate.metrics.names import MetricName
from pipeline.evaluate.metrics.statistic import Missing
from pipeline.evaluate.scored import PerQuery, ScoredRows


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
