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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import DataError, TransientError
from pipeline.data.rows import BadRow, ColumnPlan, RawBatch, shorten, to_fields
from pipeline.io.storage import ObjectStat, Storage, os_errors

MALFORMED = "malformed row"
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
_GZIP = b"\x1f\x8b"
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
    name = name.lower()
    stem = name.removesuffix(".gz")
    for suffix in _FOREIGN_COMPRESSION:
        if name.endswith(suffix) and suffix_format(stem.removesuffix(suffix)):
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
        raise DataError(
            f"{storage.uri(key)} cannot be read as {format_name}: {error}",
            expected=f"a whole {format_name} file",
            next_command="write the file again, or set --data.format",
        ) from error
    if given != source.rows:
        raise RuntimeError(f"{storage.uri(key)} has {source.rows} rows, its reader gave {given}")


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
                    raise DataError(
                        f"{source.storage.uri(source.key)}: {error}",
                        expected="text, bytes, numbers or dates",
                        next_command="write that column as text, or name another one in its place (--data.columns)",
                    ) from error
                yield RawBatch(fields, rows, input_bytes=position - told_bytes)
                told_bytes = position


_Parsed = list[bytes | None] | tuple[str | bytes, int]
"""The values of a row, or what is malformed with the number of rows in it."""


def _batches(
    source: _Source, plan: ColumnPlan, position: Callable[[], int], rows: Iterable[_Parsed]
) -> Iterator[RawBatch]:
    """The rows of a text format in batches. `position`: bytes of the file that were read."""
    columns, numbers, bad = [list[bytes | None]() for _ in plan.inputs], list[int](), list[BadRow]()
    size = told_blank = told_bytes = 0
    for row, parsed in enumerate(chain(rows, [None])):
        if isinstance(parsed, tuple):
            bad.append(BadRow(source.key, row, MALFORMED, shorten(parsed[0]), parsed[1]))
        elif parsed is not None:
            numbers.append(row)
            for column, value in zip(columns, parsed, strict=True):
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
                blank=blank - told_blank,
                input_bytes=read_bytes - told_bytes,
            )
            columns, numbers, bad = [list[bytes | None]() for _ in plan.inputs], [], []
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
        mark = raw.read(4)
        for encoding, marks in _OTHER_ENCODINGS.items():
            if mark.startswith(marks):
                raise DataError(
                    f"{source.storage.uri(source.key)} is {encoding} by its byte order mark",
                    expected="UTF-8",
                    next_command=f"iconv -f {encoding} -t UTF-8, and read that file",
                )
        raw.seek(len(codecs.BOM_UTF8) if mark.startswith(codecs.BOM_UTF8) else 0)
        yield raw, file.tell


def _read_csv(source: _Source) -> Iterator[RawBatch]:
    with _open_text(source) as (raw, position):
        text = io.TextIOWrapper(raw, encoding="utf-8", errors="surrogateescape", newline="")
        is_tsv = source.key.lower().removesuffix(".gz").endswith(".tsv")
        records = _csv_records(source, text, "\t" if is_tsv else ",")
        header, _ = next(records, ([], 0))
        if not header:
            return
        names = [name.strip() for name in header]
        plan = source.planner(names)
        places = [names.index(column) for column in plan.inputs]

        def rows() -> Iterator[_Parsed]:
            for record, lines in records:
                if len(record) == len(names):
                    yield [record[place].encode("utf-8", "surrogateescape") or None for place in places]
                else:
                    yield ",".join(record), lines

        yield from _batches(source, plan, position, rows())


def _csv_records(source: _Source, text: io.TextIOWrapper, delimiter: str) -> Iterator[tuple[list[str], int]]:
    """The header, then (fields, lines) of each record that is not blank. One with another number of fields is bad.

    Strict about quotes over several lines: text after a closing quote means that an earlier quote was never closed, and
    that the rows between became one; so does a field of which the lines look like rows. On a single line nothing was
    swallowed, and such text is taken as it is. Raises csv.Error for the header.
    """
    num_lines = num_fields = 0
    held = ""

    def noted() -> Iterator[str]:
        nonlocal num_lines, held
        for line in text:
            num_lines += 1
            if len(held) < _HELD_CHARACTERS:
                held += line
            yield line

    def malformed() -> list[str]:
        """What was read, in a number of fields that no row has."""
        return [held] if num_fields > 1 else [held, ""]

    parser = csv.reader(noted(), delimiter=delimiter, strict=True)
    while True:
        before, held = num_lines, ""
        try:
            record = next(parser, None)
        except csv.Error:  # quotes, or a field over the size limit: most likely a quote that is never closed
            if not num_fields:
                raise
            record = malformed()
            if num_lines - before == 1:
                with suppress(csv.Error):
                    record = next(csv.reader([held], delimiter=delimiter))
        if record is None:
            return
        lines = num_lines - before
        if lines > 1 and len(record) == num_fields > 1 and _swallowed_rows(record, delimiter):
            record = malformed()
        if not record:
            source.blank += 1
            continue
        if num_fields:
            source.rows += 1 if len(record) == num_fields else lines
        else:
            num_fields = len(record)
        yield record, lines


def _swallowed_rows(record: list[str], delimiter: str) -> bool:
    """Whether a field goes from a quote that opens it in one row to one in the same column of a later row.

    Then it has the end of the one and the start of the other; with commas, which texts hold too, rows between.
    """
    # In texts a comma is followed by a space, between columns it is not.
    columns = re.compile("\t" if delimiter == "\t" else ",(?! )")
    for place, value in enumerate(record):
        first, *rest = (len(columns.split(line)) for line in re.split(r"\r\n?|\n", value))
        if not rest or (first, rest[-1]) != (len(record) - place, place + 1):
            continue
        between = rest[:-1]
        if delimiter == "\t" or 2 * between.count(len(record)) > len(between):
            return True
    return False


def _read_jsonl(source: _Source) -> Iterator[RawBatch]:
    with _open_text(source) as (raw, position):
        lines = _lines(raw, source)
        head = list(islice(lines, _PEEK_LINES))
        names = dict.fromkeys(name for line in head for name in (_parse(line) or {}))
        if not head:
            return
        plan = source.planner(list(names))

        def rows() -> Iterator[_Parsed]:
            for row, line in enumerate(chain(head, lines)):
                record = _parse(line)
                if record is None:
                    yield line, 1
                    continue
                if late := [name for name in record if name not in names]:
                    names.update(dict.fromkeys(late))
                    if source.planner(list(names)) != plan:  # it should have been read in the rows before
                        raise DataError(
                            f"{source.storage.uri(source.key)} has {', '.join(map(repr, late))} for the first time "
                            f"in row {row}",
                            expected=f"every column that is read in one of the first {_PEEK_LINES} rows",
                            next_command="write it as null in the first row",
                        )
                yield [_json_bytes(record.get(column)) for column in plan.inputs]

        yield from _batches(source, plan, position, rows())


def _lines(raw: BinaryIO, source: _Source) -> Iterator[bytes]:
    """Lines that are not blank. Of one longer than 16 MiB only the start, which is malformed: memory stays bounded."""
    while line := raw.readline(_LINE_BYTES):
        if len(line) == _LINE_BYTES and not line.endswith(b"\n"):
            while (rest := raw.readline(_LINE_BYTES)) and not rest.endswith(b"\n"):
                continue
            line = b"longer than 16 MiB: " + line[:_HELD_CHARACTERS]
        if line.strip():
            source.rows += 1
            yield line
        else:
            source.blank += 1


def _parse(line: bytes) -> dict[str, Any] | None:
    """The object on a line. Bytes that are not UTF-8 survive as surrogates and are judged later, per field."""
    try:
        record = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _json_bytes(value: Any) -> bytes | None:
    if value is None or value == "":
        return None
    text = value if isinstance(value, str) else json.dumps(value)
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # an escaped lone surrogate: not valid text either
        return text.encode("utf-8", "surrogatepass")
