"""Readers of one file each: Parquet, CSV and JSON lines, streamed in batches of bounded size.

CSV and JSON lines go through Python's own parsers, because those survive row by row what real exports contain (invalid
bytes, broken lines); pyarrow's fail the whole block.

Every row that the format counts (of the Parquet footer, a CSV record, a line of JSON) comes out once, good or bad;
`read_file` counts both sides and does not end quietly when they differ.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
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
from pipeline.data.rows import JOINED_FIELDS, BadRow, ColumnPlan, RawBatch, join_texts, shorten, to_fields
from pipeline.io.storage import ObjectStat, Storage, is_lfs_pointer, os_errors

NOT_AN_OBJECT = "malformed row: not a JSON object"
KEY_TWICE = "malformed row: a key that is read occurs twice"
_PARQUET_BUFFER_BYTES = 8 * 2**20
_BATCH_BYTES = 8 * 2**20
_LINE_BYTES = 16 * 2**20
_PEEK_LINES = 1000
_HELD_CHARACTERS = 1000  # of what is malformed, for the quarantine
_SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "csv": (".csv", ".tsv"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
}
_FOREIGN_COMPRESSION = (".bz2", ".lz4", ".snappy", ".xz", ".z", ".zip", ".zst", ".zstd")
HEAD_BYTES = 64
_GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
_OTHER_ENCODINGS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),  # before UTF-16: its mark begins with that of UTF-16
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}

Planner = Callable[[list[str]], ColumnPlan]
"""Given the columns of the file, which to read (raises DataError)."""


def suffix_format(name: str) -> str | None:
    """`parquet`, `csv` or `jsonl` by file name; None for anything else.

    Raises DataError for such a file in a compression that no reader knows: to leave it out would lose its rows.
    """
    lower = name.lower()
    stem = lower.removesuffix(".gz")
    for suffix in _FOREIGN_COMPRESSION:
        if lower.endswith(suffix) and suffix_format(stem.removesuffix(suffix)):
            raise DataError(
                f"{name} is compressed with {suffix.removeprefix('.')}",
                expected="files that are not compressed, or .gz",
                next_command="decompress it, or move it out of the input",
            )
    return next((format_name for format_name, suffixes in _SUFFIXES.items() if stem.endswith(suffixes)), None)


@dataclass
class _Source:
    """One file being read, and what its format has counted in it so far, whatever becomes of the rows."""

    storage: Storage
    key: str
    planner: Planner
    num_rows: int
    rows: int = 0
    blank: int = 0


def object_version(stat: ObjectStat) -> str:
    """Changes with the content of an object on S3."""
    return f"{stat.etag}-{stat.size_bytes}"


def version_of(storage: Storage, key: str) -> str:
    """Changes when a file is written again; empty when it is gone. Of a local file by its inode, without reading it."""
    path = storage.local_path(key)
    if path is None:
        stat = storage.stat(key)
        return object_version(stat) if stat else ""
    with os_errors("looking at", storage.uri(key)):
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return ""
    return f"{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ino:x}"


def read_file(
    storage: Storage, key: str, format_name: str, planner: Planner, num_rows: int, version: str | None = None
) -> Iterator[RawBatch]:
    """The rows of one file, at most `num_rows` and about 8 MiB at a time, in file order.

    `version`: as version_of() said before; nothing is given of another one. Raises DataError when the file cannot be
    read at all or lacks a column, TransientError when it was changed.
    """
    readers = {"parquet": _read_parquet, "csv": _read_csv, "jsonl": _read_jsonl}
    source, given, checked = _Source(storage, key, planner, num_rows), 0, False
    is_local = storage.local_path(key) is not None

    def check() -> None:
        seen = version if version is None else version_of(storage, key)
        if seen != version:
            raise TransientError(
                f"{storage.uri(key)} " + ("was changed while it was read" if seen else "is gone since it was listed"),
                expected="files that stay as they are while they are read",
                next_command="the same command again, once nothing writes there: it looks at the files anew",
            )

    try:
        for batch in readers[format_name](source):
            given += len(batch.rows) + sum(row.count for row in batch.bad)
            if is_local or not checked:  # on S3 all that follows is of the object that was opened
                check()
                checked = True
            yield batch
        if is_local or not checked:
            check()
    except DataError:
        check()
        raise
    except (pa.ArrowException, csv.Error, zlib.error, OSError, EOFError) as error:
        check()
        refuse_unreadable(storage, key, format_name)
        raise DataError(
            f"{storage.uri(key)} cannot be read as {format_name}: {' '.join(str(error).split())}",
            expected=f"a whole {format_name} file",
            next_command="write the file again, or rename it with the suffix of the format that it has",
        ) from error
    if given != source.rows:
        raise RuntimeError(f"{storage.uri(key)} has {source.rows} rows, its reader gave {given}")


_OTHER_CONTENTS = {
    rb"PK\x03\x04": "a zip archive",
    rb"\x28\xb5\x2f\xfd": "compressed with zstd",
    rb"BZh\d1AY&SY": "compressed with bzip2",
    rb"\xfd7zXZ": "compressed with xz",
    rb"\x04\x22\x4d\x18": "compressed with lz4",
    rb"Obj\x01": "an Avro file",
    rb"SQLite format": "a SQLite database",
    rb"ORC[\s\S]{0,5}[\x00-\x08]": "an ORC file",
    rb"\xff\xff\xff\xff|(ARROW1|FEA1)\x00": "an Arrow file",
    rb"\xd0\xcf\x11\xe0": "an old Excel file",
    rb"%PDF-": "a PDF document",
    rb"\s*(?i:<!doctype|<html)": "an HTML page, such as one for errors or to sign in",
    rb"\s*(?i:<\?xml|<error>)": "an XML document, such as an error of S3",
}


def refuse_other_content(uri: str, head: bytes, wanted: str) -> None:
    """Raise DataError when a file that begins with `head` is known to hold something else than `wanted`.

    `wanted`: parquet, or any format of text.
    """
    if is_lfs_pointer(head):
        raise DataError(
            f"{uri} is a Git LFS pointer, not the file itself",
            expected="the content of the file",
            next_command="git lfs pull, in the clone that holds it",
        )
    seen = next((name for start, name in _OTHER_CONTENTS.items() if re.match(start, head)), "")
    if wanted != "parquet" and head.startswith(PARQUET):
        seen = "a Parquet file"
    elif wanted == "parquet" and head.startswith(_GZIP):
        seen = "compressed with gzip"
    elif wanted == "csv" and re.match(rb'\s*[\[{]\s*["{]', head):
        seen = "JSON"
    if seen:
        raise DataError(
            f"{uri} is {seen}",
            expected="rows as Parquet, or as CSV or JSON lines, which may be compressed with gzip",
            next_command="download or write the file again in one of these forms, with the suffix of that form",
        )


def refuse_unreadable(storage: Storage, key: str, wanted: str) -> None:
    """Raise DataError when a file that cannot be read as `wanted` shows why: other content, or a cut."""
    head = storage.read_range(key, 0, HEAD_BYTES)
    refuse_other_content(storage.uri(key), head, wanted)
    stat = storage.stat(key)
    size_bytes = stat.size_bytes if stat else 0
    if wanted == "parquet" and head.startswith(PARQUET) and storage.read_range(key, size_bytes - 4, 4) != PARQUET:
        raise DataError(
            f"{storage.uri(key)} is cut short: it begins as Parquet and does not end so",
            expected="a whole Parquet file",
            next_command="write or copy the file again",
        )


def open_parquet(storage: Storage, key: str) -> pq.ParquetFile:
    """A Parquet file on either storage; S3 reads are ranged and buffered per column."""
    local = storage.local_path(key)
    source = pa.OSFile(str(local)) if local else pa.PythonFile(storage.open_read(key), mode="r")
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=_PARQUET_BUFFER_BYTES)


def parquet_rows(storage: Storage, key: str) -> int:
    """Rows by the footer; 0 when the footer cannot be read (reading will say why)."""
    try:
        with open_parquet(storage, key) as file:
            return int(file.metadata.num_rows)
    except (OSError, ValueError):  # pa.ArrowInvalid is a ValueError
        return 0


def _read_parquet(source: _Source) -> Iterator[RawBatch]:
    with open_parquet(source.storage, source.key) as file:
        plan = source.planner(list(file.schema_arrow.names))
        stat = source.storage.stat(source.key)
        source.rows, size_bytes = int(file.metadata.num_rows), stat.size_bytes if stat else 0
        first = told_bytes = 0
        for group in range(file.num_row_groups):  # one at a time: memory stays within a row group
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
                except pa.ArrowTypeError as error:
                    raise _no_text(f"{source.storage.uri(source.key)}: {error}") from error
                yield RawBatch(fields, rows, input_bytes=position - told_bytes)
                told_bytes = position


_Parsed = tuple[int, list[bytes | None] | Malformed]
"""The number of a line, and the values of the row that begins there, or what is malformed."""


def _batches(
    source: _Source, plan: ColumnPlan, position: Callable[[], int], rows: Iterable[_Parsed]
) -> Iterator[RawBatch]:
    """The rows of a text format in batches. `position`: bytes of the file that were read."""
    columns, numbers, bad = [list[bytes | None]() for _ in plan.inputs], list[int](), list[BadRow]()
    lines = list[int]()
    size = told_blank = told_bytes = 0
    for row, parsed in enumerate(chain(rows, [None])):
        if parsed is not None:
            line, found = parsed
            if isinstance(found, Malformed):
                bad.append(BadRow(source.key, row, found.reason, shorten(found.text), found.lines, line))
            else:
                numbers.append(row)
                lines.append(line)
                for column, value in zip(columns, found, strict=True):
                    column.append(value)
                    size += len(value) if value else 0
        is_full = len(numbers) + len(bad) >= source.num_rows or size >= _BATCH_BYTES
        if is_full or (parsed is None and (numbers or bad or told_blank != source.blank)):
            arrays = (pa.array(values, pa.large_binary()) for values in columns)
            fields = to_fields(dict(zip(plan.inputs, arrays, strict=True)), plan)
            blank, read_bytes = source.blank, position()
            yield RawBatch(
                fields,
                np.array(numbers, dtype=np.int64),
                tuple(bad),
                np.array(lines, dtype=np.int64),
                blank=blank - told_blank,
                input_bytes=read_bytes - told_bytes,
            )
            columns, numbers, bad, lines = [list[bytes | None]() for _ in plan.inputs], [], [], []
            size, told_blank, told_bytes = 0, blank, read_bytes


@contextmanager
def _open_text(source: _Source) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """UTF-8 bytes after a byte order mark, decompressed by content, and the position in the file as it is stored."""
    with source.storage.open_read(source.key) as file:
        is_gzip = file.read(len(_GZIP)) == _GZIP
        if source.key.lower().endswith(".gz") and not is_gzip and file.tell():
            raise gzip.BadGzipFile("its name ends in .gz, its content is not gzip")
        file.seek(0)
        raw = cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=file))) if is_gzip else file
        mark = raw.read(HEAD_BYTES)
        refuse_other_content(source.storage.uri(source.key), mark, "text")
        for encoding, marks in _OTHER_ENCODINGS.items():
            if mark.startswith(marks):
                raise DataError(
                    f"{source.storage.uri(source.key)} is {encoding} by its byte order mark",
                    expected="UTF-8",
                    next_command=f"iconv -f {encoding} -t UTF-8, and read that file",
                )
        if b"\0" in re.split(rb"[\r\n]", mark)[0]:
            zeros = mark[::2].count(0), mark[1::2].count(0)
            encoding = "UTF-16LE" if zeros[1] > 3 * zeros[0] else "UTF-16BE" if zeros[0] > 3 * zeros[1] else ""
            raise DataError(
                f"{source.storage.uri(source.key)} is "
                + (f"{encoding} by its zero bytes" if encoding else "no text: its first line has zero bytes"),
                expected="UTF-8",
                next_command=f"iconv -f {encoding} -t UTF-8, and read that file"
                if encoding
                else "write the file again as CSV, JSON lines or Parquet",
            )
        raw.seek(len(codecs.BOM_UTF8) if mark.startswith(codecs.BOM_UTF8) else 0)
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
        places = [names.index(column) for column in plan.inputs]

        def rows() -> Iterator[_Parsed]:
            for line, record in records:
                source.rows, source.blank = records.rows, records.blank
                if isinstance(record, Malformed):
                    yield line, record
                else:
                    yield line, [record[place].encode("utf-8", "surrogateescape") or None for place in places]
            source.rows, source.blank = records.rows, records.blank

        yield from _batches(source, plan, position, rows())


def _read_jsonl(source: _Source) -> Iterator[RawBatch]:
    with _open_text(source) as (raw, position):
        lines = _lines(raw, source)
        head = list(islice(lines, _PEEK_LINES))
        if not head:
            return
        uri = source.storage.uri(source.key)
        first = head[0][1].strip()
        records = [_parse(line) for _, line in head]
        if first.startswith(b"[") or not any(record is not None for record in records):
            if not re.match(rb'\[|\{\s*("|$)', first):
                raise DataError(
                    f"{uri} has no JSON object in its first {len(head)} lines; the first is {shorten(first[:100])!r}",
                    expected="JSON lines: one object a line",
                    next_command="rename it with the suffix of the format that it has, or write it again",
                )
            seen, program = (
                ("an array", ".[]")
                if first.startswith(b"[")
                else ("an object of several lines, or several in one line", ".")
            )
            command = "sed 's/,\\s*$//'" if first.endswith(b"},") else f"jq -c '{program}'"
            raise DataError(
                f"{uri} is JSON, {seen}",
                expected="JSON lines: one object a line, without brackets or commas around them",
                next_command=f"{command} FILE > rows.jsonl, and read that file",
            )
        names = dict.fromkeys(name for record in records for name in record or {})
        plan = source.planner(list(names))
        joined = [all(field in JOINED_FIELDS for field, name in plan.pairs if name == column) for column in plan.inputs]

        def rows() -> Iterator[_Parsed]:
            for row, (number, line) in enumerate(chain(head, lines)):
                record = _parse(line)
                if record is None:
                    yield number, Malformed(NOT_AN_OBJECT, shorten(line))
                    continue
                if isinstance(record, _Ambiguous) and not record.twice.isdisjoint(plan.inputs):
                    yield number, Malformed(KEY_TWICE, shorten(line))
                    continue
                if late := [name for name in record if name not in names]:
                    names.update(dict.fromkeys(late))
                    if source.planner(list(names)) != plan:  # it should have been read in the rows before
                        raise DataError(
                            f"{uri} has {', '.join(map(repr, late))} for the first time in row {row}",
                            expected=f"every column that is read in one of the first {_PEEK_LINES} rows",
                            next_command="write it as null in the first row",
                        )
                values = list[bytes | None]()
                for column, may_join in zip(plan.inputs, joined, strict=True):
                    try:
                        values.append(_json_bytes(record.get(column), may_join))
                    except TypeError as error:
                        kind = "a list" if isinstance(record[column], list) else "an object"
                        raise _no_text(f"{uri}: column {column!r} is {kind} in line {number}") from error
                yield number, values

        yield from _batches(source, plan, position, rows())


def _no_text(seen: str) -> DataError:
    """The error for a column of values that are neither texts nor numbers, in any format."""
    return DataError(
        seen,
        expected="text, bytes, numbers or dates; in columns of the query, title and text also lists of texts",
        next_command="write that column as text, or name another one in its place (--data.columns)",
    )


def _lines(raw: BinaryIO, source: _Source) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1.

    Of one longer than 16 MiB only the start, which is malformed: memory stays bounded.
    """
    number = 0
    while line := raw.readline(_LINE_BYTES):
        number += 1
        if len(line) == _LINE_BYTES and not line.endswith(b"\n"):
            while (rest := raw.readline(_LINE_BYTES)) and not rest.endswith(b"\n"):
                continue
            line = b"longer than 16 MiB: " + line[:_HELD_CHARACTERS]
        if line.strip():
            source.rows += 1
            yield number, line
        else:
            source.blank += 1


class _Ambiguous(dict[str, Any]):
    """An object with keys that it has more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice = {key for key, count in Counter(key for key, _ in pairs).items() if count > 1}


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    return record if len(record) == len(pairs) else _Ambiguous(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object on a line. Bytes that are not UTF-8 survive as surrogates and are judged later, per field."""
    try:
        record = _DECODER.decode(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _json_bytes(value: Any, may_join: bool) -> bytes | None:
    """The bytes of a value: numbers and truth values as Arrow's become text. Raises TypeError for lists and objects."""
    if isinstance(value, dict) or (isinstance(value, list) and not may_join):
        raise TypeError("neither text nor number")
    if isinstance(value, list):
        value = join_texts(value)
    if value is None or value == "" or value != value:  # NaN is no value
        return None
    text = value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # an escaped lone surrogate: not valid text either
        return text.encode("utf-8", "surrogatepass")
