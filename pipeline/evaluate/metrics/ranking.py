"""Ranking metrics of each query: of its scored rows, and of lists that a search found.

Rows with equal scores have no order: a metric is its mean over all orders of the tied rows. So a model that gives every
row the same score gets what chance would give, and not 1.0 because the file lists relevant rows first (McSherry and
Najork, "Computing Information Retrieval Performance Measures Efficiently in the Presence of Tied Scores", ECIR 2008).
"""

from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.batch_order import rank_among_equals
from pipeline.evaluate.config import RETRIEVAL, MetricsConfig
from pipeline.evaluate.metrics.scored_rows import GAIN_TOLERANCE, PerQuery, QueryGroups, divided


@dataclass(frozen=True, eq=False)
class Ranking:
    """Where each of N rows stands in its query: `above` [N] rows score higher, `tied` [N] as high, itself included."""

    queries: QueryGroups
    above: Int64s
    tied: Int64s

    @classmethod
    def of(cls, queries: QueryGroups, score: Float64s) -> "Ranking":
        """Rank the rows of each query by falling score [N]."""
        order = np.lexsort((-score, queries.index))
        query, score = queries.index[order], score[order]
        new = np.ones(len(order), dtype=np.bool_)  # where a tie begins
        new[1:] = (query[1:] != query[:-1]) | (score[1:] != score[:-1])
        in_query, _ = rank_among_equals(query)
        in_tie, size = rank_among_equals(np.cumsum(new))
        above, tied = np.empty_like(in_query), np.empty_like(size)
        above[order], tied[order] = in_query - in_tie, size
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
    queries, num_queries = ranking.queries, len(ranking.queries.ids)
    above = np.full(num_queries, np.iinfo(np.int64).max)
    np.minimum.at(above, queries.index[relevant], ranking.above[relevant])
    best = relevant & (ranking.above == above[queries.index])  # the relevant rows of the first tie that has one
    hits = queries.sums(best).astype(np.int64)
    tied = np.zeros(num_queries, dtype=np.int64)
    tied[queries.index[best]] = ranking.tied[best]
    result = np.full(num_queries, np.nan)
    alone = (hits > 0) & (tied == hits)
    result[alone] = 1.0 / (above[alone] + 1.0)
    # The mean of 1 / rank of the first of `found` rows among `size` in random order, after `above` others.
    for query in np.flatnonzero((hits > 0) & (tied > hits)):
        size, found = int(tied[query]), int(hits[query])
        places = np.arange(size - found + 1)
        none_before = np.cumprod(np.concatenate([[1.0], (size - found - places[:-1]) / (size - places[:-1])]))
        result[query] = (none_before * found / (size - places) / (int(above[query]) + places + 1)).sum()
    return result


# Metrics of ranked lists: what a search against the whole catalogue found, against what is relevant.


@dataclass(frozen=True, eq=False)
class Judgements:
    """What is relevant: J triples of query, item and gain, [J] each. A pair told twice has its best gain."""

    query_id: Int64s
    item_id: Int64s
    gain: Float64s


def retrieval_by_query(query_id: Int64s, ranked: Int64s, judged: Judgements, config: MetricsConfig) -> PerQuery:
    """Recall, nDCG and success at each rank of `retrieval_at`, and MRR.

    Args:
        query_id: [Q], each once.
        ranked: [Q, K] items of each query, best first, -1 after the end of a list; the order is taken as it is.
        judged: relevant are items with a gain of `relevant_gain` or more, by default of the largest gain there is; any
            gain counts for nDCG. Items that nobody judged are taken as not relevant.

    Returns:
        Queries ascending. NaN where a query has no relevant item (nDCG: no gain): it is left out of the mean. Ranks
        beyond K are left out.
    """
    order = np.argsort(query_id)
    query_id, ranked = query_id[order], ranked[order]
    num_queries = len(query_id)
    # Judged pairs of the queries asked for [J], by query (its position) and item; of a pair told twice the best gain.
    place = np.minimum(np.searchsorted(query_id, judged.query_id), num_queries - 1)
    asked = query_id[place] == judged.query_id
    query, item, known = place[asked], judged.item_id[asked], judged.gain[asked]
    items, item = np.unique(item, return_inverse=True)  # items become positions, so that a pair is one number
    pair = query * len(items) + item
    order = np.lexsort((-known, pair))
    pairs, first = np.unique(pair[order], return_index=True)
    query, known = pairs // max(1, len(items)), known[order][first]
    # Gains of what was found [Q, K], 0 where nobody judged.
    gain = np.zeros(ranked.shape)
    if len(items):
        place = np.minimum(np.searchsorted(items, ranked), len(items) - 1)
        wanted = np.arange(num_queries)[:, None] * len(items) + place
        at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
        gain = np.where((items[place] == ranked) & (pairs[at] == wanted), known[at], 0.0)
    best_first = known[np.lexsort((-known, query))]
    rank = np.arange(len(query)) - np.searchsorted(query, np.arange(num_queries))[query]
    least = config.relevant_gain if config.relevant_gain is not None else judged.gain.max(initial=0.0)
    least = max(least - GAIN_TOLERANCE, np.finfo(np.float64).tiny)  # an item without gain is never relevant
    hit = gain >= least
    relevant = np.bincount(query, known >= least, minlength=num_queries).astype(np.float64)
    values: dict[str, Float64s] = {}
    for k in (k for k in config.retrieval_at if k <= ranked.shape[1]):
        found = hit[:, :k].sum(axis=1).astype(np.float64)
        values[f"{RETRIEVAL}recall@{k}"] = divided(found, relevant)
        discount = np.where(rank < k, discounts(k)[np.minimum(rank, k - 1)], 0.0)
        ideal = np.bincount(query, best_first * discount, minlength=num_queries).astype(np.float64)
        values[f"{RETRIEVAL}ndcg@{k}"] = divided(gain[:, :k] @ discounts(k), ideal)
        values[f"{RETRIEVAL}success@{k}"] = np.where(relevant > 0, found > 0, np.nan)
    first = np.where(hit.any(axis=1), 1.0 / (hit.argmax(axis=1) + 1.0), 0.0)
    values[f"{RETRIEVAL}mrr"] = np.where(relevant > 0, first, np.nan)
    return PerQuery(query_id, values)
