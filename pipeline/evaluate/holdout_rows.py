"""The holdout of an evaluation: which prepared rows, of which partitions, in which order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.order import mix64
from pipeline.data.shards import EXTRA, Arrays, TokenRows
from pipeline.data.slices import codes_of, merge_names
from pipeline.data.tokenizer import Tokens
from pipeline.data.tokens import Split, TokenSet, open_rows
from pipeline.evaluate.leak import HoldoutQueries
from pipeline.evaluate.order import HoldoutOrder, choose_rows
from pipeline.evaluate.scored import SliceColumn
from pipeline.evaluate.texts import join_tokens, text_hashes, to_tokens
from pipeline.io.storage import Storage

PARTITION, QUERY_TOKENS = "partition", "query_tokens"
SPECIAL_TOKENS = 2
_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class Holdout:
    """Rows of one split of some partitions, and which of them are scored."""

    split: Split
    sets: Sequence[TokenSet]
    rows: TokenRows
    order: HoldoutOrder
    max_rows: int

    @property
    def name(self) -> str:
        """The same for the same rows."""
        marks = [token_set.info.fingerprint for token_set in self.sets]
        return fingerprint({"split": self.split, "data": marks, "max_rows": self.max_rows})

    def blocks(self, fields: Sequence[str]) -> Iterator[Arrays]:
        """Some arrays of the rows that are scored, in their order, a bounded number at a time."""
        for bucket, numbers in enumerate(self.order.rows):
            for start in range(0, len(numbers), _BLOCK_ROWS):
                part = numbers[start : start + _BLOCK_ROWS]
                yield self.rows.read(np.full(len(part), bucket, dtype=np.int64), part, bucket, fields)

    def queries(self) -> HoldoutQueries:
        """The queries of the rows that are scored."""
        ids, texts = [], []
        for arrays in self.blocks(("query", "query_id")):
            ids.append(arrays["query_id"])
            texts.append(text_hashes(arrays["query"], self.rows.pad_id))
        return HoldoutQueries.of(np.concatenate(ids), np.concatenate(texts))

    def sample(self, count: int) -> tuple[Int64s, Tokens, Tokens]:
        """sample_id [M] ascending of at most `count` rows, chosen by a hash of it, with their query and product."""
        ids = np.concatenate([arrays["sample_id"] for arrays in self.blocks(("sample_id",))])
        chosen = np.sort(ids[np.argsort(mix64(ids.astype(np.uint64)), kind="stable")[:count]])
        found: list[Int64s] = []
        sides: dict[str, list[Tokens]] = {"query": [], "product": []}
        for arrays in self.blocks(("sample_id", "query", "product")):
            here = np.isin(arrays["sample_id"], chosen)
            found.append(arrays["sample_id"][here])
            for side, parts in sides.items():
                parts.append(to_tokens(arrays[side][here], self.rows.pad_id))
        order = np.argsort(np.concatenate(found))
        return chosen, join_tokens(sides["query"], order), join_tokens(sides["product"], order)

    def slices(self, arrays: dict[str, npt.NDArray[Any]], query_tokens: Sequence[int]) -> dict[str, SliceColumn]:
        """Slice columns of scored rows: those of the data, the partition, and the length of the query."""
        columns: dict[str, SliceColumn] = {}
        names = merge_names({one.column: one.names for one in token_set.info.slices} for token_set in self.sets)
        for place, column in enumerate(self.sets[0].info.slice_columns):
            columns[column] = SliceColumn(codes_of(arrays["slice"][:, place], names[column]), names[column])
        partitions = tuple(token_set.info.partition for token_set in self.sets)
        columns.setdefault(PARTITION, SliceColumn(arrays["partition"], partitions))
        if query_tokens:
            columns.setdefault(QUERY_TOKENS, length_column(arrays["query_tokens"], query_tokens))
        return columns


def open_holdout(workspace: Storage, sets: Sequence[TokenSet], split: Split, cache_dir: Path, max_rows: int) -> Holdout:
    """Raises DataError when the split has no row in these partitions."""
    extra = EXTRA if sets[0].info.slices else ("partition",)
    rows = open_rows(workspace, sets, split, cache_dir, extra)
    if not sum(rows.sizes):
        raise DataError(
            f"the holdout is empty: no row of split {split} in {len(sets)} prepared partition(s),"
            f" {sets[0].info.partition} to {sets[-1].info.partition}",
            expected=f"rows in the {split} split",
            next_command=f"raise --data.{split}-fraction or give a split column and prepare again; or --evaluate.split",
        )
    query_ids = [_query_ids(rows, bucket) for bucket in range(len(rows.sizes))]
    return Holdout(split, sets, rows, choose_rows(query_ids, max_rows), max_rows)


def length_column(query_tokens: npt.NDArray[np.integer], most: Sequence[int]) -> SliceColumn:
    """Queries by their tokens [N], special ones included; `most`: of each slice but the last, special ones apart."""
    firsts = [1, *(edge + 1 for edge in most)]
    names = [f"{first}-{last}" if first < last else f"{first}" for first, last in zip(firsts, most, strict=False)]
    codes = np.searchsorted(np.asarray(most), query_tokens.astype(np.int64) - SPECIAL_TOKENS, side="left")
    return SliceColumn(codes.astype(np.int64), (*names, f"{firsts[-1]}+"))


def _query_ids(rows: TokenRows, bucket: int) -> Int64s:
    size = rows.sizes[bucket]
    if not size:
        return np.zeros(0, dtype=np.int64)
    numbers = np.arange(size, dtype=np.int64)
    return rows.read(np.full(size, bucket, dtype=np.int64), numbers, bucket, ("query_id",))["query_id"]
