"""The holdout on which models are evaluated: which rows to score, in what order, and their slices."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.shuffle import mix64
from pipeline.data.shards import EXTRA, Arrays, TokenRows
from pipeline.data.token_sets import Split, TokenSet, open_rows
from pipeline.data.tokenizer import Tokens
from pipeline.data.validate import merge_names, to_codes
from pipeline.evaluate.config import QUERY_TOKENS as QUERY_EDGES
from pipeline.evaluate.metrics.scored_rows import ScoredRows, SliceColumn
from pipeline.io.storage import Storage
from pipeline.retrieval.products import join_tokens, to_tokens

# The order in which rows are scored, and how each batch is distributed over ranks.
#
# The order only depends on the holdout, so the number of rows scored so far is all the state that an evaluation needs
# to keep track of. A retry resumes from there, even with a different number of ranks.


@dataclass(frozen=True)
class Span:
    """The rows of one global batch, all of which are from the same bucket."""

    bucket: int
    rows: Int64s

    def rank_batch(self, rank: int, batch_size: int) -> tuple[Int64s, int]:
        """Return the row numbers [batch_size] of a rank, and how many of them are real rows rather than padding.

        All ranks have to run the same sequence of graphs, so a rank with fewer rows pads its batch by repeating the
        last row.
        """
        rows = self.rows[rank * batch_size : (rank + 1) * batch_size]
        padding = np.repeat(self.rows[-1:], batch_size - len(rows))
        return np.concatenate([rows, padding]), len(rows)


@dataclass(frozen=True)
class HoldoutOrder:
    """The numbers of the rows to score in each bucket, in ascending order."""

    rows: tuple[Int64s, ...]

    @property
    def total(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def spans(self, start: int, batch_rows: int) -> Iterator[Span]:
        """Yield global batches of up to `batch_rows` rows, starting at position `start`.

        A batch never contains rows from different buckets.
        """
        before = 0
        for bucket, rows in enumerate(self.rows):
            first = max(0, start - before)
            before += len(rows)
            for position in range(first, len(rows), batch_rows):
                yield Span(bucket, rows[position : position + batch_rows])


def choose_rows(query_ids: Sequence[Int64s], max_rows: int) -> HoldoutOrder:
    """Select queries with all their rows, until there would be more than `max_rows` rows (0: no limit).

    `query_ids` are the query ids of all rows, by bucket. The same ids always result in the same selection.
    """
    if not max_rows:
        return HoldoutOrder(tuple(np.arange(len(ids), dtype=np.int64) for ids in query_ids))
    queries, counts = np.unique(np.concatenate(query_ids), return_counts=True)
    order = np.argsort(mix64(queries.astype(np.uint64)), kind="stable")
    fitting = np.cumsum(counts[order]) <= max_rows
    kept = np.sort(queries[order][fitting])
    return HoldoutOrder(tuple(np.flatnonzero(np.isin(ids, kept)).astype(np.int64) for ids in query_ids))


def some_rows(sizes: Sequence[int], limit: int) -> HoldoutOrder:
    """Select at most `limit` evenly spaced rows from buckets with the given `sizes`."""
    total, before = sum(sizes), 0
    step, rows = max(1, -(-total // limit)), []
    for size in sizes:
        # Continue the same stride across buckets. Rounding in each bucket could add up to more than `limit` rows.
        rows.append(np.arange(-before % step, size, step, dtype=np.int64))
        before += size
    return HoldoutOrder(tuple(rows))


PARTITION, QUERY_TOKENS, AGE = "partition", "query_tokens", "age"  # slice columns added by trnpipe
SPECIAL_TOKENS = 2
LENGTHS = ("1-4", "5-8", "9-16", "17+")  # names of the query length slices, whose bounds are QUERY_EDGES


def own_column(name: str, columns: Collection[str]) -> str:
    """Return the name of a column to add, with a prefix if the data already has a column of that name."""
    return f"trnpipe.{name}" if name in columns else name


@dataclass(frozen=True)
class Holdout:
    """The rows of one split of the evaluated partitions, and the order in which to score them."""

    split: Split
    sets: Sequence[TokenSet]
    rows: TokenRows
    order: HoldoutOrder
    max_rows: int

    @property
    def name(self) -> str:
        """Return a fingerprint of the selected rows."""
        fingerprints = [token_set.info.fingerprint for token_set in self.sets]
        return fingerprint({"split": self.split, "data": fingerprints, "max_rows": self.max_rows})

    def blocks(self, fields: Sequence[str]) -> Iterator[Arrays]:
        """Return an iterator over the arrays in `fields` of all selected rows in order, in blocks of bounded size."""
        return self.rows.select(self.order.rows).read_blocks(fields)

    def tokens_of(self, column: str, ids: Int64s, sides: Sequence[str]) -> list[Tokens]:
        """Look up the tokens of `sides` (query or product) in the first row with each of the ids [M] of a column.

        The ids must be in ascending order.
        """
        matches: list[Int64s] = []
        parts: dict[str, list[Tokens]] = {side: [] for side in sides}
        for arrays in self.blocks((column, *sides)):
            block_ids, first = np.unique(arrays[column], return_index=True)
            selected = np.isin(block_ids, ids)
            matches.append(block_ids[selected])
            for side in sides:
                parts[side].append(to_tokens(arrays[side][first[selected]], self.rows.pad_id))
        _, first = np.unique(np.concatenate(matches), return_index=True)
        return [join_tokens(parts[side], first) for side in sides]

    def slices(self, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, SliceColumn]:
        """Return the slice columns of scored rows, to which the partition and the query length are added."""
        columns: dict[str, SliceColumn] = {}
        of_data = self.sets[0].info.slice_columns
        names = merge_names({each.column: each.names for each in token_set.info.slices} for token_set in self.sets)
        for index, column in enumerate(of_data):
            columns[column] = SliceColumn(to_codes(arrays["slice"][:, index], names[column]), names[column])
        partitions = tuple(token_set.info.partition for token_set in self.sets)
        columns[own_column(PARTITION, of_data)] = SliceColumn(arrays["partition"], partitions)
        lengths = np.searchsorted(QUERY_EDGES, arrays["query_tokens"].astype(np.int64) - SPECIAL_TOKENS)
        columns[own_column(QUERY_TOKENS, of_data)] = SliceColumn(lengths, LENGTHS)
        return columns


def open_holdout(
    workspace: Storage,
    sets: Sequence[TokenSet],
    split: Split,
    cache_dir: Path,
    max_rows: int,
    setting: str = "evaluate.max_rows",
) -> Holdout:
    """Open the holdout of a split.

    `setting` is the name of the setting that `max_rows` is from, which is shown if it is too small. Raises DataError if
    the split is empty, or if not even one query fits into `max_rows` rows.
    """
    extra = EXTRA if sets[0].info.slices else ("partition",)
    rows = open_rows(workspace, sets, split, cache_dir, extra)
    if not sum(rows.sizes):
        raise DataError(
            f"the {split} split is empty in {len(sets)} prepared partition(s), {sets[0].info.partition} to"
            f" {sets[-1].info.partition}",
            expected=f"rows in the {split} split",
            next_command=f"raise --data.{split}-fraction, or name rows {split} in the split column, if there is one."
            " Then prepare again, or use a different --evaluate.split",
        )
    ids = np.concatenate([block["query_id"] for block in rows.read_blocks(("query_id",))])
    order = choose_rows(np.split(ids, np.cumsum(rows.sizes)[:-1]), max_rows)
    if not order.total:
        largest = int(np.unique(ids, return_counts=True)[1].max())
        raise DataError(
            f"{setting} is {max_rows:,}, but the first query selected from split {split} has more rows",
            expected=f"at least {largest:,}, the number of rows of the largest query, or 0 for all rows",
            next_command=f"--{setting.replace('_', '-')} {largest} or more",
        )
    return Holdout(split, sets, rows, order, max_rows)


def judged_slices(rows: ScoredRows, new_partitions: Collection[str]) -> ScoredRows:
    """Prepare the slice columns for the gate.

    Partitions are replaced with two slices, depending on whether the production model was trained on them (old) or not
    (new). Columns with only one value are dropped, because their only slice is the whole holdout.
    """
    columns = dict(rows.slices)
    own = own_column(PARTITION, columns)
    partition = columns.pop(own if own in columns else PARTITION, None)
    if partition is not None:
        is_new = np.array([name in new_partitions for name in partition.names], dtype=np.bool_)
        # A row without a partition has the code -1, which selects the appended last entry.
        codes = np.append(np.where(is_new, 0, 1), -1)[partition.codes]
        columns[own_column(AGE, columns)] = SliceColumn(codes.astype(np.int64), ("new", "old"))
    return replace(rows, slices={name: column for name, column in columns.items() if len(np.unique(column.codes)) > 1})
