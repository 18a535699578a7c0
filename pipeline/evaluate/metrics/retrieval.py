"""Retrieval metrics from ranked lists: what a search against the whole catalogue found, against what is relevant."""

from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Float64s, Int64s
from pipeline.core.errors import DataError
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.metrics.names import RETRIEVAL
from pipeline.evaluate.metrics.ranking import discounts
from pipeline.evaluate.metrics.statistic import divided
from pipeline.evaluate.scored import GAIN_TOLERANCE, PerQuery


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

    Raises:
        DataError: no query, a query or an item of a list twice, shapes that do not fit.
    """
    _check(query_id, ranked, judged)
    order = np.argsort(query_id)
    query_id, ranked = query_id[order], ranked[order]
    known = _best_gains(query_id, judged)
    gain = _gains_of(ranked, known)
    least = config.relevant_gain if config.relevant_gain is not None else judged.gain.max(initial=0.0)
    least = max(least - GAIN_TOLERANCE, np.finfo(np.float64).tiny)  # an item without gain is never relevant
    hit = gain >= least
    relevant = np.bincount(known.query, known.gain >= least, minlength=len(query_id)).astype(np.float64)
    values: dict[str, Float64s] = {}
    for k in (k for k in config.retrieval_at if k <= ranked.shape[1]):
        found = hit[:, :k].sum(axis=1).astype(np.float64)
        values[f"{RETRIEVAL}recall@{k}"] = divided(found, relevant)
        values[f"{RETRIEVAL}ndcg@{k}"] = _ndcg(gain, known, k, len(query_id))
        values[f"{RETRIEVAL}success@{k}"] = np.where(relevant > 0, found > 0, np.nan)
    first = np.where(hit.any(axis=1), 1.0 / (hit.argmax(axis=1) + 1.0), 0.0)
    values[f"{RETRIEVAL}mrr"] = np.where(relevant > 0, first, np.nan)
    return PerQuery(query_id, values)


@dataclass(frozen=True, eq=False)
class _Known:
    """Judged pairs of the queries asked for, sorted by query and item: query [J] is a position, item and gain [J]."""

    query: Int64s
    item: Int64s
    gain: Float64s


def _best_gains(query_id: Int64s, judged: Judgements) -> _Known:
    place = np.minimum(np.searchsorted(query_id, judged.query_id), len(query_id) - 1)
    asked = query_id[place] == judged.query_id
    query, item, gain = place[asked], judged.item_id[asked], judged.gain[asked]
    order = np.lexsort((-gain, item, query))
    query, item, gain = query[order], item[order], gain[order]
    new = np.ones(len(query), dtype=bool)
    new[1:] = (query[1:] != query[:-1]) | (item[1:] != item[:-1])
    return _Known(query[new], item[new], gain[new])


def _gains_of(ranked: Int64s, known: _Known) -> Float64s:
    """[Q, K] items to their gains, 0 for those not judged. Items become positions, so that a pair is one number."""
    items = np.unique(known.item)
    if not len(items):
        return np.zeros(ranked.shape)
    keys = known.query * len(items) + np.searchsorted(items, known.item)
    place = np.minimum(np.searchsorted(items, ranked), len(items) - 1)
    wanted = np.arange(len(ranked))[:, None] * len(items) + place
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((items[place] == ranked) & (keys[at] == wanted), known.gain[at], 0.0)


def _ndcg(gain: Float64s, known: _Known, k: int, num_queries: int) -> Float64s:
    order = np.lexsort((-known.gain, known.query))
    start = np.searchsorted(known.query, np.arange(num_queries))
    rank = np.arange(len(order)) - start[known.query]
    ideal_discount = np.where(rank < k, discounts(k)[np.minimum(rank, k - 1)], 0.0)
    ideal = np.bincount(known.query, known.gain[order] * ideal_discount, minlength=num_queries)
    return divided(gain[:, :k] @ discounts(k), ideal.astype(np.float64))


def _check(query_id: Int64s, ranked: Int64s, judged: Judgements) -> None:
    if not len(query_id):
        raise DataError("no query to retrieve for", expected="at least one query in the holdout")
    if len(np.unique(query_id)) != len(query_id):
        raise DataError("a query has two ranked lists", expected="one list for each query")
    if ranked.ndim != 2 or len(ranked) != len(query_id) or not ranked.shape[1]:
        raise DataError(f"ranked lists are {ranked.shape}", expected=f"({len(query_id)}, items)")
    if not judged.query_id.shape == judged.item_id.shape == judged.gain.shape:
        raise DataError("judgements differ in length", expected="as many queries, items and gains")
    if not (judged.gain >= 0).all():
        raise DataError("a judgement has a negative gain or NaN", expected="0 or more")
    ordered = np.sort(ranked, axis=1)
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise DataError("a ranked list holds an item twice", expected="each item once")
