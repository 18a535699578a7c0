"""Convert the rows that a reader yields to the chunks that worker processes encode.

This module also defines the mapping from input columns to fields, and converts their values to a canonical form that
does not depend on the file format.
"""

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
from pipeline.data.attributes import attribute_pairs, base_of
from pipeline.data.config import DataConfig
from pipeline.data.token_sets import QuarantinedRow, RowContent

CHUNK_BYTES = 64 * 2**20  # maximum size of the columns of a chunk, even if it has fewer rows than configured
_BATCH_ROWS = 4096
_CONTENT_CHARACTERS = 500


def quarantine_lines(rows: Iterable[QuarantinedRow]) -> bytes:
    return b"".join(row.model_dump_json().encode() + b"\n" for row in rows)


@dataclass(frozen=True)
class RawBatch:
    """A batch of rows from one file.

    The N good rows are stored as `columns`, one per field (text as large_binary), with their row numbers `rows` [N]. In
    a text file, `lines` [N] contains the 1-based number of each row's first line. `blank` and `input_bytes` are the
    numbers of blank lines and bytes that have been read since the previous batch.
    """

    columns: pa.RecordBatch
    rows: Int64s
    bad: tuple[QuarantinedRow, ...] = ()
    lines: Int64s | None = None
    blank: int = 0
    input_bytes: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows) + len(self.bad)

    @property
    def rows_read(self) -> int:
        """Number of good and bad rows, where a bad row that spans several lines is counted once per line."""
        return len(self.rows) + sum(row.count for row in self.bad)


@dataclass(frozen=True)
class RowChunk:
    """Consecutive rows of one file. Chunks are encoded in parallel, and a rerun skips chunks that are finished."""

    file: str
    columns: bytes
    rows: Int64s
    bad: tuple[QuarantinedRow, ...]
    lines: Int64s | None = None

    @property
    def num_rows(self) -> int:
        """Number of good and bad rows, where a bad row that spans several lines is counted once per line."""
        return len(self.rows) + sum(row.count for row in self.bad)

    def table(self) -> pa.Table:
        return pa.ipc.open_stream(self.columns).read_all()


def batch_rows(rows_per_chunk: int) -> int:
    """Return the number of rows that a reader should yield at a time so that batches fill up a chunk."""
    return rows_per_chunk // -(-rows_per_chunk // _BATCH_ROWS)


def cut_chunks(file: str, batches: Iterable[RawBatch], rows_per_chunk: int) -> Iterator[RowChunk]:
    """Group the batches of one file into chunks of at most `rows_per_chunk` rows and about CHUNK_BYTES.

    Chunk boundaries depend only on the file and the settings, so that a rerun can skip the chunks that are finished.
    """
    buffered: list[RawBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:  # only blank lines or filtered rows
            continue
        if buffered and (rows + batch.num_rows > rows_per_chunk or size + batch.columns.nbytes > CHUNK_BYTES):
            yield _chunk(file, buffered)
            buffered, rows, size = [], 0, 0
        buffered.append(batch)
        rows += batch.num_rows
        size += batch.columns.nbytes
    if rows:
        yield _chunk(file, buffered)


def _chunk(file: str, batches: list[RawBatch]) -> RowChunk:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].columns.schema) as writer:
        for batch in batches:
            writer.write_batch(batch.columns)
    lines = [batch.lines for batch in batches if batch.lines is not None]
    return RowChunk(
        file,
        sink.getvalue().to_pybytes(),
        np.concatenate([batch.rows for batch in batches]),
        tuple(bad for batch in batches for bad in batch.bad),
        np.concatenate(lines) if lines else None,
    )


def shorten(content: str | bytes) -> str:
    """Convert content to valid text and truncate it for use in messages and in the quarantine file."""
    text = content.decode("utf-8", "backslashreplace") if isinstance(content, bytes) else content
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _CONTENT_CHARACTERS else text[:_CONTENT_CHARACTERS] + "..."


_COLUMN = b"column"


def row_content(fields: pa.RecordBatch | pa.Table, row: int) -> RowContent:
    """Return the values of a row for the quarantine file, keyed by the column names of the input file.

    The column names are taken from the metadata that `to_fields` adds. Long values are truncated.
    """
    content: dict[str, str | int | float | None] = {}
    for field, values in zip(fields.schema, fields.columns, strict=True):
        value = values[row].as_py()
        if isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)):  # JSON has no NaN
            value = shorten(value if isinstance(value, bytes) else str(value))
        content[(field.metadata or {}).get(_COLUMN, field.name.encode()).decode()] = value
    return content


# The product text that is passed to the encoder.

CHARACTERS_PER_TOKEN = 16  # number of characters to tokenise for each token, sufficient for any natural text


def text_characters(buckets: Sequence[Bucket]) -> int:
    """Return the number of characters that suffice to fill the largest bucket. Longer texts can be truncated."""
    return CHARACTERS_PER_TOKEN * max(buckets[-1].query_tokens, buckets[-1].product_tokens)


def product_text(title: str, text: str, limit: int) -> str:
    """Concatenate the title and the longer text, either of which may be empty, and truncate to `limit` characters."""
    return (f"{title} {text}" if title and text else title or text)[:limit]


# Mapping from input columns to fields.

NUMERIC, CATEGORICAL, SLICE, FILTER = "numeric.", "categorical.", "slice.", "filter."
OPTIONAL = ("text", "gain", "query_id", "product_id", "split")


@dataclass(frozen=True)
class ColumnPlan:
    """A mapping from fields to input columns, as (field, column) pairs.

    Fields are named as in ColumnMapping, or have a prefix, such as `numeric.<column>`.
    """

    pairs: tuple[tuple[str, str], ...]

    @property
    def inputs(self) -> list[str]:
        """The distinct input columns to read."""
        return list(dict.fromkeys(column for _, column in self.pairs))

    def only(self, fields: Sequence[str] | None) -> "ColumnPlan":
        """Return a plan for only the given fields (None: all), their text attributes, and the filter's columns."""
        if fields is None:
            return self
        return ColumnPlan(
            tuple(p for p in self.pairs if p[0] in fields or p[0].startswith(FILTER) or base_of(p[0]) in fields)
        )


def plan_columns(config: DataConfig, available: Sequence[str], file: str, *, judged: bool = True) -> ColumnPlan:
    """Match the configured fields with the columns of one file. Rows that are not `judged` have no label, gain or ids.

    Raises DataError if the query or title column is missing, if there is neither a label nor a gain column, if any
    explicitly configured column is missing, or if a split column contradicts `data.split_by`.
    """
    mapping, columns = config.columns, set(available)
    if judged and config.split_by != "query" and mapping.split in columns:
        raise split_by_error(file, mapping.split, config.split_by)
    pairs = [("query", mapping.query), ("title", mapping.title)]
    if judged and (mapping.label in columns or config.labels or mapping.gain not in columns):
        pairs.append(("label", mapping.label))
    fields = [] if mapping.text in (mapping.query, mapping.title) else ["text"]
    fields += [field for field in OPTIONAL if judged and field != "text"]
    pairs += [(field, column) for field in fields if (column := getattr(mapping, field))]
    pairs += [*feature_pairs(config), *attribute_pairs(config.attributes, available, file)]
    return match_columns(pairs, available, file, _setting, OPTIONAL)


def split_by_error(file: str, column: str, split_by: str) -> DataError:
    """Create the error for an input with a split column if `data.split_by` is set as well."""
    return DataError(
        f"{file} has a split column {column!r}, so data.split_by {split_by} has no effect",
        expected="either a split column or data.split_by",
        next_command="remove data.split_by, or leave out the column with --data.columns.split ''",
    )


def feature_pairs(config: DataConfig) -> list[tuple[str, str]]:
    """Return the (field, column) pairs of the features, the slices and the filter."""
    return [
        *((NUMERIC + column, column) for column in config.numeric),
        *((CATEGORICAL + feature.column, feature.column) for feature in config.categorical),
        *((SLICE + column, column) for column in config.slices),
        *((FILTER + column, column) for column in config.filter),
    ]


LIKELY_NAMES: Mapping[str, tuple[str, ...]] = {
    "query": ("query", "search_term", "search_query", "query_text", "keyword", "keywords", "search", "term", "q",
              "title_left", "left_title", "name_left"),
    "title": ("title", "product_title", "item_name", "product_name", "item_title", "name", "item", "product",
              "title_right", "right_title", "name_right"),
    "text": ("text", "description", "product_description", "item_description", "body"),
    "label": ("label", "relevance", "grade", "esci_label", "judgement", "judgment", "relevance_label", "rating"),
    "gain": ("gain", "relevance_score", "score"),
    "query_id": ("query_id", "qid", "search_id", "id_left", "left_id"),
    "product_id": ("product_id", "item_id", "pid", "asin", "sku", "doc_id", "id", "id_right", "right_id"),
    "split": ("split", "fold", "subset"),
}  # fmt: skip
"""Common column names by field, most likely first."""
CLICK_COLUMNS = ("impressions", "clicks", "click_rate", "click_rate_low", "click_rate_high")
"""The columns that `trnpipe judge` adds to judgements. Labels are computed from them, so they are not features."""


def by_spelling(names: Sequence[str]) -> dict[str, str]:
    """Map normalised spellings (lower case, words joined by _) to column names. The first of several names is used."""
    return {re.sub(r"[\W_]+", "_", name.lower()).strip("_"): name for name in reversed(names)}


def match_columns(
    pairs: Sequence[tuple[str, str]],
    available: Sequence[str],
    file: str,
    setting: Callable[[str], str],
    optional: Sequence[str] = ("text",),
) -> ColumnPlan:
    """Create a plan from (field, column) pairs for a file that has the columns `available`.

    If a field is `optional` and its column has the default name (that of the field), the column may be missing. Raises
    DataError if any other column is missing, or if a column name is ambiguous. For missing columns, the error suggests
    a value of the field's `setting`, based on the columns that the file does have.
    """
    pairs = [pair for pair in pairs if pair[1] in available or not (pair[0] == pair[1] and pair[0] in optional)]
    missing = [(field, column) for field, column in pairs if column not in available]
    for field, column in pairs:
        if available.count(column) > 1:
            raise DataError(
                f"{file} has {available.count(column)} columns {column!r} (for {field})",
                expected="unique column names",
                next_command=f"rename the others, or choose a different column with {setting(field)}",
            )
    if missing:
        used = {column for _, column in pairs}
        spelled = {key: name for key, name in by_spelling(available).items() if name not in used}
        flags, lists = list[str](), list[str]()
        for field, column in missing:
            close = difflib.get_close_matches(column.lower(), spelled, n=1)
            close = close or [name for name in LIKELY_NAMES.get(field, ()) if name in spelled]
            if "." in field:  # the setting is a list of columns
                lists.append(f"correct {column!r} in {setting(field)}")
            else:
                flags.append(f"{setting(field)} {shlex.quote(spelled[close[0]]) if close else 'COLUMN'}")
        raise DataError(
            f"{file} has no column " + ", ".join(f"{column!r} (for {field})" for field, column in missing),
            expected="one of " + ", ".join(name if name.isprintable() else repr(name) for name in available),
            next_command="; ".join(filter(None, [" ".join(flags), *lists])),
        )
    return ColumnPlan(tuple(pairs))


def _setting(field: str) -> str:
    kind = field.split(".")[0]
    if kind == field:
        return f"--data.columns.{kind}"
    return "--data.slices" if field.startswith(SLICE) else f"--data.{kind}"


# Canonical values, which do not depend on the file format.

READER_VERSION = 2  # part of the names of prepared data. Increase it when readers return different texts for a file
JOINED_FIELDS = frozenset({"query", "title", "text"})  # fields in which a list of strings is joined with spaces
_INTEGER = r"-?(?:0|[1-9][0-9]*)\.0+"
_SCIENTIFIC = r"-?[0-9](?:\.[0-9]+[eE]\+?|[eE]\+)[0-9]{1,3}"  # requires a point or plus since 1e3 may be a product
_BOOLEAN = "True|TRUE|False|FALSE"
_VARIANT = rf"^\s*(?:{_INTEGER}|{_SCIENTIFIC}|{_BOOLEAN})\s*$"
_LARGEST_EXPONENT = 308
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view(), pa.string(), pa.large_string())


def canonical_text(text: str) -> str:
    """Normalise integers and booleans, which different programs write in different ways.

    For example, 7.0 is converted to 7, 4.006381333007E12 to 4006381333007, and TRUE to true. Any other text is returned
    unchanged.
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
    """Join a list of strings with spaces. Raises TypeError if the list contains any other values."""
    if values is None:
        return None
    if not all(value is None or isinstance(value, str) for value in values):
        raise TypeError("a list with values that are not strings")
    return " ".join(filter(None, values))


def is_text_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list of strings."""
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return False
    value = kind.value_type
    return bool(pa.types.is_null(value) or pa.types.is_string(value) or pa.types.is_large_string(value))


def as_field(array: pa.Array, field: str) -> pa.Array:
    """Convert an input column to the type of its field.

    Numbers in numeric fields are converted to float64, which rounds integers beyond 2^53. Everything else is converted
    to large_binary. NaN is considered a missing value. Whether bytes are valid UTF-8 is checked later. Raises
    pa.ArrowException for nested types, except for lists of strings in JOINED_FIELDS.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    if pa.types.is_null(kind):
        return pa.nulls(len(array), pa.large_binary())
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if (field == "gain" or field.startswith(NUMERIC)) and (is_number or pa.types.is_boolean(kind)):
        return pc.cast(array, pa.float64(), safe=not pa.types.is_integer(kind))
    if str(kind) == "extension<arrow.uuid>":  # the oldest supported pyarrow does not have a class for this type
        return _large_binary(None if value is None else str(value) for value in array.to_pylist())
    if field in JOINED_FIELDS and is_text_list(kind):
        return _canonical_texts(_large_binary(map(join_texts, array.to_pylist())))
    if pa.types.is_floating(kind):  # to_numpy converts null to NaN
        floats = array.to_numpy(zero_copy_only=False)
        return _canonical_texts(_large_binary(None if value != value else str(value) for value in floats))
    if kind in _BYTES or pa.types.is_fixed_size_binary(kind):
        return _canonical_texts(pc.cast(array, pa.large_binary()))
    return _canonical_texts(pc.cast(pc.cast(array, pa.large_string()), pa.large_binary()))


def _large_binary(values: Iterable[str | None]) -> pa.Array:
    return pa.array([None if value is None else value.encode() for value in values], pa.large_binary())


def _canonical_texts(array: pa.Array) -> pa.Array:
    is_variant = pc.fill_null(pc.match_substring_regex(array, _VARIANT), False)
    if not pc.any(is_variant).as_py():
        return array
    texts = [canonical_text(value.decode()).encode() for value in array.filter(is_variant).to_pylist()]
    return pc.replace_with_mask(array, is_variant, pa.array(texts, pa.large_binary()))


def with_attributes(text: pa.Array, values: Sequence[pa.Array]) -> pa.Array:
    """Append the values of text attributes to a query or title, separated by spaces. A blank text stays as it is."""
    is_blank, *are_blank = (pc.fill_null(pc.match_substring_regex(each, r"^\s*$"), True) for each in (text, *values))
    nothing = pa.nulls(len(text), pa.large_binary())
    present = [pc.if_else(blank, nothing, each) for blank, each in zip(are_blank, values, strict=True)]
    filled = pc.fill_null(text, b"")  # with "skip", pyarrow 26 drops rows in which everything is null
    joined = pc.binary_join_element_wise(filled, *present, pa.scalar(b" ", pa.large_binary()), null_handling="skip")
    return pc.if_else(is_blank, text, joined)


class ColumnTypeError(pa.ArrowTypeError):  # type: ignore[misc]  # pyarrow has no types
    """Raised if the values of a column are neither text nor numbers."""

    def __init__(self, column: str, kind: str) -> None:
        super().__init__(f"column {column!r} is {kind}")
        self.column = column


def to_fields(columns: dict[str, pa.Array], plan: ColumnPlan) -> pa.RecordBatch:
    """Convert input columns to the fields of a plan, and append text attributes to the query and the title.

    The name of the input column is stored in the metadata of each field. Raises ColumnTypeError.
    """
    arrays = list[pa.Array]()
    for field, column in plan.pairs:
        try:
            arrays.append(as_field(columns[column], field))
        except pa.ArrowException as error:
            raise ColumnTypeError(column, f"{columns[column].type}: {error}") from error
    for index, (base, _) in enumerate(plan.pairs):
        if values := [array for (field, _), array in zip(plan.pairs, arrays, strict=True) if base_of(field) == base]:
            arrays[index] = with_attributes(arrays[index], values)
    fields = [
        pa.field(field, array.type, metadata={_COLUMN: column.encode()})
        for (field, column), array in zip(plan.pairs, arrays, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
