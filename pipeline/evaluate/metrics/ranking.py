"""Ranking metrics of each query. Equal scores have no order: a metric is its mean over all orders of the tied rows.

So a model that gives every row the same score gets what chance would give, and not 1.0 because the file lists relevant
rows first (McSherry and Najork, "Computing Information Retrieval Performance Measures Efficiently in the Presence of
Tied Scores", ECIR 2008).
"""

from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.evaluate.metrics.statistic import Queries, divided


@dataclass(frozen=True, eq=False)
class Ranking:
    """Where each of N rows stands in its query: `above` [N] rows score higher, `tied` [N] as high, itself included."""

    queries: Queries
    above: Int64s
    tied: Int64s

    @classmethod
    def of(cls, queries: Queries, score: Float64s) -> "Ranking":
        """Rank the rows of each query by falling score [N]."""
        order = np.lexsort((-score, queries.index))
        query, score = queries.index[order], score[order]
        first = _changes(query)
        tie = _changes(query) | _changes(score)
        start = np.maximum.accumulate(np.where(tie, np.arange(len(order)), 0))
        begin = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
        size = np.bincount(np.cumsum(tie) - 1)[np.cumsum(tie) - 1] if len(order) else np.zeros(0, dtype=np.int64)
        above, tied = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
        above[order], tied[order] = start - begin, size
        return cls(queries, above, tied)

    def expected(self, by_rank: Float64s) -> Float64s:
        """[N]: the mean of a quantity of the rank, [K] for the first K ranks and 0 after, over the orders of ties."""
        total = np.concatenate([[0.0], np.cumsum(by_rank)])
        last = len(by_rank)
        upto, after = np.minimum(self.above, last), np.minimum(self.above + self.tied, last)
        return divided(total[after] - total[upto], self.tied.astype(np.float64))


def discounts(k: int) -> Float64s:
    """1 / log2(rank + 1) of the ranks 1 to k (Jarvelin and Kekalainen 2002)."""
    discount: Float64s = 1.0 / np.log2(np.arange(2.0, k + 2.0))
    return discount


def ndcg_by_query(ranking: Ranking, gain: Float64s, k: int) -> Float64s:
    """nDCG@k with linear gain, [Q]; NaN for a query without any gain."""
    ideal = Ranking.of(ranking.queries, gain)
    dcg, best = (ranking.queries.sums(gain * order.expected(discounts(k))) for order in (ranking, ideal))
    return divided(dcg, best)


def recall_by_query(ranking: Ranking, relevant: Bools, k: int) -> Float64s:
    """Share of the relevant rows among the first k, [Q]; NaN for a query without one."""
    found = ranking.queries.sums(relevant * ranking.expected(np.ones(k)))
    return divided(found, ranking.queries.sums(relevant))


def precision_by_query(ranking: Ranking, relevant: Bools, k: int) -> Float64s:
    """Share of relevant rows among the first k, [Q]; of k also where a query has fewer rows, as trec_eval has it.

    NaN for a query without a relevant row: no order of its rows is better than another.
    """
    found = ranking.queries.sums(relevant * ranking.expected(np.ones(k)))
    return np.where(ranking.queries.sums(relevant) > 0, found / k, np.nan)


def reciprocal_rank_by_query(ranking: Ranking, relevant: Bools) -> Float64s:
    """1 / rank of the first relevant row, [Q]; NaN for a query without one."""
    queries = ranking.queries
    size = len(queries.ids)
    above = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(above, queries.index[relevant], ranking.above[relevant])
    best = relevant & (ranking.above == above[queries.index])  # the relevant rows of the first tie that has one
    hits = queries.sums(best).astype(np.int64)
    tied = np.zeros(size, dtype=np.int64)
    tied[queries.index[best]] = ranking.tied[best]
    result = np.full(size, np.nan)
    alone = (hits > 0) & (tied == hits)
    result[alone] = 1.0 / (above[alone] + 1.0)
    for query in np.flatnonzero((hits > 0) & (tied > hits)):
        result[query] = _mean_reciprocal(int(above[query]), int(tied[query]), int(hits[query]))
    return result


def _mean_reciprocal(above: int, tied: int, hits: int) -> float:
    """The mean of 1 / rank of the first of `hits` rows among `tied` in random order, after `above` others."""
    places = np.arange(tied - hits + 1)
    later = np.cumprod(np.concatenate([[1.0], (tied - hits - places[:-1]) / (tied - places[:-1])]))  # none before place
    return float((later * hits / (tied - places) / (above + places + 1)).sum())


def _changes(values: Float64s | Int64s) -> Bools:
    """True where a sorted array differs from the element before, and at its start."""
    return np.concatenate([np.ones(min(1, len(values)), dtype=bool), values[1:] != values[:-1]])


def ndcg(query: Int64s, gain: Float64s, score: Float64s, k: int) -> float:
    """Mean nDCG@k over queries with some gain, [N] each. NaN when no query has any."""
    values = ndcg_by_query(Ranking.of(Queries.of(query), score), gain, k)
    useful = ~np.isnan(values)
    return float(values[useful].mean()) if useful.any() else float("nan")
