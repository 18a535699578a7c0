"""What is mined for, and where: the training queries that have a positive, against the distinct training products.

Memory: 28 bytes for each training row while it is looked through; 32 for each product, 24 for each query and 17 for
each judged pair after.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.batching import first_rows, locate
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.tokenizer import Tokens
from pipeline.evaluate.products import Products, distinct_products, text_hashes, to_tokens
from pipeline.mine.select import NONE, Judged


@dataclass(frozen=True)
class MiningTask:
    """Q queries and N items. Row numbers count over all buckets of `rows`, smallest bucket first."""

    rows: TokenRows
    query_id: Int64s
    """[Q], ascending."""
    query_row: Int64s
    """[Q], a row that has the query."""
    products: Products
    judged: Judged

    @property
    def num_queries(self) -> int:
        return len(self.query_id)

    @property
    def num_items(self) -> int:
        return len(self.products)

    def queries(self, start: int, stop: int) -> Tokens:
        """Texts of queries `start` to `stop`."""
        pools, numbers = locate(self.rows.sizes, self.query_row[start:stop])
        arrays = self.rows.read(pools, numbers, len(self.rows.sizes) - 1, ("query",))
        return to_tokens(arrays["query"], self.rows.pad_id)

    def items(self, start: int, stop: int) -> Tokens:
        """Texts of items `start` to `stop`."""
        return self.products.tokens(start, stop)

    def rows_of(self, items: Int64s) -> Int64s:
        """The row numbers that have these items, of any shape; NONE stays."""
        _, bucket, row = self.products.where.T
        numbers = first_rows(self.rows.sizes)[bucket] + row
        return np.where(items == NONE, NONE, numbers[items]) if len(numbers) else items


def make_task(
    rows: TokenRows, partitions: Sequence[int], *, positive_gain: float, max_items: int, stop: StopSignal
) -> MiningTask:
    """`rows`: training rows opened with their partition. `partitions`: those whose queries are asked.

    What is judged in any partition is no negative. Raises Preempted.
    """
    table = _read(rows, stop)
    positive = table["gain"] >= np.float32(positive_gain)
    asked = np.unique(table["query_id"][positive])
    asked = asked[np.isin(asked, table["query_id"][np.isin(table["partition"], partitions)])]
    products = distinct_products([rows], np.unique(table["product"][positive]), max_items, stop)
    order = np.argsort(table["query_id"], kind="stable")
    first = order[np.searchsorted(table["query_id"], asked, sorter=order)]
    place = np.minimum(np.searchsorted(asked, table["query_id"]), max(0, len(asked) - 1))
    mine = asked[place] == table["query_id"] if len(asked) else np.zeros(len(order), dtype=np.bool_)
    items = products.numbers_of(table["product"][mine])
    return MiningTask(rows, asked, first, products, _judged(place[mine], items, positive[mine], len(asked)))


def _judged(query: Int64s, items: Int64s, positive: npt.NDArray[np.bool_], num_queries: int) -> Judged:
    """Pairs that came several times count once, as positive when one of them is."""
    order = np.lexsort((~positive, items, query))
    query, items, positive = query[order], items[order], positive[order]
    new = items != NONE
    new[1:] &= (query[1:] != query[:-1]) | (items[1:] != items[:-1])
    offsets = np.concatenate([[0], np.cumsum(np.bincount(query[new], minlength=num_queries))]).astype(np.int64)
    return Judged(offsets, items[new], positive[new])


def _read(rows: TokenRows, stop: StopSignal) -> Arrays:
    """Query, hash of the product, gain and partition of every row, in the order of their numbers."""
    fields = ("query_id", "product", "gain", "partition")
    parts: dict[str, list[npt.NDArray[np.generic]]] = {name: [] for name in fields}
    with progress("reading judgements", sum(rows.sizes), "rows") as advance:
        for bucket, numbers in rows.blocks():
            stop.raise_if_set("reading judgements")
            arrays = rows.read(np.full(len(numbers), bucket), numbers, bucket, fields)
            arrays["product"] = text_hashes(arrays["product"], rows.pad_id)
            for name, values in arrays.items():
                parts[name].append(values)
            advance(len(numbers))
    types = {"query_id": np.int64, "product": np.uint64, "gain": np.float32, "partition": np.int64}
    return {name: np.concatenate([np.zeros(0, dtype=types[name]), *found]) for name, found in parts.items()}
