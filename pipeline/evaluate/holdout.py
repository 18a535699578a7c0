"""The holdout of an evaluation: the selected rows of a split, their order, and the check for leaked queries."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import format_percent
from pipeline.core.progress import progress
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.shards import EXTRA, Arrays, TokenRows
from pipeline.data.token_sets import Split, TokenSet, open_rows
from pipeline.data.tokenizer import Tokens
from pipeline.data.validate import merge_names, to_codes
from pipeline.evaluate.config import MAX_LEAK_SHARE
from pipeline.evaluate.config import QUERY_TOKENS as QUERY_EDGES
from pipeline.evaluate.metrics.scored_rows import ScoredRows, SliceColumn
from pipeline.io.storage import Storage
from pipeline.parallel.process_group import ProcessGroup
from pipeline.retrieval.products import join_tokens, text_hashes, to_tokens

# The order in which rows are scored, and the batches of each rank. Pure functions.
#
# The order depends on the holdout alone, so the only state of an evaluation is the number of rows done. Another attempt
# resumes there, even with a different number of ranks.


@dataclass(frozen=True)
class Span:
    """Rows of one batch over all ranks, from one bucket."""

    bucket: int
    rows: Int64s

    def rank_batch(self, rank: int, batch_size: int) -> tuple[Int64s, int]:
        """Return the full batch [batch_size] of a rank and the number of real rows at its start.

        The last row is repeated as padding, because all ranks must run every batch and the same sequence of graphs.
        """
        rows = self.rows[rank * batch_size : (rank + 1) * batch_size]
        padding = np.repeat(self.rows[-1:], batch_size - len(rows))
        return np.concatenate([rows, padding]), len(rows)


@dataclass(frozen=True)
class HoldoutOrder:
    """Row numbers to score in each bucket, ascending."""

    rows: tuple[Int64s, ...]

    @property
    def total(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def spans(self, start: int, batch_rows: int) -> Iterator[Span]:
        """Yield batches of `batch_rows` rows over all ranks from position `start` on. No batch crosses buckets."""
        before = 0
        for bucket, rows in enumerate(self.rows):
            first = max(0, start - before)
            before += len(rows)
            for position in range(first, len(rows), batch_rows):
                yield Span(bucket, rows[position : position + batch_rows])


def choose_rows(query_ids: Sequence[Int64s], max_rows: int) -> HoldoutOrder:
    """Select whole queries with at most `max_rows` rows in total (0: all rows).

    `query_ids`: query id of every row, by bucket. The selection is a function of the ids alone.
    """
    if not max_rows:
        return HoldoutOrder(tuple(np.arange(len(ids), dtype=np.int64) for ids in query_ids))
    queries, counts = np.unique(np.concatenate(query_ids), return_counts=True)
    order = np.argsort(mix64(queries.astype(np.uint64)), kind="stable")
    fitting = np.cumsum(counts[order]) <= max_rows
    kept = np.sort(queries[order][fitting])
    return HoldoutOrder(tuple(np.flatnonzero(np.isin(ids, kept)).astype(np.int64) for ids in query_ids))


def some_rows(sizes: Sequence[int], limit: int) -> HoldoutOrder:
    """Select at most `limit` evenly spaced rows of buckets of these `sizes`."""
    total, before = sum(sizes), 0
    step, rows = max(1, -(-total // limit)), []
    for size in sizes:
        # Use one stride over all buckets, so that rounding does not add up to more than `limit`.
        rows.append(np.arange(-before % step, size, step, dtype=np.int64))
        before += size
    return HoldoutOrder(tuple(rows))


# Leaked queries: holdout queries that a model was trained on, by id or by text. Their scores are too good.


@dataclass(frozen=True)
class Leak:
    """Number of holdout queries that occur in training data, by id or by text under another id."""

    queries: int
    by_id: int
    by_text: int
    unchecked: tuple[str, ...] = ()  # training partitions that are no longer prepared

    @property
    def fraction(self) -> float:
        return (self.by_id + self.by_text) / max(1, self.queries)

    def text(self) -> str:
        return (
            f"{self.by_id + self.by_text:,} of {self.queries:,} test queries ({format_percent(self.fraction)}) were"
            f" trained on ({self.by_id:,} by id, {self.by_text:,} by text)"
        )


def find_leak(
    queries: tuple[Int64s, UInt64s],
    trained: Iterable[TokenRows],
    process_group: ProcessGroup,
    stop: StopSignal,
    unchecked: tuple[str, ...] = (),
    num_rows: int | None = None,
) -> Leak:
    """Find `queries` (from `Holdout.queries`) in the training rows. The work is split over ranks. Raises Preempted.

    `num_rows`: the total number of training rows, for the progress.
    """
    ids, texts = queries
    by_id, by_text, sorted_texts = np.isin(ids, []), np.isin(ids, []), np.sort(texts)
    world, block = process_group.world, 0
    with progress("checking for leaked queries", num_rows, "rows") as advance:
        for rows in trained:
            for bucket, numbers in rows.blocks():
                stop.raise_if_set("checking for leaked queries")
                advance(len(numbers))
                block += 1
                if block % world.world_size != world.rank:
                    continue
                part = rows.read(np.full(len(numbers), bucket), numbers, bucket, ("query", "query_id"))
                by_id |= np.isin(ids, part["query_id"])
                hashes = np.unique(text_hashes(part["query"], rows.pad_id))
                if np.isin(hashes, sorted_texts).any():
                    by_text |= np.isin(texts, hashes)
    by_id, by_text = (
        np.logical_or.reduce(masks) for masks in zip(*process_group.gather((by_id, by_text)), strict=True)
    )
    return Leak(len(ids), int(by_id.sum()), int((by_text & ~by_id).sum()), unchecked)


def refuse_leak(leak: Leak) -> None:
    """Raise DataError if more than MAX_LEAK_SHARE of the queries are leaked."""
    if leak.fraction > MAX_LEAK_SHARE:
        raise DataError(
            leak.text(),
            expected=f"at most {format_percent(MAX_LEAK_SHARE)}, because their scores are too good",
            next_command="add a split column that keeps each query in one split, then prepare and train again;"
            " or use --evaluate.leak warn",
        )


def leak_warnings(leak: Leak | None) -> list[str]:
    """Return warnings about leaked or unchecked queries. `leak` is None if the check is off."""
    if leak is None:
        return ["test queries were not checked against the training data (evaluate.leak off)"]
    warnings = [f"{leak.text()}: metrics are better than on new queries"] if leak.fraction else []
    if leak.unchecked:
        warnings.append(
            f"{len(leak.unchecked)} training partition(s) could not be checked for test queries: no longer prepared"
        )
    return warnings


PARTITION, QUERY_TOKENS, AGE = "partition", "query_tokens", "age"  # slice columns that trnpipe adds
SPECIAL_TOKENS = 2
LENGTHS = ("1-4", "5-8", "9-16", "17+")  # Names of the slices by query length. QUERY_EDGES are their bounds.
_BLOCK_ROWS = 65_536


def own_column(name: str, columns: Collection[str]) -> str:
    """Return the name of an added column, with a prefix if the data has one of this name."""
    return f"trnpipe.{name}" if name in columns else name


@dataclass(frozen=True)
class Holdout:
    """Rows of one split of some partitions, with the selection and order in which they are scored."""

    split: Split
    sets: Sequence[TokenSet]
    rows: TokenRows
    order: HoldoutOrder
    max_rows: int

    @property
    def name(self) -> str:
        """Fingerprint of the selected rows."""
        fingerprints = [token_set.info.fingerprint for token_set in self.sets]
        return fingerprint({"split": self.split, "data": fingerprints, "max_rows": self.max_rows})

    def blocks(self, fields: Sequence[str]) -> Iterator[Arrays]:
        """Yield some arrays of the selected rows in order, in blocks of bounded size."""
        for bucket, numbers in enumerate(self.order.rows):
            for start in range(0, len(numbers), _BLOCK_ROWS):
                part = numbers[start : start + _BLOCK_ROWS]
                yield self.rows.read(np.full(len(part), bucket, dtype=np.int64), part, bucket, fields)

    def queries(self) -> tuple[Int64s, UInt64s]:
        """Return query ids [Q] ascending, and the hash [Q] of the first text of each."""
        ids, texts = [], []
        for arrays in self.blocks(("query", "query_id")):
            ids.append(arrays["query_id"])
            texts.append(text_hashes(arrays["query"], self.rows.pad_id))
        unique_ids, first = np.unique(np.concatenate(ids), return_index=True)
        return unique_ids, np.concatenate(texts)[first]

    def tokens_of(self, column: str, ids: Int64s, sides: Sequence[str]) -> list[Tokens]:
        """Return the tokens of `sides` (query, product) in the first row of each id [M] of a column, ids ascending."""
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
        """Return the slice columns of scored rows: those of the data, the partition, and the query length."""
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
    """Open a holdout. Raises DataError if the split is empty, or if no whole query fits in `max_rows` rows.

    `setting`: name of the setting of `max_rows`, for the error message.
    """
    extra = EXTRA if sets[0].info.slices else ("partition",)
    rows = open_rows(workspace, sets, split, cache_dir, extra)
    if not sum(rows.sizes):
        raise DataError(
            f"the {split} split is empty in {len(sets)} prepared partition(s), {sets[0].info.partition} to"
            f" {sets[-1].info.partition}",
            expected=f"rows in the {split} split",
            next_command=f"raise --data.{split}-fraction or add a split column and prepare again;"
            " or use another --evaluate.split",
        )
    query_ids = [np.zeros(0, dtype=np.int64)] * len(rows.sizes)
    for bucket, size in ((bucket, size) for bucket, size in enumerate(rows.sizes) if size):
        numbers = np.arange(size, dtype=np.int64)
        query_ids[bucket] = rows.read(np.full(size, bucket), numbers, bucket, ("query_id",))["query_id"]
    order = choose_rows(query_ids, max_rows)
    if not order.total:
        largest = int(np.unique(np.concatenate(query_ids), return_counts=True)[1].max())
        raise DataError(
            f"{setting} is {max_rows:,}, but the first selected query of split {split} has more rows",
            expected=f"room for whole queries (the largest has {largest:,} rows), or 0 for all rows",
            next_command=f"--{setting.replace('_', '-')} {largest} or more",
        )
    return Holdout(split, sets, rows, order, max_rows)


def judged_slices(rows: ScoredRows, new_partitions: Collection[str]) -> ScoredRows:
    """Replace partitions by two slices, new and old to the production model, and drop columns with a single value."""
    columns = dict(rows.slices)
    own = own_column(PARTITION, columns)
    partition = columns.pop(own if own in columns else PARTITION, None)
    if partition is not None:
        is_new = np.array([name in new_partitions for name in partition.names], dtype=np.bool_)
        # The code -1 (no partition) selects the last entry, which is neither.
        codes = np.append(np.where(is_new, 0, 1), -1)[partition.codes]
        columns[own_column(AGE, columns)] = SliceColumn(codes.astype(np.int64), ("new", "old"))
    return replace(rows, slices={name: column for name, column in columns.items() if len(np.unique(column.codes)) > 1})
