"""Determine which queries and products of a holdout were trained on, by id or by text.

A text counts as trained on regardless of the side that it was on, because in item-to-item data the query of one row can
be the product of another. Texts are compared by their tokens, including prefixes and after truncation.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Bools, Int64s, UInt64s
from pipeline.data.shards import NO_ID, Arrays, text_hashes

TRAINED_ON = "trained_on"
PARTS = ("both", "query", "product", "neither")  # values of the slice column TRAINED_ON
_NO_TEXTS: UInt64s = np.zeros(0, dtype=np.uint64)
FIELDS = ("query", "product", "query_id", "product_id", "sample_id")  # arrays that TrainedItems reads


class Keys:
    """Distinct keys [K] in ascending order, and a mask [K] of those that occur in the training rows."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self.values = np.unique(values)
        self.trained: Bools = np.zeros(len(self.values), dtype=np.bool_)

    def mark(self, keys: npt.NDArray[Any]) -> None:
        """Mark keys as trained on. Keys that are not in `values` are ignored."""
        index = np.minimum(np.searchsorted(self.values, keys), len(self.values) - 1)
        self.trained[index[self.values[index] == keys]] = True

    def look_up(self, keys: npt.NDArray[Any]) -> Bools:
        """Return a mask of the keys that were trained on. All of them must be in `values`."""
        return self.trained[np.searchsorted(self.values, keys)]


class TrainedItems:
    """The queries and products of the N rows of a holdout, of which those that were trained on can be marked.

    `rows` has the ids, and hashes of the texts. A product without an id is identified by its text. This needs about 100
    bytes of memory for each row of the holdout, and none for the training rows.
    """

    def __init__(self, blocks: Iterable[Arrays], pad_id: int, more_texts: UInt64s = _NO_TEXTS) -> None:
        """Read the blocks of a holdout, with all FIELDS. `more_texts` are hashes of other texts to look for."""
        parts = [_hashed(arrays, pad_id) for arrays in blocks]
        self.rows: Arrays = {name: np.concatenate([part[name] for part in parts]) for name in FIELDS}
        texts = np.concatenate([self.rows["query"], self.rows["product"], more_texts])
        self.texts, self.queries = Keys(texts), Keys(self.rows["query"])
        self.query_ids, self.product_ids = Keys(self.rows["query_id"]), Keys(self.rows["product_id"])
        self.keys = self.texts, self.queries, self.query_ids, self.product_ids

    def mark(self, arrays: Arrays, pad_id: int) -> None:
        """Mark the items of a block of training rows."""
        rows = _hashed(arrays, pad_id)
        for keys, name in zip(self.keys, ("query", "query", "query_id", "product_id"), strict=True):
            keys.mark(rows[name])
        self.texts.mark(rows["product"])

    @property
    def query_is_trained(self) -> Bools:
        return self.query_ids.look_up(self.rows["query_id"]) | self.texts.look_up(self.rows["query"])

    @property
    def product_is_trained(self) -> Bools:
        return self.product_ids.look_up(self.rows["product_id"]) | self.texts.look_up(self.rows["product"])

    @property
    def parts(self) -> Int64s:
        """The part of each row [N] as an index into PARTS."""
        query, product = self.query_is_trained.astype(np.int64), self.product_is_trained.astype(np.int64)
        return 3 - 2 * query - product


def _hashed(arrays: Arrays, pad_id: int) -> Arrays:
    rows = arrays | {side: text_hashes(arrays[side], pad_id) for side in ("query", "product")}
    has_id = rows["product_id"] != NO_ID
    return rows | {"product_id": np.where(has_id, rows["product_id"], rows["product"].view(np.int64))}
