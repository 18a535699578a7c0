"""Rows on their way from a reader to a worker: batches, bad rows, and chunks of bounded size."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.core.arrays import Int64s

CHUNK_BYTES = 64 * 2**20
"""A chunk ends at this many bytes of columns even when it has fewer rows than asked for."""
_BATCH_ROWS = 4096
_CONTENT_CHARACTERS = 500


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used. `count` > 1 when one defect swallowed several lines (an unclosed CSV quote)."""

    file: str
    row: int
    reason: str
    content: str
    count: int = 1


@dataclass(frozen=True)
class RawBatch:
    """Some rows of one file: field columns of equal length N (text as large_binary), row numbers [N], and bad rows.

    Beside them, since the batch before: `blank` lines, rows `left_out` because they are not asked for (another locale),
    and the bytes of the file that were read.
    """

    columns: pa.RecordBatch
    rows: Int64s
    bad: tuple[BadRow, ...] = ()
    blank: int = 0
    left_out: int = 0
    input_bytes: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.rows) + len(self.bad)


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file: the unit of parallel work and of resume."""

    file: str
    columns: bytes
    rows: Int64s
    bad: tuple[BadRow, ...]

    @property
    def num_rows(self) -> int:
        """Good and bad ones, with all that a bad one swallowed."""
        return len(self.rows) + sum(row.count for row in self.bad)

    def table(self) -> pa.Table:
        return pa.ipc.open_stream(self.columns).read_all()


def batch_rows(rows_per_chunk: int) -> int:
    """Rows a reader should yield at a time: a whole number of batches fills a chunk (nearly) exactly."""
    return rows_per_chunk // -(-rows_per_chunk // _BATCH_ROWS)


def cut_chunks(file: str, batches: Iterable[RawBatch], rows_per_chunk: int) -> Iterator[Chunk]:
    """Group the batches of one file into chunks of at most `rows_per_chunk` rows and about CHUNK_BYTES.

    Where a chunk ends depends on the file and the settings only, which makes chunk-level resume exact.
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


def _chunk(file: str, held: list[RawBatch]) -> Chunk:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, held[0].columns.schema) as writer:
        for batch in held:
            writer.write_batch(batch.columns)
    return Chunk(
        file,
        sink.getvalue().to_pybytes(),
        np.concatenate([batch.rows for batch in held]),
        tuple(bad for batch in held for bad in batch.bad),
    )


def shorten(content: str | bytes) -> str:
    """Row content for the quarantine file: valid text of a few hundred characters."""
    text = content.decode("utf-8", "backslashreplace") if isinstance(content, bytes) else content
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _CONTENT_CHARACTERS else text[:_CONTENT_CHARACTERS] + "..."
