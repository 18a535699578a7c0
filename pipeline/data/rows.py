"""Rows between a reader and a worker: batches, bad rows, chunks of bounded size, and the plan of columns."""

import difflib
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.arrays import Int64s
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import DataError
from pipeline.data.config import DataConfig
from pipeline.data.token_sets import QuarantinedRow, RowContent

CHUNK_BYTES = 64 * 2**20
"""A chunk ends at this many bytes of columns even when it has fewer rows than asked for."""
_BATCH_ROWS = 4096
_CONTENT_CHARACTERS = 500


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used. `count` > 1 if one defect swallowed several lines (an unclosed CSV quote).

    `line`: number of its first line in a text file, from 1; 0 in other files.
    """

    file: str
    row: int
    reason: str
    content: RowContent
    count: int = 1
    line: int = 0


def quarantined(rows: Iterable[BadRow]) -> tuple[QuarantinedRow, ...]:
    return tuple(
        QuarantinedRow(file=row.file, row=row.row, line=row.line, reason=row.reason, content=row.content)
        for row in rows
    )


def quarantine_lines(rows: Iterable[QuarantinedRow]) -> bytes:
    return b"".join(row.model_dump_json().encode() + b"\n" for row in rows)


@dataclass(frozen=True)
class RawBatch:
    """Some rows of one file: field columns of equal length N (text as large_binary), row numbers [N], and bad rows.

    `lines` [N]: the number of each row's first line in a text file, from 1. `blank` lines and `input_bytes` count what
    was read since the batch before.
    """

    columns: pa.RecordBatch
    rows: Int64s
    bad: tuple[BadRow, ...] = ()
    lines: Int64s | None = None
    blank: int = 0
    input_bytes: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows) + len(self.bad)

    @property
    def rows_read(self) -> int:
        """Good and bad rows, with all lines that a bad one swallowed."""
        return len(self.rows) + sum(row.count for row in self.bad)


@dataclass(frozen=True)
class RowChunk:
    """Consecutive rows of one file: the unit of parallel work and of resume."""

    file: str
    columns: bytes
    rows: Int64s
    bad: tuple[BadRow, ...]
    lines: Int64s | None = None

    @property
    def num_rows(self) -> int:
        """Good and bad rows, with all lines that a bad one swallowed."""
        return len(self.rows) + sum(row.count for row in self.bad)

    def table(self) -> pa.Table:
        return pa.ipc.open_stream(self.columns).read_all()


def batch_rows(rows_per_chunk: int) -> int:
    """Return the rows a reader should yield at a time, so that whole batches fill a chunk (nearly) exactly."""
    return rows_per_chunk // -(-rows_per_chunk // _BATCH_ROWS)


def cut_chunks(file: str, batches: Iterable[RawBatch], rows_per_chunk: int) -> Iterator[RowChunk]:
    """Group the batches of one file into chunks of at most `rows_per_chunk` rows and about CHUNK_BYTES.

    The end of a chunk depends on the file and the settings alone, which makes resume by chunk exact.
    """
    held: list[RawBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:  # blank lines, or rows left out: nothing to encode
            continue
        if held and (rows + batch.num_rows > rows_per_chunk or size + batch.columns.nbytes > CHUNK_BYTES):
            yield _chunk(file, held)
            held, rows, size = [], 0, 0
        held.append(batch)
        rows += batch.num_rows
        size += batch.columns.nbytes
    if rows:
        yield _chunk(file, held)


def _chunk(file: str, held: list[RawBatch]) -> RowChunk:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, held[0].columns.schema) as writer:
        for batch in held:
            writer.write_batch(batch.columns)
    lines = [batch.lines for batch in held if batch.lines is not None]
    return RowChunk(
        file,
        sink.getvalue().to_pybytes(),
        np.concatenate([batch.rows for batch in held]),
        tuple(bad for batch in held for bad in batch.bad),
        np.concatenate(lines) if lines else None,
    )


def shorten(content: str | bytes) -> str:
    """Return row content for the quarantine file: valid text of a few hundred characters."""
    text = content.decode("utf-8", "backslashreplace") if isinstance(content, bytes) else content
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _CONTENT_CHARACTERS else text[:_CONTENT_CHARACTERS] + "..."


_COLUMN = b"column"


def row_content(fields: pa.RecordBatch | pa.Table, row: int) -> RowContent:
    """Return the values of a row by the columns of its file (see `to_fields`), shortened for the quarantine file."""
    found: dict[str, str | int | float | None] = {}
    for field, values in zip(fields.schema, fields.columns, strict=True):
        value = values[row].as_py()
        if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):  # JSON has no NaN
            value = shorten(value if isinstance(value, bytes) else str(value))
        found[(field.metadata or {}).get(_COLUMN, field.name.encode()).decode()] = value
    return found


# What the encoder reads of a product.

CHARACTERS_PER_TOKEN = 16
"""Characters worth tokenising for each token of a bucket: no text of real words needs more."""


def text_characters(buckets: Sequence[Bucket]) -> int:
    """Return the characters of a text that are worth tokenising to fill the largest bucket."""
    return CHARACTERS_PER_TOKEN * buckets[-1].product_tokens


def product_text(title: str, text: str, limit: int) -> str:
    """Return the title, then the longer text, cut to `limit` characters. Either may be empty."""
    return (f"{title} {text}" if title and text else title or text)[:limit]


# From the columns an input has to the fields we use.

NUMERIC, CATEGORICAL, SLICE, FILTER = "numeric.", "categorical.", "slice.", "filter."
_OPTIONAL = ("text", "gain", "query_id", "product_id", "split")


@dataclass(frozen=True)
class ColumnPlan:
    """Pairs (field, input column). Fields are named as in ColumnMapping, or `numeric.<column>` and so on."""

    pairs: tuple[tuple[str, str], ...]

    @property
    def inputs(self) -> list[str]:
        """Input columns to read, each once."""
        return list(dict.fromkeys(column for _, column in self.pairs))

    def only(self, fields: Sequence[str] | None) -> "ColumnPlan":
        """Return the plan of some fields (None: all) and of the filter."""
        if fields is None:
            return self
        return ColumnPlan(tuple(p for p in self.pairs if p[0] in fields or p[0].startswith(FILTER)))


def plan_columns(config: DataConfig, available: Sequence[str], file: str) -> ColumnPlan:
    """Match the wanted fields with the columns of one file.

    Query and title are required, label or gain, and every explicitly configured column. Raises DataError.
    """
    mapping, there = config.columns, set(available)
    pairs = [("query", mapping.query), ("title", mapping.title)]
    if mapping.label in there or config.labels or mapping.gain not in there:
        pairs.append(("label", mapping.label))
    is_new = mapping.text not in (mapping.query, mapping.title)
    pairs += [(field, getattr(mapping, field)) for field in _OPTIONAL if field != "text" or is_new]
    return match_columns([*pairs, *feature_pairs(config)], available, file, _setting, _OPTIONAL)


def plan_pairs(config: DataConfig, available: Sequence[str], file: str) -> ColumnPlan:
    """Match the fields of rows without a judgement: query, title, text and features. Raises DataError."""
    mapping = config.columns
    pairs = [("query", mapping.query), ("title", mapping.title)]
    if mapping.text not in (mapping.query, mapping.title):
        pairs.append(("text", mapping.text))
    return match_columns([*pairs, *feature_pairs(config)], available, file, _setting, _OPTIONAL)


def feature_pairs(config: DataConfig) -> list[tuple[str, str]]:
    """Return the fields of features, slices and the filter with their columns."""
    return [
        *((NUMERIC + column, column) for column in config.numeric),
        *((CATEGORICAL + feature.column, feature.column) for feature in config.categorical),
        *((SLICE + column, column) for column in config.slices),
        *((FILTER + column, column) for column in config.filter),
    ]


LIKELY_NAMES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "search_term", "search_query", "query_text", "keyword", "keywords", "search", "term", "q"),
    "title": ("title", "product_title", "item_name", "product_name", "item_title", "name", "item", "product"),
    "text": ("text", "description", "product_description", "item_description", "body"),
    "label": ("label", "relevance", "grade", "esci_label", "judgement", "judgment", "relevance_label", "rating"),
    "gain": ("gain", "relevance_score", "score"),
    "query_id": ("query_id", "qid", "search_id"),
    "product_id": ("product_id", "item_id", "pid", "asin", "sku", "doc_id", "id"),
    "split": ("split", "fold", "subset"),
}  # fmt: skip
"""What columns are often called, by field; the likeliest first."""


def by_spelling(names: Sequence[str]) -> dict[str, str]:
    """Return column names by their letters and digits in lower case, words joined by _; of equal ones the first."""
    return {re.sub(r"[\W_]+", "_", name.lower()).strip("_"): name for name in reversed(names)}


def match_columns(
    pairs: Sequence[tuple[str, str]],
    available: Sequence[str],
    file: str,
    setting: Callable[[str], str],
    optional: Sequence[str] = ("text",),
) -> ColumnPlan:
    """Return the plan of (field, column) pairs: the one planner of columns, for any table.

    A column may be missing if its field is `optional` and it has the name of the field: no setting names it then.
    Raises DataError for a column that the file has twice, and for columns that it lacks; the next command has the
    `setting` of each field, with the column that is most likely meant.
    """
    pairs = [pair for pair in pairs if pair[1] in available or not (pair[0] == pair[1] and pair[0] in optional)]
    missing = [(field, column) for field, column in pairs if column not in available]
    for field, column in pairs:
        if available.count(column) > 1:
            raise DataError(
                f"{file} has {available.count(column)} columns {column!r} (for {field})",
                expected="one column of each name that is read",
                next_command=f"rename the others, or name another column with {setting(field)}",
            )
    if missing:
        taken = {column for _, column in pairs}
        spelled = {key: name for key, name in by_spelling(available).items() if name not in taken}
        flags, lists = list[str](), list[str]()
        for field, column in missing:
            close = difflib.get_close_matches(column.lower(), spelled, n=1)
            close = close or [name for name in LIKELY_NAMES.get(field, ()) if name in spelled]
            if "." in field:  # one of a list of columns
                lists.append(f"correct {column!r} in {setting(field)}")
            else:
                flags.append(f"{setting(field)} {shlex.quote(spelled[close[0]]) if close else 'COLUMN'}")
        raise DataError(
            f"{file} has no column " + ", ".join(f"{column!r} (for {field})" for field, column in missing),
            expected="columns among " + ", ".join(name if name.isprintable() else repr(name) for name in available),
            next_command="; ".join(filter(None, [" ".join(flags), *lists])),
        )
    return ColumnPlan(tuple(pairs))


def _setting(field: str) -> str:
    """Return the setting that names the column of a field."""
    kind = field.split(".")[0]
    if kind == field:
        return f"--data.columns.{kind}"
    return "--data.slices" if field.startswith(SLICE) else f"--data.{kind}"


# One text for a value, whichever format holds it.

READER_VERSION = 2
"""Part of the names of prepared data and gathered catalogues: raised if readers make other texts of the same file."""
JOINED_FIELDS = frozenset({"query", "title", "text"})
"""Fields in which a list of texts is joined by spaces."""
_WHOLE = r"-?(?:0|[1-9][0-9]*)\.0+"
_SCIENTIFIC = r"-?[0-9](?:\.[0-9]+[eE]\+?|[eE]\+)[0-9]{1,3}"  # a point or a plus: 1e3 may be the name of a product
_TRUTH = "True|TRUE|False|FALSE"
_VARIANT = rf"^\s*(?:{_WHOLE}|{_SCIENTIFIC}|{_TRUTH})\s*$"
_LARGEST_EXPONENT = 308
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string())


def canonical_text(text: str) -> str:
    """Return one text for a value that programs write in several ways; any other text as it is.

    A whole number (7.0, 4.006381333007E12) becomes its digits, a boolean true or false (Python writes True).
    """
    if not re.match(_VARIANT, text, re.ASCII):
        return text
    if text.strip().isalpha():
        return text.strip().lower()
    number = Decimal(text.strip())
    if number.adjusted() > _LARGEST_EXPONENT or number != number.to_integral_value():
        return text
    return str(int(number))


def join_texts(values: list[Any] | None) -> str | None:
    """Join a list of texts. Raises TypeError if it holds anything else."""
    if values is None:
        return None
    if not all(value is None or isinstance(value, str) for value in values):
        raise TypeError("a list of other values than texts")
    return " ".join(filter(None, values))


def is_text_list(kind: pa.DataType) -> bool:
    """Return whether the values of an Arrow type are lists of texts."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    value = kind.value_type
    return bool(pa.types.is_null(value) or pa.types.is_string(value) or pa.types.is_large_string(value))


def as_field(array: pa.Array, field: str) -> pa.Array:
    """Convert an input column to the type of its field: float64 for numbers in number fields, else large_binary.

    Whole numbers beyond 2^53 are rounded in number fields; as texts they keep all digits. NaN is no value. That bytes
    are UTF-8 is judged per row. Raises pa.ArrowException for nested types except lists of texts in JOINED_FIELDS.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_null(kind):
        return pa.nulls(len(array), pa.large_binary())
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if (field == "gain" or field.startswith(NUMERIC)) and (is_number or pa.types.is_boolean(kind)):
        return pc.cast(array, pa.float64(), safe=not pa.types.is_integer(kind))
    if str(kind) == "extension<arrow.uuid>":  # its class came with a later pyarrow than the oldest we take
        return _large_binary(None if value is None else str(value) for value in array.to_pylist())
    if field in JOINED_FIELDS and is_text_list(kind):
        return _one_text_each(_large_binary(map(join_texts, array.to_pylist())))
    if pa.types.is_floating(kind):  # a null is NaN here
        floats = array.to_numpy(zero_copy_only=False)
        return _one_text_each(_large_binary(None if value != value else str(value) for value in floats))
    if kind in _BYTES or pa.types.is_fixed_size_binary(kind):
        return _one_text_each(pc.cast(array, pa.large_binary()))
    return _one_text_each(pc.cast(pc.cast(array, pa.large_string()), pa.large_binary()))


def _large_binary(values: Iterable[str | None]) -> pa.Array:
    return pa.array([None if value is None else value.encode() for value in values], pa.large_binary())


def _one_text_each(array: pa.Array) -> pa.Array:
    found = pc.fill_null(pc.match_substring_regex(array, _VARIANT), False)
    if not pc.any(found).as_py():
        return array
    texts = [canonical_text(value.decode()).encode() for value in array.filter(found).to_pylist()]
    return pc.replace_with_mask(array, found, pa.array(texts, pa.large_binary()))


def to_fields(columns: dict[str, pa.Array], plan: ColumnPlan) -> pa.RecordBatch:
    """Convert input columns to the fields of a plan; each remembers the name of its column.

    Raises pa.ArrowTypeError, naming the column, for a type that is neither text nor a number.
    """
    arrays = list[pa.Array]()
    for field, column in plan.pairs:
        try:
            arrays.append(as_field(columns[column], field))
        except pa.ArrowException as error:
            raise pa.ArrowTypeError(f"column {column!r} is {columns[column].type}: {error}") from error
    fields = [
        pa.field(field, array.type, metadata={_COLUMN: column.encode()})
        for (field, column), array in zip(plan.pairs, arrays, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
