"""Ranking metrics per query, both for scored rows and for search results.

If rows have tied scores, we compute the mean of a metric over all possible orders of these rows (McSherry and Najork,
"Computing Information Retrieval Performance Measures Efficiently in the Presence of Tied Scores", ECIR 2008). This
ensures that a model that scores all rows the same is rated like a random order, even if the input happens to list the
relevant rows first.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.batch_order import rank_among_equals
from pipeline.evaluate.config import RETRIEVAL, MetricsConfig
from pipeline.evaluate.metrics.scored_rows import GAIN_TOLERANCE, PerQuery, QueryGroups, divided


@dataclass(frozen=True, eq=False)
class Ranking:
    """The ranks of N rows among the rows of their query.

    For each row, `above` [N] is the number of rows with a higher score, and `tied` [N] is the number of rows with the
    same score, including the row itself.
    """

    queries: QueryGroups
    above: Int64s
    tied: Int64s

    @classmethod
    def of(cls, queries: QueryGroups, score: Float64s) -> "Ranking":
        """Rank the rows of each query by their scores [N], highest first."""
        order = np.lexsort((-score, queries.index))
        query, score = queries.index[order], score[order]
        new = np.ones(len(order), dtype=np.bool_)  # whether a row starts a new group of tied rows
        new[1:] = (query[1:] != query[:-1]) | (score[1:] != score[:-1])
        in_query, _ = rank_among_equals(query)
        in_tie, size = rank_among_equals(np.cumsum(new))
        above, tied = np.empty_like(in_query), np.empty_like(size)
        above[order], tied[order] = in_query - in_tie, size
        return cls(queries, above, tied)

    def expected(self, by_rank: Float64s) -> Float64s:
        """Return the expected value [N] of a function of the rank, averaged over all orders of tied rows.

        The function is given by its values `by_rank` [K] for the first K ranks and is 0 for all others.
        """
        total = np.concatenate([[0.0], np.cumsum(by_rank)])
        last = len(by_rank)
        upto, after = np.minimum(self.above, last), np.minimum(self.above + self.tied, last)
        return divided(total[after] - total[upto], self.tied.astype(np.float64))


def discounts(k: int) -> Float64s:
    """Return the DCG discounts 1 / log2(rank + 1) for ranks 1 to k (Jarvelin and Kekalainen 2002)."""
    discount: Float64s = 1.0 / np.log2(np.arange(2.0, k + 2.0))
    return discount


def ndcg_by_query(ranking: Ranking, gain: Float64s, k: int) -> Float64s:
    """Compute nDCG@k [Q] with linear gains. It is NaN for queries without any gain."""
    ideal = Ranking.of(ranking.queries, gain)
    dcg, best = (ranking.queries.sums(gain * order.expected(discounts(k))) for order in (ranking, ideal))
    return divided(dcg, best)


def hits_by_query(ranking: Ranking, relevant: Bools, k: int, metric: str) -> Float64s:
    """Compute `metric` [Q], which is recall@k or precision@k.

    As in trec_eval, the denominator of precision is k even if a query has fewer rows. Both metrics are NaN for queries
    without a relevant row, because all orders of their rows are equally good.
    """
    hits, num_relevant = ranking.queries.sums(relevant * ranking.expected(np.ones(k))), ranking.queries.sums(relevant)
    return divided(hits, num_relevant if metric == "recall" else np.where(num_relevant > 0, float(k), 0.0))


def reciprocal_rank_by_query(ranking: Ranking, relevant: Bools) -> Float64s:
    """Compute the reciprocal rank [Q] of the first relevant row. It is NaN for queries without a relevant row."""
    queries, num_queries = ranking.queries, len(ranking.queries.ids)
    above = np.full(num_queries, np.iinfo(np.int64).max)
    np.minimum.at(above, queries.index[relevant], ranking.above[relevant])
    best = relevant & (ranking.above == above[queries.index])  # relevant rows that are tied for the highest rank
    hits = queries.sums(best).astype(np.int64)
    tied = np.zeros(num_queries, dtype=np.int64)
    tied[queries.index[best]] = ranking.tied[best]
    result = np.full(num_queries, np.nan)
    alone = (hits > 0) & (tied == hits)
    result[alone] = 1.0 / (above[alone] + 1.0)
    # The remaining queries have `num_hits` relevant rows among `size` tied rows, with `above` rows before them. Compute
    # the mean reciprocal rank of the first relevant one over all orders of the tied rows.
    for query in np.flatnonzero((hits > 0) & (tied > hits)):
        size, num_hits = int(tied[query]), int(hits[query])
        offsets = np.arange(size - num_hits + 1)
        none_before = np.cumprod(np.concatenate([[1.0], (size - num_hits - offsets[:-1]) / (size - offsets[:-1])]))
        result[query] = (none_before * num_hits / (size - offsets) / (int(above[query]) + offsets + 1)).sum()
    return result


# Metrics of search results over the whole catalogue, compared with relevance judgements.


@dataclass(frozen=True, eq=False)
class Judgements:
    """Relevance judgements: J triples of a query, an item and the item's gain for the query.

    If a pair of query and item occurs more than once, the highest gain counts.
    """

    query_id: Int64s
    item_id: Int64s
    gain: Float64s

    def relevant_gain(self, config: MetricsConfig) -> float:
        """Return the gain from which on an item counts as relevant. Items without any gain are never relevant."""
        threshold = config.relevant_gain if config.relevant_gain is not None else self.gain.max(initial=0.0)
        return float(max(threshold - GAIN_TOLERANCE, np.finfo(np.float64).tiny))


def retrieval_by_query(query_id: Int64s, ranked: Int64s, judged: Judgements, config: MetricsConfig) -> PerQuery:
    """Compute MRR, and recall, nDCG and success at each rank in `retrieval_at`.

    Args:
        query_id: The unique ids [Q] of the queries.
        ranked: The search results [Q, K] of each query, best first and padded with -1.
        judged: The judgements. Items with a gain of at least `relevant_gain` (by default the largest gain) count as
            relevant, while nDCG takes all gains into account. Unjudged items count as not relevant.
        config: The ranks and the minimum gain of a relevant item.

    Returns:
        The metrics of each query, in ascending order of their ids. A metric is NaN for queries without a relevant item
        (or, in the case of nDCG, without any gain), and is omitted at ranks greater than K.
    """
    order = np.argsort(query_id)
    query_id, ranked = query_id[order], ranked[order]
    num_queries = len(query_id)
    # Map the judged pairs to positions of their query and item, and keep the highest gain of duplicate pairs.
    position = np.minimum(np.searchsorted(query_id, judged.query_id), num_queries - 1)
    selected = query_id[position] == judged.query_id
    query, item, pair_gain = position[selected], judged.item_id[selected], judged.gain[selected]
    items, item = np.unique(item, return_inverse=True)  # with positions, we can represent a pair by a single number
    pair = query * len(items) + item
    order = np.lexsort((-pair_gain, pair))
    pairs, first = np.unique(pair[order], return_index=True)
    query, pair_gain = pairs // max(1, len(items)), pair_gain[order][first]
    # Look up the gains of the search results, [Q, K]. Unjudged pairs have a gain of 0.
    gain = np.zeros(ranked.shape)
    if len(items):
        position = np.minimum(np.searchsorted(items, ranked), len(items) - 1)
        ranked_pair = np.arange(num_queries)[:, None] * len(items) + position
        at = np.minimum(np.searchsorted(pairs, ranked_pair), len(pairs) - 1)
        gain = np.where((items[position] == ranked) & (pairs[at] == ranked_pair), pair_gain[at], 0.0)
    best_first = pair_gain[np.lexsort((-pair_gain, query))]
    rank = np.arange(len(query)) - np.searchsorted(query, np.arange(num_queries))[query]
    threshold = judged.relevant_gain(config)
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
