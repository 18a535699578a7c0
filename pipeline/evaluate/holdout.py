"""The holdout of an evaluation: which prepared rows, of which partitions, in which order."""

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

# Which rows of a holdout are scored, in which order, and which of them a batch of a rank holds. Pure.
#
# The order depends on the holdout alone, so that the whole state of an evaluation is one number: how many rows are
# done. Another attempt continues there, also with other ranks.


@dataclass(frozen=True)
class Span:
    """The rows of one batch on all ranks: row numbers of one bucket."""

    bucket: int
    rows: Int64s

    def share(self, rank: int, batch_size: int) -> tuple[Int64s, int]:
        """Return this rank's full batch [batch_size] and how many of its first rows are real.

        The rest repeats a row: every rank runs every batch, so that all run the same sequence of graphs.
        """
        mine = self.rows[rank * batch_size : (rank + 1) * batch_size]
        filling = np.repeat(self.rows[-1:], batch_size - len(mine))
        return np.concatenate([mine, filling]), len(mine)


@dataclass(frozen=True)
class HoldoutOrder:
    """The row numbers to score of each bucket, ascending."""

    rows: tuple[Int64s, ...]

    @property
    def total(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def spans(self, start: int, batch_rows: int) -> Iterator[Span]:
        """Batches of `batch_rows` rows over all ranks from row number `start` of the order on; none crosses buckets."""
        before = 0
        for bucket, rows in enumerate(self.rows):
            first = max(0, start - before)
            before += len(rows)
            for place in range(first, len(rows), batch_rows):
                yield Span(bucket, rows[place : place + batch_rows])


def choose_rows(query_ids: Sequence[Int64s], max_rows: int) -> HoldoutOrder:
    """All rows of a holdout, or whole queries of at most `max_rows` rows in all (0: no limit).

    `query_ids`: of every row, by bucket. Which queries stay is a function of their ids alone.
    """
    if not max_rows:
        return HoldoutOrder(tuple(np.arange(len(ids), dtype=np.int64) for ids in query_ids))
    queries, counts = np.unique(np.concatenate(query_ids), return_counts=True)
    order = np.argsort(mix64(queries.astype(np.uint64)), kind="stable")
    fitting = np.cumsum(counts[order]) <= max_rows
    kept = np.sort(queries[order][fitting])
    return HoldoutOrder(tuple(np.flatnonzero(np.isin(ids, kept)).astype(np.int64) for ids in query_ids))


def some_rows(sizes: Sequence[int], limit: int) -> HoldoutOrder:
    """At most `limit` rows of buckets of these `sizes`, spread evenly."""
    total, before = sum(sizes), 0
    step, rows = max(1, -(-total // limit)), []
    for size in sizes:
        # One stride over all buckets together, so that rounding does not add up to more than `limit`.
        rows.append(np.arange(-before % step, size, step, dtype=np.int64))
        before += size
    return HoldoutOrder(tuple(rows))


# Holdout queries that a model was trained on: by id, and by text when the ids differ. Their scores say too much.


@dataclass(frozen=True)
class Leak:
    """How many of a holdout's queries occur in training data. `by_text`: under another id."""

    queries: int
    by_id: int
    by_text: int
    unchecked: tuple[str, ...] = ()
    """Partitions the model was trained on that are not prepared any more."""

    @property
    def share(self) -> float:
        return (self.by_id + self.by_text) / max(1, self.queries)

    def text(self) -> str:
        found = f"{self.by_id + self.by_text:,} of {self.queries:,} holdout queries ({format_percent(self.share)})"
        return f"{found} were trained on ({self.by_id:,} by id, {self.by_text:,} by text)"


def find_leak(
    queries: tuple[Int64s, UInt64s],
    trained: Iterable[TokenRows],
    process_group: ProcessGroup,
    stop: StopSignal,
    unchecked: tuple[str, ...] = (),
    num_rows: int | None = None,
) -> Leak:
    """Look for `Holdout.queries` in the rows of each training set. Ranks share the work. Raises Preempted.

    `num_rows`: of all of them, for the progress.
    """
    ids, texts = queries
    by_id, by_text, sorted_texts = np.isin(ids, []), np.isin(ids, []), np.sort(texts)
    world, block = process_group.world, 0
    with progress("looking for holdout queries in the training data", num_rows, "rows") as advance:
        for rows in trained:
            for bucket, numbers in rows.blocks():
                stop.raise_if_set("looking for holdout queries in the training data")
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
    """Raise DataError if more of the holdout was trained on than is allowed."""
    if leak.share > MAX_LEAK_SHARE:
        raise DataError(
            leak.text(),
            expected=f"at most {format_percent(MAX_LEAK_SHARE)}: they score too well",
            next_command="give the data a split column that keeps queries apart, prepare and train again;"
            " or --evaluate.leak warn",
        )


def leak_doubts(leak: Leak | None) -> list[str]:
    """Say what makes figures of the holdout doubtful; None: no leak was looked for."""
    if leak is None:
        return ["holdout queries were not looked for in the training data (evaluate.leak off)"]
    too_good = "figures on them are better than they would be on new queries"
    doubts = [f"{leak.text()}: {too_good}"] if leak.share else []
    if leak.unchecked:
        number = len(leak.unchecked)
        doubts.append(f"{number} partition(s) trained on were not looked at for holdout queries: not prepared any more")
    return doubts


PARTITION, QUERY_TOKENS, AGE = "partition", "query_tokens", "age"
"""Slice columns of our own."""
SPECIAL_TOKENS = 2
LENGTHS = ("1-4", "5-8", "9-16", "17+")
"""Names of the slices by query length, the edges of which are QUERY_EDGES."""
_BLOCK_ROWS = 65_536


def own_column(name: str, columns: Collection[str]) -> str:
    """Return a name for a column of ours that is none of the `columns` of the data."""
    return f"trnpipe.{name}" if name in columns else name


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
        """Read some arrays of the rows that are scored, in their order, a bounded number at a time."""
        for bucket, numbers in enumerate(self.order.rows):
            for start in range(0, len(numbers), _BLOCK_ROWS):
                part = numbers[start : start + _BLOCK_ROWS]
                yield self.rows.read(np.full(len(part), bucket, dtype=np.int64), part, bucket, fields)

    def queries(self) -> tuple[Int64s, UInt64s]:
        """Return query ids [Q] ascending, and one text hash [Q] of each, the first if it has several."""
        ids, texts = [], []
        for arrays in self.blocks(("query", "query_id")):
            ids.append(arrays["query_id"])
            texts.append(text_hashes(arrays["query"], self.rows.pad_id))
        every, first = np.unique(np.concatenate(ids), return_index=True)
        return every, np.concatenate(texts)[first]

    def tokens_of(self, column: str, ids: Int64s, sides: Sequence[str]) -> list[Tokens]:
        """Of the first row that has each of `ids` [M] in a column: query, product, or both. By ascending id."""
        found: list[Int64s] = []
        parts: dict[str, list[Tokens]] = {side: [] for side in sides}
        for arrays in self.blocks((column, *sides)):
            here, first = np.unique(arrays[column], return_index=True)
            asked = np.isin(here, ids)
            found.append(here[asked])
            for side in sides:
                parts[side].append(to_tokens(arrays[side][first[asked]], self.rows.pad_id))
        _, first = np.unique(np.concatenate(found), return_index=True)
        return [join_tokens(parts[side], first) for side in sides]

    def slices(self, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, SliceColumn]:
        """Slice columns of scored rows: those of the data, the partition, and the length of the query."""
        columns: dict[str, SliceColumn] = {}
        of_data = self.sets[0].info.slice_columns
        known = merge_names({one.column: one.names for one in token_set.info.slices} for token_set in self.sets)
        for place, column in enumerate(of_data):
            columns[column] = SliceColumn(to_codes(arrays["slice"][:, place], known[column]), known[column])
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
    """Open a holdout. Raises DataError if the split has no row here, or no whole query in `max_rows` rows.

    `setting`: the name of the setting that gives `max_rows`.
    """
    extra = EXTRA if sets[0].info.slices else ("partition",)
    rows = open_rows(workspace, sets, split, cache_dir, extra)
    if not sum(rows.sizes):
        raise DataError(
            f"the holdout is empty: no row of split {split} in {len(sets)} prepared partition(s),"
            f" {sets[0].info.partition} to {sets[-1].info.partition}",
            expected=f"rows in the {split} split",
            next_command=f"raise --data.{split}-fraction or give a split column and prepare again; or --evaluate.split",
        )
    query_ids = [np.zeros(0, dtype=np.int64)] * len(rows.sizes)
    for bucket, size in ((bucket, size) for bucket, size in enumerate(rows.sizes) if size):
        numbers = np.arange(size, dtype=np.int64)
        query_ids[bucket] = rows.read(np.full(size, bucket), numbers, bucket, ("query_id",))["query_id"]
    order = choose_rows(query_ids, max_rows)
    if not order.total:
        largest = int(np.unique(np.concatenate(query_ids), return_counts=True)[1].max())
        raise DataError(
            f"{setting} is {max_rows:,}, and the query of split {split} that is chosen first has more rows",
            expected=f"room for whole queries, of which the largest has {largest:,} rows; or 0, for all rows",
            next_command=f"--{setting.replace('_', '-')} {largest}, or more",
        )
    return Holdout(split, sets, rows, order, max_rows)


# The slices of scored rows that are worth judging. Pure.


def judged_slices(rows: ScoredRows, new_partitions: Collection[str]) -> ScoredRows:
    """Partitions become two slices, new and old to the incumbent; a column with one value for all rows goes."""
    columns = dict(rows.slices)
    own = own_column(PARTITION, columns)
    partition = columns.pop(own if own in columns else PARTITION, None)
    if partition is not None:
        is_new = np.array([name in new_partitions for name in partition.names], dtype=np.bool_)
        # -1, no partition, reads the last entry: it is neither.
        codes = np.append(np.where(is_new, 0, 1), -1)[partition.codes]
        columns[own_column(AGE, columns)] = SliceColumn(codes.astype(np.int64), ("new", "old"))
    return replace(rows, slices={name: column for name, column in columns.items() if len(np.unique(column.codes)) > 1})
