"""Inputs and building blocks of metrics: scored rows as host arrays, and statistics over weighted queries."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s

GAIN_TOLERANCE = 1e-6
"""Gains are stored as float32, so 0.7 is read back as 0.69999999 and must still reach a threshold of 0.7."""


@dataclass(frozen=True, eq=False)
class SliceColumn:
    """A categorical column: codes [N] into `names`, -1 for a row without a value."""

    codes: Int64s
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """N rows with their labels and the probabilities of a model, in an order that depends on neither.

    Attributes:
        query_id: [N]. Rows of a query need not be adjacent.
        label: [N], index into `labels`, -1 for an unlabelled row.
        gain: [N], graded relevance, 0 or more.
        probabilities: [N, K], one per label. May contain NaN and infinity, see `unusable`.
        labels: K names, least to most relevant.
        label_gains: K gains. The expected gain is the score that ranks the rows of a query.
        slices: columns by name.
        meaningless: reason why the probabilities cannot be judged (an untrained head), or empty.
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
        """Mask [N] of rows with a NaN or infinite probability."""
        unusable: Bools = np.logical_or.reduce(~np.isfinite(self.probabilities), axis=1)
        return unusable

    @cached_property
    def relevance(self) -> Float64s:
        """Expected gain [N], by which the rows of a query are ranked."""
        gains = np.array(self.label_gains, dtype=np.float64)
        relevance: Float64s = (self.probabilities * gains).sum(axis=1)  # not @: there equal rows may differ by rounding
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
    """Metric values of each of Q queries by name, ids ascending. NaN if undefined for a query."""

    query_id: Int64s
    values: Mapping[str, Float64s]


# A statistic is a metric as a function of query weights. With all weights 1 it is the metric itself, with drawn
# multiplicities it is one bootstrap resample. One definition serves both, so the gate judges the reported quantity.


class Statistic(Protocol):
    """A metric over Q queries."""

    @property
    def counted(self) -> Bools:
        """Mask [Q] of the queries that contribute to the metric."""

    def at(self, weights: Float64s) -> Float64s:
        """Evaluate R resamples: query counts [R, Q] (whole numbers) to values [R], NaN if undefined."""


@dataclass(frozen=True)
class Missing:
    """A metric that cannot be computed, with the reason."""

    reason: str
    value: ClassVar[None] = None
    num_queries: ClassVar[int] = 0


@dataclass(frozen=True, eq=False)
class Sums:
    """A function of C sums over queries. `parts` is [Q, C]. `combine` maps sums [R, C] to values [R]."""

    parts: Float64s
    combine: Callable[[Float64s], Float64s]
    counted: Bools

    def at(self, weights: Float64s) -> Float64s:
        return self.combine(weights @ self.parts)


def mean_over_queries(values: Float64s) -> Sums:
    """Average values [Q], ignoring NaN."""
    defined = ~np.isnan(values)
    return Sums(np.stack([np.where(defined, values, 0.0), defined], axis=1), ratio, defined)


def ratio(sums: Float64s) -> Float64s:
    """Divide the first column of [R, 2] by the second. NaN for 0 / 0."""
    return divided(sums[:, 0], sums[:, 1])


def divided(over: Float64s, under: Float64s) -> Float64s:
    """Divide element by element. NaN if `under` is 0."""
    out = np.full(np.broadcast(over, under).shape, np.nan)
    np.divide(over, under, out=out, where=under != 0)
    return out


def value_of(statistic: Statistic) -> float:
    """Return the metric itself, with every query counted once."""
    return float(statistic.at(np.ones((1, len(statistic.counted))))[0])


@dataclass(frozen=True, eq=False)
class QueryGroups:
    """Assignment of N rows to Q queries: ids [Q] ascending, index [N] into them."""

    ids: Int64s
    index: Int64s

    @classmethod
    def of(cls, query_id: Int64s) -> "QueryGroups":
        ids, index = np.unique(query_id, return_inverse=True)
        return cls(ids, index)

    def sums(self, values: Float64s | Bools) -> Float64s:
        """Sum values [N] by query, [Q]."""
        return np.bincount(self.index, values, minlength=len(self.ids)).astype(np.float64)

    def table(self, column: Int64s, num_columns: int, values: Float64s | Bools) -> Float64s:
        """Sum values [N] by query and column, [Q, C]. Rows with column -1 are ignored."""
        kept = column >= 0
        cells = self.index[kept] * num_columns + column[kept]
        size = len(self.ids) * num_columns
        return np.bincount(cells, values[kept], minlength=size).astype(np.float64).reshape(-1, num_columns)
