"""What metrics work on: scored rows as host arrays, and a metric as a function of how often each query counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s

GAIN_TOLERANCE = 1e-6
"""Gains are stored as float32: 0.7 comes back as 0.69999999, and is meant to reach 0.7."""


@dataclass(frozen=True, eq=False)
class SliceColumn:
    """A column by which rows are told apart: codes [N] into `names`, -1 where a row has no value."""

    codes: Int64s
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ScoredRows:
    """N rows with what is known about them and what a model says of them, in an order that does not depend on either.

    Attributes:
        query_id: [N]; rows of a query need not be neighbours.
        label: [N], index into `labels`; -1 where a row has none.
        gain: [N], graded relevance, 0 or more.
        probabilities: [N, K], of each label; NaN and infinity may occur and are found by `unusable`.
        labels: K names, least to most relevant.
        label_gains: K gains; the expected gain under them is the score that ranks the rows of a query.
        slices: columns by name.
        meaningless: why the probabilities say nothing, of a model whose scores were not trained; else empty.
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
        """[N]: rows with a NaN or infinite probability."""
        unusable: Bools = np.logical_or.reduce(~np.isfinite(self.probabilities), axis=1)
        return unusable

    @cached_property
    def relevance(self) -> Float64s:
        """[N]: the expected gain, by which the rows of a query are ranked."""
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
    """Figures that exist for each of Q queries, ids ascending; NaN where one is not defined for a query."""

    query_id: Int64s
    values: Mapping[str, Float64s]


# A metric as a function of how often each query counts. With every query once it is the metric itself; with drawn
# multiplicities it is one resample of the bootstrap. Both come from one definition, so that the gate cannot judge
# another quantity than the report shows.


class Statistic(Protocol):
    """A metric over Q queries."""

    @property
    def counted(self) -> Bools:
        """[Q]: the queries that bear on it."""

    def at(self, weights: Float64s) -> Float64s:
        """[R, Q] whole numbers, how often each query counts, to [R] values; NaN where it is not defined."""


@dataclass(frozen=True)
class Missing:
    """Why a metric cannot be computed."""

    reason: str
    value: ClassVar[None] = None
    num_queries: ClassVar[int] = 0


@dataclass(frozen=True, eq=False)
class Sums:
    """A function of C sums over queries: parts [Q, C]; `combine` turns sums [R, C] into values [R]."""

    parts: Float64s
    combine: Callable[[Float64s], Float64s]
    counted: Bools

    def at(self, weights: Float64s) -> Float64s:
        return self.combine(weights @ self.parts)


def mean_over_queries(values: Float64s) -> Sums:
    """Average values [Q]; a query with NaN is left out."""
    defined = ~np.isnan(values)
    return Sums(np.stack([np.where(defined, values, 0.0), defined], axis=1), ratio, defined)


def ratio(sums: Float64s) -> Float64s:
    """[R, 2] to first / second, NaN for 0 / 0."""
    return divided(sums[:, 0], sums[:, 1])


def divided(over: Float64s, under: Float64s) -> Float64s:
    """Element by element; NaN where `under` is 0."""
    out = np.full(np.broadcast(over, under).shape, np.nan)
    np.divide(over, under, out=out, where=under != 0)
    return out


def value_of(statistic: Statistic) -> float:
    """Return the metric itself: every query counts once."""
    return float(statistic.at(np.ones((1, len(statistic.counted))))[0])


@dataclass(frozen=True, eq=False)
class QueryGroups:
    """Which of Q queries each of N rows belongs to: ids [Q] ascending, index [N]."""

    ids: Int64s
    index: Int64s

    @classmethod
    def of(cls, query_id: Int64s) -> "QueryGroups":
        ids, index = np.unique(query_id, return_inverse=True)
        return cls(ids, index)

    def sums(self, values: Float64s | Bools) -> Float64s:
        """[N] to the sum of each query, [Q]."""
        return np.bincount(self.index, values, minlength=len(self.ids)).astype(np.float64)

    def table(self, column: Int64s, num_columns: int, values: Float64s | Bools) -> Float64s:
        """[N] columns and values to [Q, C]: the sum of each query and column; rows with column -1 are left out."""
        kept = column >= 0
        places = self.index[kept] * num_columns + column[kept]
        size = len(self.ids) * num_columns
        return np.bincount(places, values[kept], minlength=size).astype(np.float64).reshape(-1, num_columns)
