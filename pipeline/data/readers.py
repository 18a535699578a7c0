"""Readers of one file each: Parquet, CSV and JSON lines, streamed in batches of bounded size.

CSV and JSON lines go through Python's own parsers, because those survive row by row what real exports contain (invalid
bytes, broken lines); pyarrow's fail the whole block.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import DataError
from pipeline.data.columns import ColumnPlan, to_fields
from pipeline.data.rows import BadRow, RawBatch, shorten
from pipeline.io.storage import Storage

MALFORMED = "malformed row"
_PARQUET_BUFFER_BYTES = 8 * 2**20
_BATCH_BYTES = 8 * 2**20
_LINE_BYTES = 16 * 2**20
_PEEK_LINES = 1000

Planner = Callable[[list[str]], ColumnPlan]
"""Given the columns of the file, which to read (raises DataError)."""


def suffix_format(name: str) -> str | None:
    """`parquet`, `csv` or `jsonl` by file name; None for anything else."""
    name = name.lower().removesuffix(".gz")
    for format_name, suffixes in {
        "parquet": (".parquet", ".pq"),
        "csv": (".csv", ".tsv"),
        "jsonl": (".jsonl", ".ndjson", ".json"),
    }.items():
        if name.endswith(suffixes):
            return format_name
    return None


def read_file(storage: Storage, key: str, format_name: str, planner: Planner, num_rows: int) -> Iterator[RawBatch]:
    """The rows of one file, at most `num_rows` and about 8 MiB at a time, in file order.

    Raises DataError when the file cannot be read at all or lacks a column.
    """
    readers = {"parquet": _read_parquet, "csv": _read_csv, "jsonl": _read_jsonl}
    try:
        yield from readers[format_name](storage, key, planner, num_rows)
    except (pa.ArrowException, zlib.error, OSError, EOFError) as error:
        raise DataError(
            f"{storage.uri(key)} cannot be read as {format_name}: {error}",
            expected=f"a whole {format_name} file",
            next_command="write the file again, or set --data.format",
        ) from error


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


def _read_parquet(storage: Storage, key: str, planner: Planner, num_rows: int) -> Iterator[RawBatch]:
    with open_parquet(storage, key) as file:
        plan = planner(list(file.schema_arrow.names))
        first = 0
        for group in range(file.num_row_groups):  # one at a time: memory stays within a row group
            info = file.metadata.row_group(group)
            row_bytes = max(1, info.total_byte_size // max(1, info.num_rows))
            size = max(1, min(num_rows, _BATCH_BYTES // row_bytes))
            for batch in file.iter_batches(size, row_groups=[group], columns=plan.inputs, use_threads=False):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                yield RawBatch(to_fields(columns, plan), np.arange(first, first + len(batch), dtype=np.int64))
                first += len(batch)


class _Builder:
    """Collects parsed rows of a text format into batches."""

    def __init__(self, file: str, plan: ColumnPlan, num_rows: int) -> None:
        self.file, self.plan, self.num_rows = file, plan, num_rows
        self._reset()

    def _reset(self) -> None:
        self.values: list[list[bytes | None]] = [[] for _ in self.plan.inputs]
        self.rows: list[int] = []
        self.bad: list[BadRow] = []
        self.size = 0

    def add(self, row: int, values: list[bytes | None]) -> None:
        self.rows.append(row)
        for column, value in zip(self.values, values, strict=True):
            column.append(value)
            self.size += len(value) if value else 0

    def add_bad(self, row: int, content: str | bytes, count: int = 1) -> None:
        self.bad.append(BadRow(self.file, row, MALFORMED, shorten(content), count))

    @property
    def is_full(self) -> bool:
        return len(self.rows) + len(self.bad) >= self.num_rows or self.size >= _BATCH_BYTES

    def take(self) -> RawBatch:
        columns = {
            name: pa.array(values, pa.large_binary())
            for name, values in zip(self.plan.inputs, self.values, strict=True)
        }
        batch = RawBatch(to_fields(columns, self.plan), np.array(self.rows, dtype=np.int64), tuple(self.bad))
        self._reset()
        return batch


def _open_bytes(storage: Storage, key: str) -> BinaryIO:
    file = storage.open_read(key)
    return gzip.GzipFile(fileobj=file) if key.lower().endswith(".gz") else file  # type: ignore[return-value]


def _read_csv(storage: Storage, key: str, planner: Planner, num_rows: int) -> Iterator[RawBatch]:
    with _open_bytes(storage, key) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        parser = csv.reader(text, delimiter="\t" if ".tsv" in key.lower() else ",")
        header = next(parser, None)
        if header is None:
            return
        builder = _Builder(key, plan := planner([name.strip() for name in header]), num_rows)
        places = [[name.strip() for name in header].index(column) for column in plan.inputs]
        row, line = -1, parser.line_num
        while True:
            try:
                record = next(parser)
            except StopIteration:
                break
            except csv.Error as error:  # a field over the size limit: most likely an unclosed quote
                record = [str(error)]
            lines, line = parser.line_num - line, parser.line_num
            if not record:
                continue
            row += 1
            if len(record) == len(header):
                builder.add(row, [record[place].encode("utf-8", "surrogateescape") or None for place in places])
            else:
                builder.add_bad(row, ",".join(record), max(1, lines))
            if builder.is_full:
                yield builder.take()
        if builder.rows or builder.bad:
            yield builder.take()


def _read_jsonl(storage: Storage, key: str, planner: Planner, num_rows: int) -> Iterator[RawBatch]:
    with _open_bytes(storage, key) as raw:
        lines = _lines(raw)
        head = [line for line, _ in zip(lines, range(_PEEK_LINES), strict=False)]
        names = dict.fromkeys(name for line in head for name in (_parse(line) or {}))
        if not head:
            return
        builder = _Builder(key, plan := planner(list(names)), num_rows)
        row = -1
        for source in (head, lines):
            for line in source:
                row += 1
                record = _parse(line)
                if record is None:
                    builder.add_bad(row, line)
                else:
                    builder.add(row, [_json_bytes(record.get(column)) for column in plan.inputs])
                if builder.is_full:
                    yield builder.take()
        if builder.rows or builder.bad:
            yield builder.take()


def _lines(raw: BinaryIO) -> Iterator[bytes]:
    """Lines that are not blank; one longer than 16 MiB is cut into malformed pieces, so that memory stays bounded."""
    while line := raw.readline(_LINE_BYTES):
        if line.strip():
            yield line


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
