"""Building blocks of metrics: scored rows in host memory, and statistics over weighted queries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s

GAIN_TOLERANCE = 1e-6
"""Gains are stored as float32, which turns 0.7 into 0.69999999. This must still reach a threshold of 0.7."""


@dataclass(frozen=True, eq=False)
class SliceColumn:
    """A categorical column that splits N rows into slices.

    `codes` [N] are indices into `names`. Rows without a value have the code -1.
    """

    codes: Int64s
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """N rows with their labels and with the probabilities that a model predicts for them.

    The order of the rows must not depend on labels or probabilities.

    Attributes:
        query_id: The query ids [N]. The rows of a query do not have to be adjacent.
        label: The indices [N] of the true labels, or -1 for unlabelled rows.
        gain: The graded relevance [N], which is at least 0.
        probabilities: The predicted probabilities [N, K] of all labels. They may contain NaN and infinity.
        labels: The names of the K labels, from least to most relevant.
        label_gains: The gain of each label. A model ranks the rows of a query by their expected gain.
        slices: The slice columns by name.
        meaningless: The reason why the probabilities cannot be judged (for example because the relevance head is
            untrained), or an empty string.
    """

    query_id: Int64s
    label: Int64s
    gain: Float64s
    probabilities: Float64s
    labels: tuple[str, ...]
    label_gains: tuple[float, ...]
    slices: Mapping[str, SliceColumn] = field(default_factory=dict)
    meaningless: str = ""

    @property
    def num_rows(self) -> int:
        return len(self.query_id)

    @cached_property
    def num_queries(self) -> int:
        return len(np.unique(self.query_id))

    @cached_property
    def unusable(self) -> Bools:
        """Return a mask [N] of the rows with a NaN or infinite probability."""
        unusable: Bools = np.logical_or.reduce(~np.isfinite(self.probabilities), axis=1)
        return unusable

    @cached_property
    def relevance(self) -> Float64s:
        """The expected gain [N], by which the rows of a query are ranked."""
        gains = np.array(self.label_gains, dtype=np.float64)
        # Do not use a matrix product here, because its rounding may break ties between rows with equal probabilities.
        relevance: Float64s = (self.probabilities * gains).sum(axis=1)
        return relevance

    def select(self, mask: Bools) -> "ScoredRows":
        """Return the rows where `mask` [N] is true, in the same order."""
        return ScoredRows(
            self.query_id[mask],
            self.label[mask],
            self.gain[mask],
            self.probabilities[mask],
            self.labels,
            self.label_gains,
            {name: SliceColumn(column.codes[mask], column.names) for name, column in self.slices.items()},
            self.meaningless,
        )


@dataclass(frozen=True, eq=False)
class PerQuery:
    """The values of several metrics for each of Q queries, in ascending order of their ids.

    A metric is NaN for queries for which it is undefined.
    """

    query_id: Int64s
    values: Mapping[str, Float64s]


# A statistic is a metric that can be evaluated with different query weights. If all weights are 1, the result is the
# metric itself. If the weights are how often each query was drawn, it is the metric of a bootstrap resample. Using the
# same definition for both ensures that the gate judges exactly the metric that is reported.


class Statistic(Protocol):
    """A metric over Q queries that can be evaluated for bootstrap resamples."""

    @property
    def counted(self) -> Bools:
        """Return a mask [Q] of the queries that contribute to the metric."""

    def at(self, weights: Float64s) -> Float64s:
        """Evaluate the metric for R resamples.

        `weights` [R, Q] are how often each query was drawn. Returns the values [R], which are NaN where undefined.
        """


@dataclass(frozen=True)
class Missing:
    """The result of a metric that cannot be computed, with the reason."""

    reason: str
    value: ClassVar[None] = None
    num_queries: ClassVar[int] = 0


@dataclass(frozen=True, eq=False)
class Sums:
    """A statistic that is a function of C sums over queries.

    `parts` [Q, C] are the summands, and `combine` maps the sums [R, C] of R resamples to values [R].
    """

    parts: Float64s
    combine: Callable[[Float64s], Float64s]
    counted: Bools

    def at(self, weights: Float64s) -> Float64s:
        return self.combine(weights @ self.parts)


def mean_over_queries(values: Float64s) -> Sums:
    """Return the mean of values [Q] as a statistic, ignoring NaN."""
    defined = ~np.isnan(values)
    return Sums(np.stack([np.where(defined, values, 0.0), defined], axis=1), ratio, defined)


def ratio(sums: Float64s) -> Float64s:
    """Divide the first column of [R, 2] by the second. Returns NaN where the second is 0."""
    return divided(sums[:, 0], sums[:, 1])


def divided(over: Float64s, under: Float64s) -> Float64s:
    """Divide elementwise. Returns NaN where `under` is 0."""
    out = np.full(np.broadcast(over, under).shape, np.nan)
    np.divide(over, under, out=out, where=under != 0)
    return out


def value_of(statistic: Statistic) -> float:
    """Evaluate a statistic with all weights set to 1, which gives the metric itself."""
    return float(statistic.at(np.ones((1, len(statistic.counted))))[0])


@dataclass(frozen=True, eq=False)
class QueryGroups:
    """An assignment of N rows to Q queries.

    `ids` [Q] are the query ids in ascending order, and `index` [N] is the position of each row's query among them.
    """

    ids: Int64s
    index: Int64s

    @classmethod
    def of(cls, query_id: Int64s) -> "QueryGroups":
        ids, index = np.unique(query_id, return_inverse=True)
        return cls(ids, index)

    def sums(self, values: Float64s | Bools) -> Float64s:
        """Sum up values [N] for each query, [Q]."""
        return np.bincount(self.index, values, minlength=len(self.ids)).astype(np.float64)

    def table(self, column: Int64s, num_columns: int, values: Float64s | Bools) -> Float64s:
        """Sum up values [N] for each query and column, [Q, C]. Rows whose column is -1 are ignored."""
        kept = column >= 0
        cells = self.index[kept] * num_columns + column[kept]
        size = len(self.ids) * num_columns
        return np.bincount(cells, values[kept], minlength=size).astype(np.float64).reshape(-1, num_columns)
