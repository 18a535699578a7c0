"""The catalogue: Parquet files with an id and a text in each row. Its footers, its work shards, its rows as texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field

from pipeline.core.arrays import Bools, Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.data.readers import open_parquet, refuse_unreadable
from pipeline.data.rows import (
    CHARACTERS_PER_TOKEN,
    FILTER,
    BadRow,
    ColumnPlan,
    match_columns,
    product_text,
    row_content,
    to_fields,
)
from pipeline.data.token_sets import QuarantinedRow
from pipeline.data.tokenizer import TextTokenizer, Tokens, take
from pipeline.data.validate import filter_mask
from pipeline.embed.carry_over import RowIndex
from pipeline.embed.config import FRAME, chunk_of
from pipeline.embed.vectors import ID_TYPES, IdType
from pipeline.io.requests import run_parallel
from pipeline.io.storage import ObjectStat, Storage

# How a catalogue is cut into work shards. Pure: every worker comes to the same plan.


@dataclass(frozen=True)
class RowRange:
    """Rows `start` to `start + rows` of one row group."""

    file: int
    group: int
    start: int
    rows: int


@dataclass(frozen=True)
class WorkShard:
    """Consecutive rows of the catalogue that become one part: the unit of work and of resume."""

    index: int
    pieces: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        return sum(piece.rows for piece in self.pieces)


def plan_shards(groups: Sequence[Sequence[int]], rows_per_shard: int) -> tuple[WorkShard, ...]:
    """Cut files into shards of at most `rows_per_shard` rows, in order.

    `groups[f][g]` is the number of rows of row group g of file f. Row groups that fit stay whole, so that few are read
    twice; larger ones are cut into equal pieces; small ones, of several files too, go together.
    """
    shards: list[WorkShard] = []
    held: list[RowRange] = []
    rows = 0
    for file, group, size in ((f, g, size) for f, sizes in enumerate(groups) for g, size in enumerate(sizes)):
        parts = -(-size // rows_per_shard)
        for part in range(parts):
            start, end = part * size // parts, (part + 1) * size // parts
            if rows + end - start > rows_per_shard:
                shards.append(WorkShard(len(shards), tuple(held)))
                held, rows = [], 0
            held.append(RowRange(file, group, start, end - start))
            rows += end - start
    if held:
        shards.append(WorkShard(len(shards), tuple(held)))
    return tuple(shards)


NUM_FOOTER_THREADS = 8


class CatalogueColumns(Record):
    """Names of the columns. Only a text column with the default name may be missing."""

    id: str
    title: str
    text: str = "text"
    filter: dict[str, str] = Field(default_factory=dict)

    def plan(self, available: Sequence[str], file: str) -> ColumnPlan:
        """Return the columns to read of one file. Raises DataError listing those there are."""
        pairs = [("id", self.id), ("title", self.title)]
        if self.text != self.title:
            pairs.append(("text", self.text))
        pairs += [(FILTER + column, column) for column in self.filter]
        return match_columns(pairs, available, file, lambda field: f"--embed.catalogue.{field.partition('.')[0]}")


class CatalogueFile(Record):
    """One Parquet file as it was when the work was planned; `groups` are the rows of its row groups."""

    key: str
    etag: str
    size_bytes: int
    groups: tuple[int, ...]


class Catalogue(Record):
    """All files, in order of their keys below `root`; an empty root is the workspace."""

    root: str
    columns: CatalogueColumns
    id_type: IdType
    files: tuple[CatalogueFile, ...]
    unreadable: dict[str, int] = Field(
        {}, description="Rows that are in no file, as no reader made them out, by reason"
    )
    unreadable_sample: tuple[QuarantinedRow, ...] = ()

    @property
    def rows(self) -> int:
        return sum(sum(file.groups) for file in self.files)

    @property
    def digest(self) -> str:
        """Names the content: files, columns, filter."""
        return fingerprint(self.model_dump(mode="json"))

    def shards(self, rows_per_part: int) -> tuple[WorkShard, ...]:
        """Return the work shards: a function of the catalogue alone."""
        return plan_shards([file.groups for file in self.files], rows_per_part)


def look_at(storage: Storage, stats: Sequence[ObjectStat], columns: CatalogueColumns) -> Catalogue:
    """Read the footers. Raises DataError for a file that is not Parquet, lacks a column or has ids of another type."""
    found = run_parallel(
        lambda stat: _footer(storage, stat, columns),
        sorted(stats, key=lambda stat: stat.key.encode()),
        num_threads=NUM_FOOTER_THREADS,
        stop=storage.stop,
        doing="looking at the catalogue",
    )
    types: dict[IdType, str] = {}
    for file, id_type in found:
        if id_type is not None:
            types.setdefault(id_type, file.key)
    if len(types) > 1:
        seen = " and ".join(f"{name} in {key}" for name, key in types.items())
        raise DataError(
            f"the ids in column {columns.id!r} are {seen}",
            expected="one type of id in all files",
            next_command="write the files with one type, or set --embed.catalogue.id to another column",
        )
    catalogue = Catalogue(
        root=storage.root,
        columns=columns,
        id_type=next(iter(types), "string"),
        files=tuple(file for file, _ in found),
    )
    if not catalogue.rows:
        raise DataError(
            f"the catalogue {storage.root} has {len(found)} files and no row",
            expected="at least one row",
            next_command="correct --embed.catalogue.path",
        )
    return catalogue


def _footer(storage: Storage, stat: ObjectStat, columns: CatalogueColumns) -> tuple[CatalogueFile, IdType | None]:
    uri = storage.uri(stat.key)
    try:
        with open_parquet(storage, stat.key) as file:
            schema, metadata = file.schema_arrow, file.metadata
            groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    except (pa.ArrowException, OSError) as error:
        refuse_unreadable(storage, stat.key, "parquet")
        raise not_parquet(uri, error) from error
    plan = columns.plan(schema.names, uri)
    kind = schema.field(columns.id).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    id_type: IdType | None = None
    if pa.types.is_integer(kind):
        id_type = "uint64" if kind == pa.uint64() else "int64"
    elif str(kind) in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
        id_type = "string"
    elif not pa.types.is_null(kind):  # a column of nulls fits any type
        raise DataError(
            f"the id column {columns.id!r} of {uri} holds {kind}",
            expected="text or whole numbers",
            next_command="name another column with --embed.catalogue.id, or write the ids as text",
        )
    try:
        to_fields({name: pa.nulls(0, schema.field(name).type) for name in plan.inputs}, plan)
    except pa.ArrowException as error:
        raise DataError(
            f"{uri}: {error}",
            expected="text",
            next_command="name a column of text with --embed.catalogue.title, .text or .filter",
        ) from error
    return CatalogueFile(key=stat.key, etag=stat.etag, size_bytes=stat.size_bytes, groups=groups), id_type


def not_parquet(uri: str, error: Exception) -> DataError:
    """Return the error for a file that cannot be read."""
    return DataError(
        f"{uri} cannot be read as parquet: {error}",
        expected="a whole Parquet file",
        next_command="write the file again, or set --embed.catalogue.format",
    )


# Rows of work shards, read row group by row group: memory stays within a few batches, whatever the files look like.

BATCH_BYTES = 8 * 2**20
"""Columns of one window at most, by what Parquet says of the row group."""


@dataclass(frozen=True)
class RawWindow:
    """Consecutive rows of one file on their way to a worker: fields id, title, text and filters as an Arrow stream."""

    file: str
    first_row: int
    """Number of the first row in its file."""
    columns: bytes
    is_last: bool = False
    """Of its shard."""

    def batch(self) -> pa.RecordBatch:
        return pa.ipc.open_stream(self.columns).read_next_batch()


def read_shard(catalogue: Catalogue, storage: Storage, shard: WorkShard, window_rows: int) -> Iterator[RawWindow]:
    """Yield the rows of a shard, at most `window_rows` and about BATCH_BYTES at a time.

    The last window comes once all files of the shard are known to be those of the plan. Raises DataError if a file is
    not: the result would be half one catalogue and half another.
    """
    held: RawWindow | None = None
    for piece in shard.pieces:
        for window in _read_piece(catalogue, storage, piece, window_rows):
            if held is not None:
                yield held
            held = window
    for file in sorted({piece.file for piece in shard.pieces}):
        _check_same(catalogue.files[file], storage)
    if held is not None:
        yield replace(held, is_last=True)


def _read_piece(catalogue: Catalogue, storage: Storage, piece: RowRange, window_rows: int) -> Iterator[RawWindow]:
    """Yield the windows of a piece. The rows before it in its row group are decoded again: that costs little."""
    record = catalogue.files[piece.file]
    first, position, end = sum(record.groups[: piece.group]), 0, piece.start + piece.rows
    _check_same(record, storage)
    try:
        with open_parquet(storage, record.key) as file:
            plan = catalogue.columns.plan(file.schema_arrow.names, storage.uri(record.key))
            group = file.metadata.row_group(piece.group)
            chunks = [group.column(number) for number in range(group.num_columns)]
            total = sum(int(chunk.total_uncompressed_size) for chunk in chunks if chunk.path_in_schema in plan.inputs)
            size = max(1, min(window_rows, BATCH_BYTES // max(1, total // max(1, int(group.num_rows)))))
            for batch in file.iter_batches(size, row_groups=[piece.group], columns=plan.inputs, use_threads=False):
                storage.stop.raise_if_set(f"reading {record.key}")
                low, high = max(0, piece.start - position), min(len(batch), end - position)
                if low < high:
                    fields = as_fields(batch.slice(low, high - low), plan, catalogue.id_type)
                    sink = pa.BufferOutputStream()
                    with pa.ipc.new_stream(sink, fields.schema) as writer:
                        writer.write_batch(fields)
                    yield RawWindow(record.key, first + position + low, sink.getvalue().to_pybytes())
                position += len(batch)
                if position >= end:
                    return
        raise OSError(f"row group {piece.group} has {position} rows")
    except (pa.ArrowException, OSError) as error:
        _check_same(record, storage)
        raise not_parquet(storage.uri(record.key), error) from error


def _check_same(planned: CatalogueFile, storage: Storage) -> None:
    seen = storage.stat(planned.key)
    if seen is None or (seen.etag, seen.size_bytes) != (planned.etag, planned.size_bytes):
        raise DataError(
            f"{storage.uri(planned.key)} {'was changed' if seen else 'is gone'} since this cycle planned its work",
            expected=f"the file with etag {planned.etag} and {planned.size_bytes} bytes",
            next_command="embed the new catalogue in a cycle of its own (--cycle), or put the file back",
        )


def as_fields(batch: pa.RecordBatch, plan: ColumnPlan, id_type: IdType) -> pa.RecordBatch:
    """Return input columns as fields: text as large_binary, numbers as ids in their type."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    fields = to_fields(columns, plan)
    if id_type == "string":
        return fields
    ids = columns[dict(plan.pairs)["id"]]
    ids = ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
    place = fields.schema.get_field_index("id")
    return fields.set_column(place, fields.schema.field(place).with_type(ID_TYPES[id_type]), pc.cast(ids, id_type))


# What a worker does with a window: judge each row, hash it, tokenise what has no vector yet.

NO_ID, EMPTY_TEXT, DUPLICATE_ID = "no id", "empty text", "duplicate id"


@dataclass(frozen=True)
class TextRules:
    """How rows become texts and tokens, the same for all windows.

    `index`: folder of the row index of an earlier cycle whose vectors are to be taken over, empty for none.
    """

    tokenizer: bytes
    max_tokens: int
    """Of a text that are read."""
    id_type: IdType
    filter: tuple[tuple[str, str], ...] = ()
    index: str = ""
    prefix: str = ""
    """Stands before every text, for the tokenizer alone."""
    chunks: int = 1
    """Of a text of `max_tokens`."""


@dataclass(frozen=True)
class TextRows:
    """The usable rows of a window in catalogue order, and what was wrong with the others."""

    file: str
    is_last: bool
    """The window is the last of its shard."""
    table: pa.Table
    """Columns id, id_hash, text_hash and row, the number of the row in its file."""
    texts: list[str]
    num_rows: int
    """All rows of the window."""
    num_read: int
    """Rows that passed the filter, bad ones included."""
    bad: tuple[BadRow, ...]


@dataclass(frozen=True)
class Window:
    """A window ready for the device.

    `rows.table` has four more columns here: `place`, the row of the earlier cycle to take the vector from, -1 for a
    text to embed; `known`, whether that cycle had the id; `truncated`, `chunked`, whether a text to embed was cut, or
    takes several chunks. `tokens` are those of texts to embed alone, in order.
    """

    rows: TextRows
    """Without their texts."""
    tokens: Tokens

    def keep(self, rows: Bools) -> "Window":
        table = self.rows.table
        fresh = rows[table["place"].to_numpy() < 0]
        kept = replace(self.rows, table=table.filter(pa.array(rows)))
        return Window(kept, take(self.tokens, np.flatnonzero(fresh)))


def make_window(rules: TextRules, raw: RawWindow) -> Window:
    """Judge, hash and tokenise a window in a worker process."""
    rows = judge_rows(rules, raw)
    count = len(rows.texts)
    place, known = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    if rules.index:
        place, known = _row_index(Path(rules.index)).look_up(
            rows.table["id_hash"].to_numpy(), rows.table["text_hash"].to_numpy()
        )
    tokenizer, fresh = _tokenizer(rules.tokenizer), np.flatnonzero(place < 0)
    tokens = tokenizer.encode([rules.prefix + rows.texts[row] for row in fresh.tolist()])
    truncated, chunked = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    truncated[fresh] = tokens.lengths > rules.max_tokens
    if truncated.any():
        tokens = cut_tokens(tokens, rules.max_tokens, tokenizer.sep_id)
    chunked[fresh] = tokens.lengths > chunk_of(rules.max_tokens, rules.chunks)
    table = rows.table
    for name, column in (("place", place), ("known", known), ("truncated", truncated), ("chunked", chunked)):
        table = table.append_column(name, pa.array(column))
    return Window(replace(rows, table=table, texts=[]), tokens)


def judge_rows(rules: TextRules, raw: RawWindow) -> TextRows:
    """Apply the filter, then find for each row its id and text, or the reason why it has none."""
    batch = raw.batch()
    num_rows = len(batch)
    rows = np.arange(raw.first_row, raw.first_row + num_rows, dtype=np.int64)
    if rules.filter:
        keep = filter_mask(batch, dict(rules.filter))
        batch, rows = batch.filter(pa.array(keep)), rows[keep]
    limit = CHARACTERS_PER_TOKEN * rules.max_tokens
    columns = {name: batch[name].to_pylist() for name in ("id", "title", "text") if name in batch.schema.names}
    longer = columns.get("text") or [None] * len(rows)
    ids, kept, texts, bad = list[Any](), list[int](), list[str](), list[BadRow]()
    for row, values in enumerate(zip(columns["id"], columns["title"], longer, strict=True)):
        value, text, reason = _judge(*values, limit)
        if reason:
            bad.append(BadRow(raw.file, int(rows[row]), reason, row_content(batch, row)))
            continue
        ids.append(value)
        kept.append(row)
        texts.append(text)
    table = pa.table(
        {
            "id": pa.array(ids, ID_TYPES[rules.id_type]),
            "id_hash": id_hashes(ids),
            "text_hash": _hashes([text.encode() for text in texts]),
            "row": rows[np.array(kept, dtype=np.int64)],
        }
    )
    return TextRows(raw.file, raw.is_last, table, texts, num_rows, num_read=len(rows), bad=tuple(bad))


def judge_again(context: tuple[TextRules, np.uint64], raw: RawWindow) -> TextRows:
    """Judge rows in a worker process of verify. Return the texts of ids whose hash is a multiple of the step."""
    rules, step = context
    rows = judge_rows(rules, raw)
    chosen = np.flatnonzero(rows.table["id_hash"].to_numpy() % step == 0).tolist()
    return replace(rows, texts=[rows.texts[row] for row in chosen])


def _judge(name: bytes | int | None, title: bytes | None, text: bytes | None, limit: int) -> tuple[Any, str, str]:
    """(id, text, "") of a usable row, or (_, _, reason). A row is usable when one of title and text says something."""
    try:
        field = "id"
        value = name.decode() if isinstance(name, bytes) else name
        field = "title"
        first = title.decode().strip() if title else ""
        field = "text"
        second = text.decode().strip() if text else ""
    except UnicodeDecodeError:
        return None, "", f"{field} is not UTF-8"
    if value is None or value == "":
        return None, "", NO_ID
    joined = product_text(first, second, limit)
    return value, joined, "" if joined else EMPTY_TEXT


def id_hashes(ids: Sequence[Any]) -> UInt64s:
    """Hash the ids as text, so that 7 and "7" are one id."""
    return _hashes([str(value).encode() for value in ids])


def _hashes(values: Sequence[bytes]) -> UInt64s:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, values), dtype=np.uint64, count=len(values))


def cut_tokens(tokens: Tokens, limit: int, sep_id: int) -> Tokens:
    """Cut texts to `limit` tokens, of which the last is then [SEP]."""
    lengths = np.minimum(tokens.lengths, limit)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = tokens.ids[np.arange(offsets[-1]) + np.repeat(tokens.offsets[:-1] - offsets[:-1], lengths)]
    ids[offsets[1:][tokens.lengths > limit] - 1] = sep_id
    return Tokens(ids, offsets)


def chunk_tokens(tokens: Tokens, limit: int, sep_id: int) -> tuple[Tokens, Int64s]:
    """Split texts into chunks of at most `limit` tokens. Return these, and the number of each text's first chunk [N].

    A chunk begins with the first token of its text, [CLS], and ends with [SEP]; all between them is there once.
    """
    lengths, inner = tokens.lengths, limit - FRAME
    counts = np.where(lengths > limit, -(-(lengths - FRAME) // inner), 1)
    first = np.cumsum(counts) - counts
    text = np.repeat(np.arange(len(lengths)), counts)
    before = (np.arange(len(text)) - first[text]) * inner  # tokens of the text in earlier chunks
    sizes = np.where(counts[text] > 1, np.minimum(lengths[text] - before, limit), lengths[text])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ids = tokens.ids[np.arange(offsets[-1]) + np.repeat(tokens.offsets[text] + before - offsets[:-1], sizes)]
    ids[offsets[:-1]] = tokens.ids[tokens.offsets[text]]
    ids[offsets[1:][counts[text] > 1] - 1] = sep_id
    return Tokens(ids, offsets), first


_tokenizer = lru_cache(maxsize=1)(TextTokenizer)
_row_index = lru_cache(maxsize=1)(RowIndex)
