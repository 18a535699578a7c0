"""Committed vectors: what their manifest says, and reading them part by part."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy
from pydantic import Field, JsonValue, ValidationError

from pipeline.core.arrays import Float32s, Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.manifest import Manifest
from pipeline.core.record import Record
from pipeline.data.readers import open_parquet
from pipeline.embed.output import ROWS_PER_GROUP, Stored, VectorLayout, from_stored
from pipeline.embed.parts import PartCounts
from pipeline.embed.plan import ModelRef, vectors_prefix
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage, join_key

KIND = "embeddings"
QUARANTINE = "quarantine.jsonl"


class PartInfo(Record):
    """One part: its files (the last holds the ids), rows and range of ids."""

    files: tuple[str, ...]
    rows: int
    id_min: str
    id_max: str


class VectorSetInfo(Record):
    """The fields of the manifest."""

    cycle: str
    generation: int = Field(description="One more than that of the newest vectors when this cycle was planned")
    plan: str = Field(description="Fingerprint of cycles/<cycle>/embed/plan.json")
    catalogue: str = Field(description="Fingerprint of the catalogue's files, rows and columns")
    model: ModelRef
    made_by: dict[str, JsonValue] = Field(description="All that decides a vector, the text aside")
    layout: VectorLayout
    rows: int
    counts: PartCounts
    reasons: dict[str, int] = Field(description="Bad rows by reason")
    carried_from: str | None = Field(description="The cycle whose vectors of unchanged rows were taken over")
    deleted: int | None = Field(description="Rows of that cycle that are gone; none: it was not looked into")
    previous: str | None = Field(description="The newest vectors when this cycle was planned")
    parts: tuple[PartInfo, ...]


class VectorSet:
    """The vectors of one finished cycle."""

    def __init__(self, storage: Storage, prefix: str, manifest: Manifest) -> None:
        self.storage, self.prefix, self.manifest = storage, prefix, manifest
        try:
            self.info = VectorSetInfo.model_validate(manifest.fields)
        except ValidationError as error:
            raise DataError(
                f"{storage.uri(prefix)} was written by another version: {error.errors(include_url=False)[0]['loc']}",
                expected="vectors written by this version of trnpipe embed",
                next_command="trnpipe embed, in a new cycle",
            ) from error

    @property
    def layout(self) -> VectorLayout:
        return self.info.layout

    def key(self, name: str) -> str:
        return join_key(self.prefix, name)

    def columns(self, part: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        """Some columns of a part's Parquet file, ROWS_PER_GROUP rows at a time. Raises DataError."""
        with _open_ids(self.storage, self.key(self.info.parts[part].files[-1])) as file:
            yield from file.iter_batches(ROWS_PER_GROUP, columns=names, use_threads=False)

    def schema(self, part: int) -> pa.Schema:
        """The schema of a part's Parquet file, with its metadata."""
        with _open_ids(self.storage, self.key(self.info.parts[part].files[-1])) as file:
            return file.schema_arrow

    def hashes(self, part: int) -> tuple[UInt64s, UInt64s]:
        """Hashes of ids and of texts of a part, [N] each."""
        batches = list(self.columns(part, ["id_hash", "text_hash"]))
        return tuple(  # type: ignore[return-value]
            np.concatenate([np.zeros(0, dtype=np.uint64), *(batch[name].to_numpy() for batch in batches)])
            for name in ("id_hash", "text_hash")
        )

    def stored(self, part: int, rows: Int64s) -> tuple[Stored, Float32s | None]:
        """Vectors [M, dim] and scales [M] of some rows of a part, as they are stored, in the order asked for."""
        vectors = np.empty((len(rows), self.layout.dim), dtype=self.layout.numpy_dtype)
        scale = np.empty(len(rows), dtype=np.float32) if self.layout.has_scale else None
        files = self.info.parts[part].files
        groups = rows // ROWS_PER_GROUP
        with _open_ids(self.storage, self.key(files[-1])) as file, self._open_matrix(files) as matrix:
            for group in np.unique(groups).tolist():
                chosen = np.flatnonzero(groups == group)
                local = rows[chosen] - group * ROWS_PER_GROUP
                names = [name for name in ("vector", "scale") if name in file.schema_arrow.names]
                table = file.read_row_group(group, columns=names, use_threads=False)
                vectors[chosen] = (_matrix_of(table["vector"]) if matrix is None else matrix.read(group))[local]
                if scale is not None:
                    scale[chosen] = table["scale"].to_numpy()[local]
        return vectors, scale

    def blocks(self, part: int) -> Iterator[tuple[pa.RecordBatch, Float32s]]:
        """All of a part, ROWS_PER_GROUP rows at a time: id, id_hash and text_hash; and the vectors, fp32."""
        start = 0
        for batch in self.columns(part, ["id", "id_hash", "text_hash"]):
            rows = np.arange(start, start + len(batch), dtype=np.int64)
            yield batch, from_stored(*self.stored(part, rows))
            start += len(batch)

    @contextmanager
    def _open_matrix(self, files: tuple[str, ...]) -> Iterator["_Matrix | None"]:
        if self.layout.format != "npy":
            yield None
            return
        with self.storage.open_read(self.key(files[0])) as file:
            version = npy.read_magic(file)
            shape, _, dtype = npy.read_array_header_1_0(file) if version == (1, 0) else _no_matrix(files[0])
            yield _Matrix(file, file.tell(), shape, dtype)


class _Matrix:
    """Rows of an .npy file, block by block."""

    def __init__(self, file: BinaryIO, start: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        self._file, self._start, self._shape, self._dtype = file, start, shape, np.dtype(dtype)

    def read(self, group: int) -> Stored:
        first = group * ROWS_PER_GROUP
        rows = min(ROWS_PER_GROUP, self._shape[0] - first)
        row_bytes = self._shape[1] * self._dtype.itemsize
        self._file.seek(self._start + first * row_bytes)
        data = self._file.read(rows * row_bytes)
        return np.frombuffer(data, dtype=self._dtype).reshape(rows, self._shape[1])


@contextmanager
def _open_ids(storage: Storage, key: str) -> Iterator[pq.ParquetFile]:
    try:
        with open_parquet(storage, key) as file:
            yield file
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{storage.uri(key)} cannot be read: {error}",
            expected="the part as it was committed",
            next_command="trnpipe embed verify; delete that folder and embed again",
        ) from error


def _no_matrix(name: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    raise ValueError(f"{name} is no .npy file of version 1.0")


def _matrix_of(column: pa.ChunkedArray) -> Stored:
    flat = np.concatenate([chunk.flatten().to_numpy(zero_copy_only=False) for chunk in column.chunks])
    return flat.reshape(len(column), -1)


def open_vectors(storage: Storage, cycle: str) -> VectorSet:
    """The vectors of a finished cycle. Raises DataError when there are none: an unfinished run shows nothing."""
    prefix = vectors_prefix(cycle)
    manifest = read_manifest(storage, prefix)
    if manifest is None or manifest.kind != KIND:
        raise DataError(
            f"{storage.uri(prefix)} holds no finished vectors",
            expected="the MANIFEST.json that trnpipe embed writes last",
            next_command=f"trnpipe embed --cycle {cycle}",
        )
    return VectorSet(storage, prefix, manifest)


def ids_at(vectors: VectorSet, part: int, rows: Int64s) -> list[Any]:
    """The ids of some rows of a part."""
    found: list[Any] = []
    start = 0
    for batch in vectors.columns(part, ["id"]):
        inside = rows[(rows >= start) & (rows < start + len(batch))] - start
        found += batch["id"].take(inside).to_pylist()
        start += len(batch)
    return found
