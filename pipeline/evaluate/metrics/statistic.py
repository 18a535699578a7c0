"""A metric as a function of how often each query counts.

With every query once it is the metric itself; with drawn multiplicities it is one resample of the bootstrap. Both come
from one definition, so that the gate cannot judge another quantity than the report shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s


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


@dataclass(frozen=True, eq=False)
class Sums:
    """A function of C sums over queries: parts [Q, C]; `combine` turns sums [R, C] into values [R]."""

    parts: Float64s
    combine: Callable[[Float64s], Float64s]
    counted: Bools

    def at(self, weights: Float64s) -> Float64s:
        return self.combine(weights @ self.parts)


def mean_over_queries(values: Float64s) -> Sums:
    """The mean of values [Q]; a query with NaN is left out."""
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
    """The metric itself: every query once."""
    return float(statistic.at(np.ones((1, len(statistic.counted))))[0])


@dataclass(frozen=True, eq=False)
class Queries:
    """Which of Q queries each of N rows belongs to: ids [Q] ascending, index [N]."""

    ids: Int64s
    index: Int64s

    @classmethod
    def of(cls, query_id: Int64s) -> "Queries":
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
