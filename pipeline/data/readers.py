"""Read Parquet, CSV and JSON lines files in batches of bounded size.

CSV and JSON lines are parsed in Python, one row at a time. Real exports contain invalid bytes and broken lines, for
which pyarrow's parsers would fail an entire block.

Every row of a file is yielded exactly once, either as a good or as a bad row. To verify this, `read_file` counts the
rows that it yields, and raises an error if this number differs from the number of rows in the Parquet footer, CSV
records, or lines of JSON.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import DataError, TransientError
from pipeline.data.csv_records import CsvRecords, Malformed
from pipeline.data.rows import JOINED_FIELDS, ColumnPlan, ColumnTypeError, RawBatch, join_texts, shorten, to_fields
from pipeline.data.token_sets import QuarantinedRow
from pipeline.io.storage import HEAD_BYTES, ObjectStat, Storage, check_downloaded, os_errors

NOT_AN_OBJECT = "malformed row: not a JSON object"
KEY_TWICE = "malformed row: a key occurs twice"
TO_UTF8 = "iconv -f LATIN1 -t UTF-8 FILE > CONVERTED"
_PARQUET_BUFFER_BYTES = 8 * 2**20
_BATCH_BYTES = 8 * 2**20
_LINE_BYTES = 16 * 2**20
_PEEK_LINES = 1000
_MAX_CONTENT_CHARACTERS = 1000  # maximum length of a malformed line in the quarantine file
_SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
}
_GZIP = b"\x1f\x8b"
_PARQUET = b"PAR1"
_OTHER_CONTENTS = {
    _PARQUET: "a Parquet file",
    _GZIP: "compressed with gzip",
    b"PK\x03\x04": "a zip archive",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ": "compressed with xz",
    b"Obj\x01": "an Avro file",
    b"ORC\n": "an ORC file",
    b"ORC\x08": "an ORC file",
    b"ARROW1\0": "an Arrow file",
}
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)

Planner = Callable[[list[str]], ColumnPlan]  # takes the columns of a file, may raise DataError


def suffix_format(name: str) -> str | None:
    """Return the format (`parquet`, `csv` or `jsonl`) that matches the suffix of a file name, or None if unknown."""
    stem = name.lower().removesuffix(".gz")
    return next((format_name for format_name, suffixes in _SUFFIXES.items() if stem.endswith(suffixes)), None)


@dataclass
class _Source:
    """A file that is being read. `rows` and `blank` count the rows and the blank lines that were read so far."""

    storage: Storage
    key: str
    planner: Planner
    num_rows: int
    rows: int = 0
    blank: int = 0


def object_version(stat: ObjectStat) -> str:
    """Return a string that changes when the content of an S3 object changes."""
    return f"{stat.etag}-{stat.size_bytes}"


def file_version(storage: Storage, key: str) -> str:
    """Return a string that changes whenever a file is written. It is empty if the file does not exist."""
    path = storage.local_path(key)
    if path is None:
        stat = storage.stat(key)
        return object_version(stat) if stat else ""
    with os_errors("checking", storage.uri(key)):
        try:
            info = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
    return f"{info.st_size:x}-{info.st_mtime_ns:x}-{info.st_ino:x}"


def read_file(
    storage: Storage, key: str, format_name: str, planner: Planner, num_rows: int, version: str | None = None
) -> Iterator[RawBatch]:
    """Yield the rows of a file in order, in batches of at most `num_rows` rows and about 8 MiB.

    Raises DataError if the file cannot be read or does not have a required column. If `version` is given, it must be
    the result of `file_version` at the time when the file was listed, and TransientError is raised if the file has
    changed since then.
    """
    readers = {"parquet": _read_parquet, "csv": _read_csv, "jsonl": _read_jsonl}
    source, rows_read, is_local = _Source(storage, key, planner, num_rows), 0, storage.local_path(key) is not None
    try:
        for batch in readers[format_name](source):
            if is_local or not rows_read:  # on S3, all subsequent reads use the version that was opened
                _check_version(storage, key, version)
            rows_read += batch.rows_read
            yield batch
        _check_version(storage, key, version if is_local or not rows_read else None)
    except DataError:
        _check_version(storage, key, version)
        raise
    except (pa.ArrowException, csv.Error, zlib.error, OSError, EOFError) as error:
        _check_version(storage, key, version)
        refuse_unreadable(storage, key, format_name)
        raise DataError(
            f"{storage.uri(key)} cannot be read as {format_name}: {' '.join(str(error).split())}",
            expected=f"a complete {format_name} file",
            next_command="recreate the file, or rename it so that its suffix matches its format",
        ) from error
    if rows_read != source.rows:
        raise RuntimeError(f"{storage.uri(key)} has {source.rows} rows, but its reader yielded {rows_read}")


def _check_version(storage: Storage, key: str, version: str | None) -> None:
    current = None if version is None else file_version(storage, key)
    if current != version:
        change = "changed while it was being read" if current else "was deleted after it was listed"
        raise TransientError(
            f"{storage.uri(key)} {change}",
            expected="input files that do not change while they are read",
            next_command="run the same command again when no process writes to the input",
        )


def refuse_unreadable(storage: Storage, key: str, format_name: str) -> None:
    """Raise DataError if a file starts with the signature of a different format, or is a truncated Parquet file."""
    uri, head = storage.uri(key), storage.read_range(key, 0, HEAD_BYTES)
    _refuse_other_content(uri, head, _PARQUET if format_name == "parquet" else _GZIP)
    stat = storage.stat(key)
    if head.startswith(_PARQUET) and storage.read_range(key, (stat.size_bytes if stat else 0) - 4, 4) != _PARQUET:
        raise DataError(
            f"{uri} is truncated: it starts like a Parquet file but does not have a Parquet footer",
            expected="a complete Parquet file",
            next_command="recreate the file or copy it again",
        )


def _refuse_other_content(uri: str, head: bytes, allowed: bytes = b"\n") -> None:
    if head:
        check_downloaded(head, uri, DataError)
    content = next((name for start, name in _OTHER_CONTENTS.items() if head.startswith(start) and start != allowed), "")
    if content:
        raise DataError(
            f"{uri} is {content}",
            expected="Parquet, or CSV or JSON lines, optionally compressed with gzip",
            next_command="download or export the file again in one of these formats, with the matching suffix",
        )


def open_parquet(storage: Storage, key: str) -> pq.ParquetFile:
    """Open a local or remote Parquet file. From S3, only the required byte ranges are read, buffered per column."""
    local = storage.local_path(key)
    source = pa.OSFile(str(local)) if local else pa.PythonFile(storage.open_read(key), mode="r")
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=_PARQUET_BUFFER_BYTES)


def _read_parquet(source: _Source) -> Iterator[RawBatch]:
    with open_parquet(source.storage, source.key) as file:
        plan = source.planner(list(file.schema_arrow.names))
        stat = source.storage.stat(source.key)
        source.rows, size_bytes = int(file.metadata.num_rows), stat.size_bytes if stat else 0
        first = reported_bytes = 0
        for group in range(file.num_row_groups):  # read one at a time to limit the memory to that of a row group
            info = file.metadata.row_group(group)
            row_bytes = max(1, info.total_byte_size // max(1, info.num_rows))
            size = max(1, min(source.num_rows, _BATCH_BYTES // row_bytes))
            for batch in file.iter_batches(size, row_groups=[group], columns=plan.inputs, use_threads=False):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                rows = np.arange(first, first + len(batch), dtype=np.int64)
                first += len(batch)
                position = size_bytes * first // max(1, source.rows)
                try:
                    fields = to_fields(columns, plan)
                except ColumnTypeError as error:
                    raise UnsupportedColumn(source.storage.uri(source.key), error) from error
                yield RawBatch(fields, rows, input_bytes=position - reported_bytes)
                reported_bytes = position


_Parsed = tuple[int, list[bytes | None] | Malformed]
"""A line number, and either the values of the row that begins on that line or the malformed text."""


def _batches(
    source: _Source, plan: ColumnPlan, position: Callable[[], int], rows: Iterable[_Parsed]
) -> Iterator[RawBatch]:
    """Group the rows of a text format into batches. `position` returns the number of bytes read from the file."""
    columns, numbers, bad = [list[bytes | None]() for _ in plan.inputs], list[int](), list[QuarantinedRow]()
    lines = list[int]()
    size = reported_blank = reported_bytes = 0
    for row, parsed in enumerate(chain(rows, [None])):
        if parsed is not None:
            line, record = parsed
            if isinstance(record, Malformed):
                reason, content, count = record.reason, shorten(record.text), record.lines
                bad.append(
                    QuarantinedRow(file=source.key, row=row, line=line, reason=reason, content=content, count=count)
                )
            else:
                numbers.append(row)
                lines.append(line)
                for column, value in zip(columns, record, strict=True):
                    column.append(value)
                    size += len(value) if value else 0
        is_full = len(numbers) + len(bad) >= source.num_rows or size >= _BATCH_BYTES
        if is_full or (parsed is None and (numbers or bad or reported_blank != source.blank)):
            arrays = (pa.array(values, pa.large_binary()) for values in columns)
            fields = to_fields(dict(zip(plan.inputs, arrays, strict=True)), plan)
            blank, read_bytes = source.blank, position()
            yield RawBatch(
                fields,
                np.array(numbers, dtype=np.int64),
                tuple(bad),
                np.array(lines, dtype=np.int64),
                blank=blank - reported_blank,
                input_bytes=read_bytes - reported_bytes,
            )
            columns, numbers, bad, lines = [list[bytes | None]() for _ in plan.inputs], [], [], []
            size, reported_blank, reported_bytes = 0, blank, read_bytes


@contextmanager
def _open_text(source: _Source) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a UTF-8 text file, decompressing it and skipping its byte order mark if necessary.

    Yields the file, and a function that returns the number of (compressed) bytes read so far.
    """
    with source.storage.open_read(source.key) as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
        if source.key.lower().endswith(".gz") and not is_gzip and file.tell():
            raise gzip.BadGzipFile("its name ends in .gz but its content is not gzip")
        file.seek(0)
        raw = cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=file))) if is_gzip else file
        head, uri = raw.read(HEAD_BYTES), source.storage.uri(source.key)
        _refuse_other_content(uri, head)
        if head.startswith(_BYTE_ORDER_MARKS) or b"\0" in re.split(rb"[\r\n]", head)[0]:
            raise DataError(
                f"{uri} is not UTF-8: its first line contains zero bytes or a different encoding's byte order mark",
                expected="UTF-8",
                next_command="iconv -f UTF-16 -t UTF-8 FILE > CONVERTED (or -f UTF-32)",
            )
        raw.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
        yield raw, file.tell


def _read_csv(source: _Source) -> Iterator[RawBatch]:
    with _open_text(source) as (raw, position):
        text = io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape", newline="")
        is_tsv = source.key.lower().removesuffix(".gz").endswith(".tsv")
        records = CsvRecords(text, "\t" if is_tsv else ",")
        names = [name.strip() for name in records.header]
        if not names:
            return
        plan = source.planner(names)
        indices = [names.index(column) for column in plan.inputs]

        def rows() -> Iterator[_Parsed]:
            for line, record in records:
                source.rows, source.blank = records.rows, records.blank
                if isinstance(record, Malformed):
                    yield line, record
                else:
                    yield line, [record[index].encode("utf-8", "surrogateescape") or None for index in indices]
            source.rows, source.blank = records.rows, records.blank

        yield from _batches(source, plan, position, rows())


def _read_jsonl(source: _Source) -> Iterator[RawBatch]:
    with _open_text(source) as (raw, position):
        lines = _lines(raw, source)
        head = list(islice(lines, _PEEK_LINES))
        if not head:
            return
        uri = source.storage.uri(source.key)
        records = [_parse(line) for _, line in head]
        first = head[0][1].strip()
        if first.startswith(b"[") or not any(isinstance(record, dict) for record in records):
            raise DataError(
                f"{uri} is not JSON lines: its first line is {shorten(first[:100])!r}",
                expected="one JSON object per line, without brackets or commas around them",
                next_command="jq -c '.[]' FILE > rows.jsonl for an array, jq -c . FILE for objects that span lines",
            )
        names = dict.fromkeys(name for record in records if isinstance(record, dict) for name in record)
        plan = source.planner(list(names))
        joined = [all(field in JOINED_FIELDS for field, name in plan.pairs if name == column) for column in plan.inputs]

        def rows() -> Iterator[_Parsed]:
            for row, (number, line) in enumerate(chain(head, lines)):
                record = _parse(line)
                if isinstance(record, Malformed):
                    yield number, record
                    continue
                if new := [name for name in record if name not in names]:
                    names.update(dict.fromkeys(new))
                    if source.planner(list(names)) != plan:  # rows were already read without the new column
                        raise DataError(
                            f"{uri} has {', '.join(map(repr, new))} for the first time in row {row}",
                            expected=f"every column in at least one of the first {_PEEK_LINES} rows",
                            next_command="add it to the first row with the value null",
                        )
                values = list[bytes | None]()
                for column, may_join in zip(plan.inputs, joined, strict=True):
                    try:
                        values.append(_json_bytes(record.get(column), may_join))
                    except TypeError as error:
                        kind = ColumnTypeError(column, f"{error} in line {number}")
                        raise UnsupportedColumn(uri, kind) from error
                yield number, values

        yield from _batches(source, plan, position, rows())


class UnsupportedColumn(DataError):
    """Raised if the values of a `column` of a file are neither text nor numbers."""

    def __init__(self, uri: str, error: ColumnTypeError) -> None:
        super().__init__(
            f"{uri}: {error}",
            expected="strings, bytes, numbers or dates (or lists of strings in the query, title and text columns)",
            next_command="write the column as text, or choose a different column with --data.columns",
        )
        self.column = error.column


def _lines(raw: BinaryIO, source: _Source) -> Iterator[tuple[int, bytes]]:
    """Yield all lines that are not blank, with their 1-based line numbers.

    A line longer than 16 MiB is replaced by a short text that cannot be parsed, so that it becomes a bad row.
    """
    number = 0
    while line := raw.readline(_LINE_BYTES):
        number += 1
        if len(line) == _LINE_BYTES and not line.endswith(b"\n"):
            while (rest := raw.readline(_LINE_BYTES)) and not rest.endswith(b"\n"):
                continue
            line = b"longer than 16 MiB: " + line[:_MAX_CONTENT_CHARACTERS]
        if line.strip():
            source.rows += 1
            yield number, line
        else:
            source.blank += 1


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError(KEY_TWICE)
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _parse(line: bytes) -> dict[str, Any] | Malformed:
    """Parse a line as a JSON object.

    Bytes that are not valid UTF-8 are decoded as surrogates, which allows them to be validated later for each field.
    """
    reason = NOT_AN_OBJECT
    try:
        if isinstance(record := _DECODER.decode(line.decode("utf-8", "surrogateescape")), dict):
            return record
    except (ValueError, RecursionError) as error:
        reason = KEY_TWICE if str(error) == KEY_TWICE else NOT_AN_OBJECT
    return Malformed(reason, shorten(line))


def _json_bytes(value: Any, may_join: bool) -> bytes | None:
    """Convert a JSON value to text. Raises TypeError if it is an object, or if it is a list that must not be joined."""
    if isinstance(value, dict):
        raise TypeError("an object")
    if isinstance(value, list):
        if not may_join:
            raise TypeError("a list")
        value = join_texts(value)
    if value is None or value == "" or value != value:  # NaN is a missing value
        return None
    text = value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # an escaped lone surrogate, which is later rejected as invalid UTF-8
        return text.encode("utf-8", "surrogatepass")
