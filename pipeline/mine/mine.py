"""One worker's share of the queries, piece by piece; who finds all pieces there commits the negatives."""

from collections.abc import Callable

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.mine.config import MineConfig
from pipeline.mine.parts import MiningParts
from pipeline.mine.search import Searcher
from pipeline.mine.select import Counts, Judged, choose_negatives


def mine_share(
    parts: MiningParts,
    searcher: Searcher,
    judged: Judged,
    rows_of: Callable[[Int64s], Int64s],
    config: MineConfig,
    *,
    worker: int,
    workers: int,
    stop: StopSignal,
) -> int:
    """Mine for the queries of `worker` of `workers`, a run of pieces; returns how many of all pieces are missing.

    `judged`: of all queries. `rows_of`: items to the numbers they are committed by. What is committed is not done
    again. Raises Preempted, NumericError.
    """
    count = parts.num_query_parts
    share = range(worker * count // workers, (worker + 1) * count // workers)
    done = parts.done("negatives")
    todo = [index for index in share if index not in done]
    if todo:
        searcher.prepare(worker, workers)
        total = sum(stop - start for start, stop in map(parts.queries, todo))
        with progress("searching for negatives", total, "queries") as advance:
            for index in todo:
                stop.raise_if_set("searching for negatives; finished parts are kept")
                first, last = parts.queries(index)
                mine = judged.part(first, last)
                items, counts = choose_negatives(searcher.search(first, last, mine), mine, config)
                parts.commit_negatives(index, rows_of(items), counts)
                advance(last - first)
        done = parts.done("negatives")
    return count - len(done)


def all_negatives(parts: MiningParts, most: int) -> tuple[Int64s, Counts]:
    """The negatives [Q, most] of all queries, and what became of their best products. All pieces must be there."""
    found = [parts.negatives(index) for index in range(parts.num_query_parts)]
    products = [np.zeros((0, most), dtype=np.int64), *(product for product, _ in found)]
    return np.concatenate(products), sum((counts for _, counts in found), Counts())
