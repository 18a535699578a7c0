"""Mined negatives as training reads them: of each query some products, by the row of the token shards that has them."""

from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Int32s, Int64s
from pipeline.core.groups import locate
from pipeline.core.order import mix64, stream_key
from pipeline.data.loader import RowSource

NONE = -1
_BLOCK = 65_536
_FIRST = 5  # purpose of a stream of random numbers, apart from those of core/batching, data/sampler and train/loop


@dataclass(frozen=True)
class MinedProducts:
    """Products for `slots` slots of every group.

    Args:
        rows: what `product` counts in.
        pad_id: of its tokens.
        query_id: [Q], ascending.
        product: [Q, K] row numbers over all buckets of `rows`, smallest bucket first; NONE behind the last.
    """

    rows: RowSource
    pad_id: int
    query_id: Int64s
    product: Int64s
    slots: int
    seed: int

    def places(self, query_id: Int64s) -> Int64s:
        """Where queries [N] stand in `query_id`, NONE for those that nothing was mined for."""
        if not len(self.query_id):
            return np.full(len(query_id), NONE, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.query_id, query_id), len(self.query_id) - 1)
        return np.where(self.query_id[places] == query_id, places, NONE)

    def choose(self, places: Int64s, visits: Int64s) -> Int64s:
        """Products [N, slots] of the queries at `places` [N], NONE where there are not so many.

        Visit v [N] of a query takes the `slots` products behind those of visit v - 1, around and around, the first one
        from a product drawn for the query. So its groups and epochs take each of its products equally often.
        """
        nothing = np.full((len(places), self.slots), NONE, dtype=np.int64)
        if not self.product.size:
            return nothing
        products = np.where(places[:, None] == NONE, NONE, self.product[places])
        count = (products != NONE).sum(axis=1)
        around = np.maximum(count, 1)
        key = np.uint64(stream_key(self.seed, _FIRST))
        first = (mix64(self.query_id[places].astype(np.uint64) ^ key) % around.astype(np.uint64)).astype(np.int64)
        slot = np.arange(self.slots)
        chosen = (first[:, None] + visits[:, None] * self.slots + slot) % around[:, None]
        return np.where(slot < count[:, None], np.take_along_axis(products, chosen, axis=1), nothing)

    def tokens(self, products: Int64s) -> Int32s:
        """Tokens of products [N], as long as those of the largest bucket."""
        largest = len(self.rows.sizes) - 1
        tokens: Int32s = self.rows.read(*locate(self.rows.sizes, products), largest, ("product",))["product"]
        return tokens

    def room(self, query_id: Int64s) -> Int64s:
        """The most tokens that the mined products of a group of each query take, whichever are chosen, [N]."""
        kinds, place = np.unique(self.product[self.product != NONE], return_inverse=True)
        sizes = np.zeros(self.product.shape, dtype=np.int64)
        sizes[self.product != NONE] = self._lengths(kinds)[place]
        most = -np.sort(-sizes, axis=1)[:, : self.slots].sum(axis=1)
        places = self.places(query_id)
        return np.where(places == NONE, 0, most[places]) if len(most) else np.zeros_like(query_id)

    def _lengths(self, products: Int64s) -> Int64s:
        found = [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(products), _BLOCK):
            found.append((self.tokens(products[start : start + _BLOCK]) != self.pad_id).sum(axis=1))
        return np.concatenate(found)
