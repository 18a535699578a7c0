"""Mined negatives as training reads them: of each query some products, by the row of the token shards that has them."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.groups import locate
from pipeline.core.order import mix64, stream_key
from pipeline.data.loader import RowSource

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
NONE = -1
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

    def tokens(self, products: Int64s, bucket: int, length: int) -> Int32s:
        """Tokens [N, length] of products [N], where `length` is that of products in `bucket`.

        A longer product is cut and its last token kept, as prepare cuts one that is longer than the largest bucket.
        """
        pools, numbers = locate(self.rows.sizes, products)
        result = np.empty((len(products), length), dtype=np.int32)
        for pool in np.unique(pools):
            here = np.flatnonzero(pools == pool)
            shape = max(bucket, int(pool))
            whole = self.rows.read(pools[here], numbers[here], shape, ("product",))["product"]
            result[here] = whole[:, :length]
            real = (whole != self.pad_id).sum(axis=1)
            (cut,) = np.nonzero(real > length)
            result[here[cut], -1] = whole[cut, real[cut] - 1]
        return result
