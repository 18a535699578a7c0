"""Ranking metrics per query, over scored rows and over search results.

Tied rows have no order, so a metric is its mean over all orders of them. A model that gives every row the same score
therefore gets the value of chance, not 1.0 because the file lists relevant rows first (McSherry and Najork, "Computing
Information Retrieval Performance Measures Efficiently in the Presence of Tied Scores", ECIR 2008).
"""

from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.batch_order import rank_among_equals
from pipeline.evaluate.config import RETRIEVAL, MetricsConfig
from pipeline.evaluate.metrics.scored_rows import GAIN_TOLERANCE, PerQuery, QueryGroups, divided


@dataclass(frozen=True, eq=False)
class Ranking:
    """Rank of each of N rows in its query: `above` [N] rows score higher, `tied` [N] the same (itself included)."""

    queries: QueryGroups
    above: Int64s
    tied: Int64s

    @classmethod
    def of(cls, queries: QueryGroups, score: Float64s) -> "Ranking":
        """Rank the rows of each query by descending score [N]."""
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
        """Average `by_rank` [K], a function of the rank that is 0 beyond K, over all orders of ties. Returns [N]."""
        total = np.concatenate([[0.0], np.cumsum(by_rank)])
        last = len(by_rank)
        upto, after = np.minimum(self.above, last), np.minimum(self.above + self.tied, last)
        return divided(total[after] - total[upto], self.tied.astype(np.float64))


def discounts(k: int) -> Float64s:
    """Return 1 / log2(rank + 1) for ranks 1 to k (Jarvelin and Kekalainen 2002)."""
    discount: Float64s = 1.0 / np.log2(np.arange(2.0, k + 2.0))
    return discount


def ndcg_by_query(ranking: Ranking, gain: Float64s, k: int) -> Float64s:
    """Compute nDCG@k with linear gain, [Q]. NaN for a query without any gain."""
    ideal = Ranking.of(ranking.queries, gain)
    dcg, best = (ranking.queries.sums(gain * order.expected(discounts(k))) for order in (ranking, ideal))
    return divided(dcg, best)


def recall_by_query(ranking: Ranking, relevant: Bools, k: int) -> Float64s:
    """Compute recall@k, [Q]. NaN for a query without a relevant row."""
    hits = ranking.queries.sums(relevant * ranking.expected(np.ones(k)))
    return divided(hits, ranking.queries.sums(relevant))


def precision_by_query(ranking: Ranking, relevant: Bools, k: int) -> Float64s:
    """Compute precision@k, [Q]. The denominator is k even if a query has fewer rows, as in trec_eval.

    NaN for a query without a relevant row, because no order of its rows is better than another.
    """
    hits = ranking.queries.sums(relevant * ranking.expected(np.ones(k)))
    return np.where(ranking.queries.sums(relevant) > 0, hits / k, np.nan)


def reciprocal_rank_by_query(ranking: Ranking, relevant: Bools) -> Float64s:
    """Compute 1 / rank of the first relevant row, [Q]. NaN for a query without one."""
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
    # Mean of 1 / rank of the first of `num_hits` rows among `size` rows in random order, after `above` others.
    for query in np.flatnonzero((hits > 0) & (tied > hits)):
        size, num_hits = int(tied[query]), int(hits[query])
        offsets = np.arange(size - num_hits + 1)
        none_before = np.cumprod(np.concatenate([[1.0], (size - num_hits - offsets[:-1]) / (size - offsets[:-1])]))
        result[query] = (none_before * num_hits / (size - offsets) / (int(above[query]) + offsets + 1)).sum()
    return result


# Metrics of ranked lists: search results over the whole catalogue, compared with judgements.


@dataclass(frozen=True, eq=False)
class Judgements:
    """J triples of query, item and gain, [J] each. A pair that occurs twice has its highest gain."""

    query_id: Int64s
    item_id: Int64s
    gain: Float64s


def retrieval_by_query(query_id: Int64s, ranked: Int64s, judged: Judgements, config: MetricsConfig) -> PerQuery:
    """Compute recall, nDCG and success at each rank of `retrieval_at`, and MRR.

    Args:
        query_id: [Q], unique.
        ranked: [Q, K] items of each query, best first, padded with -1. The order is not changed.
        judged: Items with a gain of at least `relevant_gain` (default: the largest gain) are relevant. Any gain counts
            for nDCG. Unjudged items count as not relevant.

    Returns:
        Queries ascending. NaN for a query without a relevant item (nDCG: without a gain), which the mean ignores.
        Ranks beyond K are omitted.
    """
    order = np.argsort(query_id)
    query_id, ranked = query_id[order], ranked[order]
    num_queries = len(query_id)
    # Judged pairs of these queries [J] by position of the query and item, with the highest gain of duplicate pairs.
    position = np.minimum(np.searchsorted(query_id, judged.query_id), num_queries - 1)
    selected = query_id[position] == judged.query_id
    query, item, pair_gain = position[selected], judged.item_id[selected], judged.gain[selected]
    items, item = np.unique(item, return_inverse=True)  # items become positions, so a pair is a single number
    pair = query * len(items) + item
    order = np.lexsort((-pair_gain, pair))
    pairs, first = np.unique(pair[order], return_index=True)
    query, pair_gain = pairs // max(1, len(items)), pair_gain[order][first]
    # Gains of the results [Q, K], 0 for an unjudged pair.
    gain = np.zeros(ranked.shape)
    if len(items):
        position = np.minimum(np.searchsorted(items, ranked), len(items) - 1)
        ranked_pair = np.arange(num_queries)[:, None] * len(items) + position
        at = np.minimum(np.searchsorted(pairs, ranked_pair), len(pairs) - 1)
        gain = np.where((items[position] == ranked) & (pairs[at] == ranked_pair), pair_gain[at], 0.0)
    best_first = pair_gain[np.lexsort((-pair_gain, query))]
    rank = np.arange(len(query)) - np.searchsorted(query, np.arange(num_queries))[query]
    threshold = config.relevant_gain if config.relevant_gain is not None else judged.gain.max(initial=0.0)
    threshold = max(threshold - GAIN_TOLERANCE, np.finfo(np.float64).tiny)  # an item without gain is never relevant
    hit = gain >= threshold
    relevant = np.bincount(query, pair_gain >= threshold, minlength=num_queries).astype(np.float64)
    values: dict[str, Float64s] = {}
    for k in (k for k in config.retrieval_at if k <= ranked.shape[1]):
        num_hits = hit[:, :k].sum(axis=1).astype(np.float64)
        values[f"{RETRIEVAL}recall@{k}"] = divided(num_hits, relevant)
        discount = np.where(rank < k, discounts(k)[np.minimum(rank, k - 1)], 0.0)
        ideal = np.bincount(query, best_first * discount, minlength=num_queries).astype(np.float64)
        values[f"{RETRIEVAL}ndcg@{k}"] = divided(gain[:, :k] @ discounts(k), ideal)
        values[f"{RETRIEVAL}success@{k}"] = np.where(relevant > 0, num_hits > 0, np.nan)
    first = np.where(hit.any(axis=1), 1.0 / (hit.argmax(axis=1) + 1.0), 0.0)
    values[f"{RETRIEVAL}mrr"] = np.where(relevant > 0, first, np.nan)
    return PerQuery(query_id, values)
