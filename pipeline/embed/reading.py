"""Rows of work shards, read row group by row group: memory stays within a few batches, whatever the files look like."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.core.errors import DataError
from pipeline.data.readers import open_parquet
from pipeline.data.rows import ColumnPlan, to_fields
from pipeline.embed.catalogue import Catalogue, IdType, Piece, WorkShard, not_parquet, row_bytes
from pipeline.io.storage import Storage

BATCH_BYTES = 8 * 2**20
"""Columns of one window at most, by what Parquet says of the row group."""


@dataclass(frozen=True)
class RawWindow:
    """Consecutive rows of one file on their way to a worker: fields id, title, text and filters as an Arrow stream."""

    file: str
    first_row: int
    """Number of the first row in its file."""
    columns: bytes

    def batch(self) -> pa.RecordBatch:
        return pa.ipc.open_stream(self.columns).read_next_batch()


class CatalogueReader:
    """Reads shards in rising order; going on within a row group costs nothing. Use as a context manager.

    Raises DataError when a file is not the one the work was planned with: what comes out of a change in the middle
    would be half one catalogue and half another.
    """

    def __init__(self, catalogue: Catalogue, storage: Storage, window_rows: int) -> None:
        self._catalogue, self._storage, self._window_rows = catalogue, storage, window_rows
        self._group: _OpenGroup | None = None

    def __enter__(self) -> "CatalogueReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def read(self, shard: WorkShard) -> Iterator[RawWindow]:
        """The rows of a shard, at most `window_rows` and about BATCH_BYTES at a time."""
        for piece in shard.pieces:
            yield from self._read_piece(piece)
        for file in sorted({piece.file for piece in shard.pieces}):
            self._check_same(file)

    def _read_piece(self, piece: Piece) -> Iterator[RawWindow]:
        record = self._catalogue.files[piece.file]
        first = sum(record.groups[: piece.group])
        try:
            group = self._at(piece)
            group.skip_to(piece.start)
            left = piece.rows
            while left:
                self._storage.stop.raise_if_set(f"reading {record.key}")
                batch = group.take(min(left, self._window_rows))
                start = first + piece.start + piece.rows - left
                yield RawWindow(record.key, start, _stream(as_fields(batch, group.plan, self._catalogue.id_type)))
                left -= len(batch)
        except (pa.ArrowException, OSError, StopIteration) as error:
            self._check_same(piece.file)
            raise not_parquet(self._storage.uri(record.key), error) from error

    def _at(self, piece: Piece) -> "_OpenGroup":
        """The row group of a piece, opened anew unless reading can go on in it."""
        open_group = self._group
        if open_group is not None and open_group.goes_on_to(piece):
            return open_group
        self._close()
        self._check_same(piece.file)
        key = self._catalogue.files[piece.file].key
        file = open_parquet(self._storage, key)
        plan = self._catalogue.columns.plan(file.schema_arrow.names, self._storage.uri(key))
        self._group = _OpenGroup(file, piece, plan, self._window_rows)
        return self._group

    def _close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _check_same(self, file: int) -> None:
        planned = self._catalogue.files[file]
        seen = self._storage.stat(planned.key)
        if seen is None or (seen.etag, seen.size_bytes) != (planned.etag, planned.size_bytes):
            raise DataError(
                f"{self._storage.uri(planned.key)} "
                + ("is gone" if seen is None else "was changed")
                + " since this cycle planned its work",
                expected=f"the file with etag {planned.etag} and {planned.size_bytes} bytes",
                next_command="embed the new catalogue in a cycle of its own (--cycle), or put the file back",
            )


class _OpenGroup:
    """A row group and how far it has been read."""

    def __init__(self, file: pq.ParquetFile, piece: Piece, plan: ColumnPlan, window_rows: int) -> None:
        self.plan = plan
        self._file, self._place, self._position = file, (piece.file, piece.group), 0
        size = max(1, min(window_rows, BATCH_BYTES // row_bytes(file.metadata.row_group(piece.group), plan.inputs)))
        self._batches = file.iter_batches(size, row_groups=[piece.group], columns=plan.inputs, use_threads=False)
        self._left: pa.RecordBatch | None = None

    def goes_on_to(self, piece: Piece) -> bool:
        return self._place == (piece.file, piece.group) and self._position <= piece.start

    def skip_to(self, row: int) -> None:
        while self._position < row:
            self.take(row - self._position)

    def take(self, limit: int) -> pa.RecordBatch:
        """At most `limit` rows. StopIteration when the group has fewer than its footer said."""
        batch = self._left if self._left is not None and len(self._left) else next(self._batches)
        self._left = batch.slice(limit)
        self._position += min(limit, len(batch))
        return batch.slice(0, limit)

    def close(self) -> None:
        self._file.close(force=True)


def as_fields(batch: pa.RecordBatch, plan: ColumnPlan, id_type: IdType) -> pa.RecordBatch:
    """Input columns as fields: text as large_binary, numbers as ids in their type."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    fields = to_fields(columns, plan)
    if id_type == "string":
        return fields
    ids = columns[dict(plan.pairs)["id"]]
    ids = ids.dictionary_decode() if pa.types.is_dictionary(ids.type) else ids
    return fields.set_column(fields.schema.get_field_index("id"), "id", pc.cast(ids, id_type))


def _stream(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data
