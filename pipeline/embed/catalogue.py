"""Read a catalogue of Parquet files with an id and a text in each row.

The catalogue is divided into work shards using only the footers of its files. The rows of a shard are then read in
small windows, which subprocesses validate, hash and tokenise.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from pipeline.core.arrays import Bools, Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.data.attributes import attribute_pairs, base_of
from pipeline.data.readers import open_parquet, refuse_unreadable
from pipeline.data.rows import (
    CHARACTERS_PER_TOKEN,
    FILTER,
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
from pipeline.embed.config import FRAME, max_chunk_tokens
from pipeline.embed.vectors import ID_TYPES, IdType
from pipeline.io.requests import run_parallel
from pipeline.io.storage import ObjectStat, Storage
from pipeline.model.config import Attribute

# Divide a catalogue into work shards. The result depends only on the footers, so that every worker computes the same
# shards.


@dataclass(frozen=True)
class RowRange:
    """The rows `start` to `start + rows` of a row group."""

    file: int
    group: int
    start: int
    rows: int


@dataclass(frozen=True)
class WorkShard:
    """Consecutive rows of the catalogue that are written as one part, which is the unit of work and of resumption."""

    index: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        return sum(row_range.rows for row_range in self.ranges)


def plan_shards(groups: Sequence[Sequence[int]], rows_per_shard: int) -> tuple[WorkShard, ...]:
    """Divide files into shards of at most `rows_per_shard` rows, in order.

    `groups[f][g]` is the number of rows in row group g of file f. A row group is only split if it does not fit in a
    shard, because some of its rows then have to be decoded twice. Small row groups are combined, even across files.
    """
    shards: list[WorkShard] = []
    ranges: list[RowRange] = []
    rows = 0
    for file, group, size in ((f, g, size) for f, sizes in enumerate(groups) for g, size in enumerate(sizes)):
        parts = -(-size // rows_per_shard)
        for part in range(parts):
            start, end = part * size // parts, (part + 1) * size // parts
            if rows + end - start > rows_per_shard:
                shards.append(WorkShard(len(shards), tuple(ranges)))
                ranges, rows = [], 0
            ranges.append(RowRange(file, group, start, end - start))
            rows += end - start
    if ranges:
        shards.append(WorkShard(len(shards), tuple(ranges)))
    return tuple(shards)


NUM_FOOTER_THREADS = 8


class CatalogueColumns(Record):
    """Names of the catalogue's columns. Only the text column may be missing, and only if it has the default name."""

    id: str
    title: str
    text: str = "text"
    filter: dict[str, str] = Field(default_factory=dict)
    attributes: tuple[Attribute, ...] = Field((), description="Attributes whose texts are appended to the title")

    @model_serializer(mode="wrap")
    def _without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the attributes if there are none, so that the digests of older catalogues do not change."""
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value or name != "attributes"}

    def plan(self, available: Sequence[str], file: str) -> ColumnPlan:
        """Return the columns to read from a file. Raises DataError that lists the existing ones if one is missing."""
        pairs = [("id", self.id), ("title", self.title)]
        if self.text != self.title:
            pairs.append(("text", self.text))
        pairs += [(FILTER + column, column) for column in self.filter]
        pairs += [pair for pair in attribute_pairs(self.attributes, (), file) if base_of(pair[0]) == "title"]
        return match_columns(pairs, available, file, lambda field: f"--embed.catalogue.{field.partition('.')[0]}")


class CatalogueFile(Record):
    """A Parquet file as it was at planning time. `groups` has the number of rows of each row group."""

    key: str
    etag: str
    size_bytes: int
    groups: tuple[int, ...]


class Catalogue(Record):
    """All files of a catalogue, ordered by their keys below `root`. An empty `root` refers to the workspace."""

    root: str
    columns: CatalogueColumns
    id_type: IdType
    files: tuple[CatalogueFile, ...]
    unreadable: dict[str, int] = Field({}, description="Numbers of rows that could not be converted, by reason")
    unreadable_sample: tuple[QuarantinedRow, ...] = ()

    @property
    def rows(self) -> int:
        return sum(sum(file.groups) for file in self.files)

    @property
    def digest(self) -> str:
        """Fingerprint of everything that determines the content, including the filter."""
        return fingerprint(self.model_dump(mode="json"))

    def shards(self, rows_per_part: int) -> tuple[WorkShard, ...]:
        """Return the work shards."""
        return plan_shards([file.groups for file in self.files], rows_per_part)


def read_footers(storage: Storage, stats: Sequence[ObjectStat], columns: CatalogueColumns) -> Catalogue:
    """Read the footers of all files of a catalogue.

    Raises DataError if a file is not Parquet, if it lacks a column, or if the id types of the files differ.
    """
    footers = run_parallel(
        lambda stat: _footer(storage, stat, columns),
        sorted(stats, key=lambda stat: stat.key.encode()),
        num_threads=NUM_FOOTER_THREADS,
        stop=storage.stop,
        doing="reading the catalogue's footers",
    )
    types: dict[IdType, str] = {}
    for file, id_type in footers:
        if id_type is not None:
            types.setdefault(id_type, file.key)
    if len(types) > 1:
        raise DataError(
            f"the ids in column {columns.id!r} are " + " and ".join(f"{name} in {key}" for name, key in types.items()),
            expected="the same id type in all files",
            next_command="write all files with the same id type, or set --embed.catalogue.id to a different column",
        )
    catalogue = Catalogue(
        root=storage.root,
        columns=columns,
        id_type=next(iter(types), "string"),
        files=tuple(file for file, _ in footers),
    )
    if not catalogue.rows:
        raise DataError(
            f"the catalogue {storage.root} has {len(footers)} files but no rows",
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
    elif not pa.types.is_null(kind):  # a column that contains only nulls is compatible with any type
        raise DataError(
            f"the id column {columns.id!r} of {uri} has type {kind}",
            expected="text or integers",
            next_command="set a different column with --embed.catalogue.id, or write the ids as text",
        )
    try:
        to_fields({name: pa.nulls(0, schema.field(name).type) for name in plan.inputs}, plan)
    except pa.ArrowException as error:
        raise DataError(
            f"{uri}: {error}",
            expected="text",
            next_command="set a text column with --embed.catalogue.title, .text or .filter",
        ) from error
    return CatalogueFile(key=stat.key, etag=stat.etag, size_bytes=stat.size_bytes, groups=groups), id_type


def not_parquet(uri: str, error: Exception) -> DataError:
    """Return the error to raise for a file that cannot be read as Parquet."""
    return DataError(
        f"{uri} cannot be read as parquet: {error}",
        expected="a complete Parquet file",
        next_command="write the file again, or set --embed.catalogue.format",
    )


# The rows of a work shard are read in small windows, so that memory is bounded even if the row groups are large.

BATCH_BYTES = 8 * 2**20
"""Maximum size of the columns of a window, estimated from the metadata of the row group."""


@dataclass(frozen=True)
class RawWindow:
    """Consecutive rows of a file, serialised to be sent to a worker process."""

    file: str
    first_row: int
    """Index of the first row in its file."""
    columns: bytes
    """The id, title, text and filter columns as an Arrow stream."""
    is_last: bool = False
    """True for the last window of a shard."""

    def batch(self) -> pa.RecordBatch:
        return pa.ipc.open_stream(self.columns).read_next_batch()


def read_shard(catalogue: Catalogue, storage: Storage, shard: WorkShard, window_rows: int) -> Iterator[RawWindow]:
    """Yield the rows of a shard in windows of at most `window_rows` rows and about BATCH_BYTES.

    Before the last window is yielded, all files of the shard are compared with the plan. Raises DataError if a file has
    changed, because the part would otherwise contain a mixture of two catalogues.
    """
    pending: RawWindow | None = None
    for row_range in shard.ranges:
        for window in _read_range(catalogue, storage, row_range, window_rows):
            if pending is not None:
                yield pending
            pending = window
    for file in sorted({row_range.file for row_range in shard.ranges}):
        _check_unchanged(catalogue.files[file], storage)
    if pending is not None:
        yield replace(pending, is_last=True)


def _read_range(catalogue: Catalogue, storage: Storage, row_range: RowRange, window_rows: int) -> Iterator[RawWindow]:
    """Yield the windows of a range. Earlier rows of the same row group must be decoded, too, but are skipped."""
    record = catalogue.files[row_range.file]
    first, position, end = sum(record.groups[: row_range.group]), 0, row_range.start + row_range.rows
    _check_unchanged(record, storage)
    try:
        with open_parquet(storage, record.key) as file:
            plan = catalogue.columns.plan(file.schema_arrow.names, storage.uri(record.key))
            group = file.metadata.row_group(row_range.group)
            chunks = [group.column(number) for number in range(group.num_columns)]
            total = sum(int(chunk.total_uncompressed_size) for chunk in chunks if chunk.path_in_schema in plan.inputs)
            size = max(1, min(window_rows, BATCH_BYTES // max(1, total // max(1, int(group.num_rows)))))
            for batch in file.iter_batches(size, row_groups=[row_range.group], columns=plan.inputs, use_threads=False):
                storage.stop.raise_if_set(f"reading {record.key}")
                low, high = max(0, row_range.start - position), min(len(batch), end - position)
                if low < high:
                    fields = as_fields(batch.slice(low, high - low), plan, catalogue.id_type)
                    sink = pa.BufferOutputStream()
                    with pa.ipc.new_stream(sink, fields.schema) as writer:
                        writer.write_batch(fields)
                    yield RawWindow(record.key, first + position + low, sink.getvalue().to_pybytes())
                position += len(batch)
                if position >= end:
                    return
        raise OSError(f"row group {row_range.group} has only {position} rows")
    except (pa.ArrowException, OSError) as error:
        _check_unchanged(record, storage)
        raise not_parquet(storage.uri(record.key), error) from error


def _check_unchanged(planned: CatalogueFile, storage: Storage) -> None:
    stat = storage.stat(planned.key)
    if stat is None or (stat.etag, stat.size_bytes) != (planned.etag, planned.size_bytes):
        raise DataError(
            f"{storage.uri(planned.key)} was {'changed' if stat else 'deleted'} after this cycle was planned",
            expected=f"a file with etag {planned.etag} and {planned.size_bytes} bytes",
            next_command="embed the new catalogue in a new cycle (--cycle), or restore the file",
        )


def as_fields(batch: pa.RecordBatch, plan: ColumnPlan, id_type: IdType) -> pa.RecordBatch:
    """Convert input columns to fields. Text is converted to large_binary, and numeric ids to their integer type."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    fields = to_fields(columns, plan)
    if id_type == "string":
        return fields
    ids = columns[dict(plan.pairs)["id"]]
    ids = ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
    index = fields.schema.get_field_index("id")
    return fields.set_column(index, fields.schema.field(index).with_type(ID_TYPES[id_type]), pc.cast(ids, id_type))


# Process a window in a worker process: validate and hash its rows, and tokenise the texts to embed.

NO_ID, EMPTY_TEXT, DUPLICATE_ID = "no id", "empty text", "duplicate id"


@dataclass(frozen=True)
class TextRules:
    """Parameters of `make_window` that are the same for all windows."""

    tokenizer: bytes
    max_tokens: int
    """Number of tokens after which texts are truncated."""
    id_type: IdType
    filter: tuple[tuple[str, str], ...] = ()
    index: str = ""
    """Path of the row index for the earlier cycle to reuse vectors from, if any."""
    prefix: str = ""
    """Text to prepend to every text before it is tokenised."""
    chunks: int = 1
    """Number of chunks for a text of `max_tokens`."""


@dataclass(frozen=True)
class TextRows:
    """The usable rows of a window in catalogue order, and its bad rows."""

    file: str
    is_last: bool
    """True for the last window of a shard."""
    table: pa.Table
    """The columns id, id_hash, text_hash and row, which is the index of the row in its file."""
    texts: list[str]
    num_rows: int
    """Number of rows in the window."""
    num_read: int
    """Number of rows that passed the filter, including bad rows."""
    bad: tuple[QuarantinedRow, ...]


@dataclass(frozen=True)
class Window:
    """A window whose texts have been tokenised.

    `rows.table` has four additional columns. `source` is the row code of the earlier vector to reuse, or -1 if the text
    must be embedded. `known` is true if the earlier cycle had the id. `truncated` and `chunked` are true for texts to
    embed that were truncated or that will be split into chunks.
    """

    rows: TextRows
    """The usable rows. Their texts are dropped, because only the tokens are needed from here on."""
    tokens: Tokens
    """The tokens of the texts to embed, in order."""

    def keep(self, rows: Bools) -> "Window":
        table = self.rows.table
        to_embed = rows[table["source"].to_numpy() < 0]
        kept = replace(self.rows, table=table.filter(pa.array(rows)))
        return Window(kept, take(self.tokens, np.flatnonzero(to_embed)))


def make_window(rules: TextRules, raw: RawWindow) -> Window:
    """Validate, hash and tokenise a window. This runs in a worker process."""
    rows = validate_rows(rules, raw)
    count = len(rows.texts)
    source, exists = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    if rules.index:
        source, exists = _row_index(Path(rules.index)).look_up(
            rows.table["id_hash"].to_numpy(), rows.table["text_hash"].to_numpy()
        )
    tokenizer, to_embed = _tokenizer(rules.tokenizer), np.flatnonzero(source < 0)
    tokens = tokenizer.encode([rules.prefix + rows.texts[row] for row in to_embed.tolist()])
    truncated, chunked = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    truncated[to_embed] = tokens.lengths > rules.max_tokens
    if truncated.any():
        tokens = cut_tokens(tokens, rules.max_tokens, tokenizer.sep_id)
    chunked[to_embed] = tokens.lengths > max_chunk_tokens(rules.max_tokens, rules.chunks)
    table = rows.table
    for name, column in (("source", source), ("known", exists), ("truncated", truncated), ("chunked", chunked)):
        table = table.append_column(name, pa.array(column))
    return Window(replace(rows, table=table, texts=[]), tokens)


def validate_rows(rules: TextRules, raw: RawWindow) -> TextRows:
    """Apply the filter and return the ids and texts of the usable rows, and the bad rows with their reasons."""
    batch = raw.batch()
    num_rows = len(batch)
    rows = np.arange(raw.first_row, raw.first_row + num_rows, dtype=np.int64)
    if rules.filter:
        keep = filter_mask(batch, dict(rules.filter))
        batch, rows = batch.filter(pa.array(keep)), rows[keep]
    limit = CHARACTERS_PER_TOKEN * rules.max_tokens
    columns = {name: batch[name].to_pylist() for name in ("id", "title", "text") if name in batch.schema.names}
    long_texts = columns.get("text") or [None] * len(rows)
    ids, kept, texts, bad = list[Any](), list[int](), list[str](), list[QuarantinedRow]()
    for row, values in enumerate(zip(columns["id"], columns["title"], long_texts, strict=True)):
        value, text, reason = _validate(*values, limit)
        if reason:
            content = row_content(batch, row)
            bad.append(QuarantinedRow(file=raw.file, row=int(rows[row]), reason=reason, content=content))
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


def validate_sample(context: tuple[TextRules, np.uint64], raw: RawWindow) -> TextRows:
    """Validate the rows of a window and keep only a sample of their texts, to be embedded again by verify.

    The sample consists of the ids whose hash is a multiple of the step. This runs in a worker process.
    """
    rules, step = context
    rows = validate_rows(rules, raw)
    chosen = np.flatnonzero(rows.table["id_hash"].to_numpy() % step == 0).tolist()
    return replace(rows, texts=[rows.texts[row] for row in chosen])


def _validate(name: bytes | int | None, title: bytes | None, text: bytes | None, limit: int) -> tuple[Any, str, str]:
    """Return (id, text, "") if a row has an id and a title or a text. Otherwise, the third value is the reason."""
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
    """Hash the ids as text, so that 7 and "7" have the same hash."""
    return _hashes([str(value).encode() for value in ids])


def _hashes(values: Sequence[bytes]) -> UInt64s:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, values), dtype=np.uint64, count=len(values))


def cut_tokens(tokens: Tokens, limit: int, sep_id: int) -> Tokens:
    """Truncate texts to `limit` tokens. The last token of a truncated text is replaced by [SEP]."""
    lengths = np.minimum(tokens.lengths, limit)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = tokens.ids[np.arange(offsets[-1]) + np.repeat(tokens.offsets[:-1] - offsets[:-1], lengths)]
    ids[offsets[1:][tokens.lengths > limit] - 1] = sep_id
    return Tokens(ids, offsets)


def chunk_tokens(tokens: Tokens, limit: int, sep_id: int) -> tuple[Tokens, Int64s]:
    """Split texts into chunks of at most `limit` tokens.

    Each chunk begins with the first token of its text, which is [CLS], and ends with [SEP]. The chunks do not overlap.
    Returns the chunks and the index [N] of the first chunk of each text.
    """
    lengths, inner = tokens.lengths, limit - FRAME
    counts = np.where(lengths > limit, -(-(lengths - FRAME) // inner), 1)
    first = np.cumsum(counts) - counts
    text = np.repeat(np.arange(len(lengths)), counts)
    skipped = (np.arange(len(text)) - first[text]) * inner  # number of tokens of the text that are in earlier chunks
    sizes = np.where(counts[text] > 1, np.minimum(lengths[text] - skipped, limit), lengths[text])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ids = tokens.ids[np.arange(offsets[-1]) + np.repeat(tokens.offsets[text] + skipped - offsets[:-1], sizes)]
    ids[offsets[:-1]] = tokens.ids[tokens.offsets[text]]
    ids[offsets[1:][counts[text] > 1] - 1] = sep_id
    return Tokens(ids, offsets), first


_tokenizer = lru_cache(maxsize=1)(TextTokenizer)
_row_index = lru_cache(maxsize=1)(RowIndex)
