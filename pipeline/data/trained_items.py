"""Determine which queries and products of a holdout were trained on, by id or by text.

A text counts as trained on regardless of the side that it was on, because in item-to-item data the query of one row can
be the product of another. Texts are compared by their tokens.
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Bools, Int64s, UInt64s
from pipeline.data.shards import NO_ID, Arrays, TokenRows, text_hashes

TRAINED_ON = "trained_on"
PARTS = ("both", "query", "product", "neither")  # values of the slice column TRAINED_ON
FIELDS = ("query", "product", "query_id", "product_id", "sample_id")  # arrays that TrainedItems reads


def row_blocks(rows: TokenRows, fields: Iterable[str] = FIELDS) -> Iterator[Arrays]:
    """Yield the given arrays of all rows in order, one block of bounded size at a time."""
    for bucket, numbers in rows.blocks():
        yield rows.read(np.full(len(numbers), bucket), numbers, bucket, tuple(fields))


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

    This needs about 100 bytes of memory for each row of the holdout, and none for the training rows.
    """

    def __init__(self, blocks: Iterable[Arrays], pad_id: int, more_texts: UInt64s | None = None) -> None:
        """Read at least one block of the holdout. `more_texts` are hashes of other texts to look for."""
        columns: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in FIELDS}
        for arrays in blocks:
            for name, values in columns.items():
                hashed = name in ("query", "product")
                values.append(text_hashes(arrays[name], pad_id) if hashed else arrays[name])
        self.rows = {name: np.concatenate(values) for name, values in columns.items()}
        rows, more = self.rows, [] if more_texts is None else [more_texts]
        self.texts = Keys(np.concatenate([rows["query"], rows["product"], *more]))
        self.queries, self.query_ids, self.product_ids = (
            Keys(rows[name]) for name in ("query", "query_id", "product_id")
        )

    def mark(self, arrays: Arrays, pad_id: int) -> None:
        """Mark the items of a block of training rows, which has all FIELDS except sample_id."""
        query, product = (np.unique(text_hashes(arrays[side], pad_id)) for side in ("query", "product"))
        for keys, values in ((self.texts, query), (self.texts, product), (self.queries, query)):
            keys.mark(values)
        self.query_ids.mark(arrays["query_id"])
        self.product_ids.mark(arrays["product_id"][arrays["product_id"] != NO_ID])

    @property
    def masks(self) -> list[Bools]:
        """The masks of the keys that were trained on, which can be merged with those of other ranks in place."""
        return [keys.trained for keys in (self.texts, self.queries, self.query_ids, self.product_ids)]

    @cached_property
    def query_is_trained(self) -> Bools:
        """A mask [N] of the rows whose query was trained on. Do not access it before all training rows are marked."""
        return self.query_ids.look_up(self.rows["query_id"]) | self.texts.look_up(self.rows["query"])

    @cached_property
    def product_is_trained(self) -> Bools:
        return self.product_ids.look_up(self.rows["product_id"]) | self.texts.look_up(self.rows["product"])

    @property
    def parts(self) -> Int64s:
        """The part of each row [N] as an index into PARTS."""
        query, product = self.query_is_trained.astype(np.int64), self.product_is_trained.astype(np.int64)
        return 3 - 2 * query - product

    @property
    def first_of_products(self) -> Int64s:
        """The first row of each distinct product, which is identified by its id or, if it has none, by its text."""
        rows = self.rows
        has_id = rows["product_id"] != NO_ID
        keys = np.where(has_id, rows["product_id"], rows["product"].view(np.int64))
        return np.unique(keys, return_index=True)[1].astype(np.int64)
