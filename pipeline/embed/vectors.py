"""Storage of vectors: data types, the files of a part, and reading committed vectors part by part.

The same rows give the same bytes. `open_vectors` gives programs one memory-mapped matrix and the id of each row.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.lib import format as npy
from pydantic import Field, JsonValue, ValidationError

from pipeline.core.arrays import Float32s, Int64s, UInt64s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.core.progress import progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.readers import open_parquet
from pipeline.io import atomic
from pipeline.io.atomic import exclusive, make_dirs, staging_dir
from pipeline.io.commit import check_sizes, commit_dir, read_manifest
from pipeline.io.paths import cache_folder, user_path
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, join_key, open_parent, open_storage, os_errors

IdType = Literal["int64", "uint64", "string"]
ID_TYPES: dict[IdType, pa.DataType] = {"int64": pa.int64(), "uint64": pa.uint64(), "string": pa.string()}
Stored = npt.NDArray[Any]
ROWS_PER_GROUP = 8192
"""Vectors per Parquet row group, the smallest unit that is read."""
_DTYPES: dict[str, np.dtype[Any]] = {
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "int8": np.dtype(np.int8),
}
_INT8_MAX = 127.0
_METADATA = "trnpipe."
KEYS = ("id", "id_hash", "text_hash")
"""Columns that identify a row and its text."""


class VectorLayout(Record):
    """The file layout of a part."""

    format: Literal["parquet", "npy"]
    dtype: Literal["fp16", "fp32", "int8"]
    dim: int
    id_type: IdType

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(_DTYPES[self.dtype])

    @property
    def has_scale(self) -> bool:
        return self.dtype == "int8"

    def names(self, stem: str) -> tuple[str, ...]:
        """Return the file names of a part. The last one has the ids and is written last."""
        return (f"{stem}.npy", f"{stem}.ids.parquet") if self.format == "npy" else (f"{stem}.parquet",)

    def columns(self, *, with_vectors: bool) -> pa.Schema:
        """Return the schema of a Parquet file: id, vector [dim], scale of int8 vectors, hashes of id and text."""
        vector = pa.list_(pa.from_numpy_dtype(self.numpy_dtype), self.dim)
        fields = [
            pa.field("id", ID_TYPES[self.id_type], nullable=False),
            *([pa.field("vector", vector, nullable=False)] if with_vectors else []),
            *([pa.field("scale", pa.float32(), nullable=False)] if self.has_scale else []),
            pa.field("id_hash", pa.uint64(), nullable=False),
            pa.field("text_hash", pa.uint64(), nullable=False),
        ]
        return pa.schema(fields)


def check_dimensions(setting: str, dimensions: int, width: int) -> None:
    """Raise ConfigError if the vectors of a model have fewer dimensions than requested."""
    if dimensions > width:
        raise ConfigError(
            f"{setting} is {dimensions}, but the model's vectors have {width}",
            expected=f"at most {width}",
            next_command="--embed.output.dimensions 0 for all" if setting.startswith("embed") else "",
        )


def shorten_vectors(vectors: Float32s, dim: int) -> Float32s:
    """Return the leading dimensions [N, dim] of vectors [N, D], normalised again. `vectors` itself if dim is D."""
    if dim == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dim]
    length = np.sqrt((kept.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    shortened: Float32s = (kept / np.maximum(length, 1e-12)).astype(np.float32)
    return shortened


def to_stored(vectors: Float32s, layout: VectorLayout) -> tuple[Stored, Float32s | None]:
    """Convert fp32 vectors [N, dim] for storage. Returns (values, scale [N] of int8 values or None)."""
    if layout.dtype == "fp32":
        return vectors.copy(), None
    if layout.dtype == "fp16":
        return vectors.astype(np.float16), None
    scale = (np.abs(vectors).max(axis=1) / _INT8_MAX).astype(np.float32)
    scale[scale == 0] = 1.0
    return np.rint(vectors / scale[:, None]).astype(np.int8), scale


def from_stored(vectors: Stored, scale: Float32s | None) -> Float32s:
    """Convert stored vectors back to fp32 [N, dim]."""
    values = vectors.astype(np.float32)
    return values if scale is None else values * scale[:, None]


def part_files(
    layout: VectorLayout,
    stem: str,
    rows: pa.Table,
    vectors: Stored,
    scale: Float32s | None,
    metadata: Mapping[str, str],
) -> dict[str, bytes]:
    """Return the files of a part by name, in the order in which they must be written.

    `rows` has the columns KEYS of N rows. `vectors` [N, dim] and `scale` [N] (for int8) are in the stored data type.
    """
    names = layout.names(stem)
    files: dict[str, bytes] = {}
    if layout.format == "npy":
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(vectors))
        files[names[0]] = stream.getvalue()
    schema = layout.columns(with_vectors=layout.format == "parquet")
    schema = schema.with_metadata({_METADATA + name: value for name, value in sorted(metadata.items())})
    columns: dict[str, Any] = {**{name: rows[name] for name in KEYS}, "scale": scale}
    if layout.format == "parquet":
        flat = pa.array(np.ascontiguousarray(vectors).reshape(-1))
        columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, type=schema.field("vector").type)
    table = pa.table([columns[name] for name in schema.names], schema=schema)
    sink = pa.BufferOutputStream()
    # Vectors do not compress (8 % with zstd, for ten times the time), and their statistics would be useless.
    with pq.ParquetWriter(sink, schema, compression="none", use_dictionary=False, write_statistics=["id"]) as writer:
        writer.write_table(table, row_group_size=ROWS_PER_GROUP)
    files[names[-1]] = sink.getvalue().to_pybytes()
    return files


def metadata_of(schema: pa.Schema) -> dict[str, str]:
    """Return the metadata that was passed to `part_files`."""
    metadata = {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}
    return {name.removeprefix(_METADATA): value for name, value in metadata.items() if name.startswith(_METADATA)}


# Committed vectors.

KIND = "embeddings"
QUARANTINE = "quarantine.jsonl"


def vectors_prefix(cycle: str) -> str:
    """Return the prefix of the parts of a cycle."""
    return f"embeddings/{cycle}"


class ModelRef(Record):
    """The checkpoint that the vectors are computed with."""

    name: str = Field(description="Name of the model in the registry")
    place: str = Field(description="Prefix in the workspace, or the URI of a checkpoint outside it")
    digest: str = Field(description="Digest of its manifest, which identifies its content")


class PartCounts(Record):
    """Row counts of one part, or of all parts."""

    read: int = Field(0, description="Rows that passed the filter")
    bad: int = Field(0, description="Rows without a usable id or text")
    embedded: int = 0
    carried: int = Field(0, description="Vectors reused from the earlier cycle")
    known: int = Field(0, description="Rows with an id that was in the earlier cycle, with this text or another")
    truncated: int = Field(0, description="Embedded texts that were cut to the maximum length")
    chunked: int = Field(0, description="Embedded texts that were split into chunks")
    tokens: int = Field(0, description="Tokens of embedded texts, without padding")

    def __add__(self, other: "PartCounts") -> "PartCounts":
        other_counts = other.model_dump()
        return PartCounts(**{name: count + other_counts[name] for name, count in self.model_dump().items()})


class PartInfo(Record):
    """One part: its files (the last one has the ids), rows and range of ids."""

    files: tuple[str, ...]
    rows: int
    id_min: str
    id_max: str


class VectorSetInfo(Record):
    """The fields of the manifest."""

    cycle: str
    generation: int = Field(description="One more than the generation of the newest vectors at planning time")
    plan: str = Field(description="Fingerprint of cycles/<cycle>/embed/plan.json")
    catalogue: str = Field(description="Fingerprint of the catalogue's files, rows and columns")
    model: ModelRef
    made_by: dict[str, JsonValue] = Field(description="Everything that determines a vector besides its text")
    layout: VectorLayout
    rows: int
    counts: PartCounts
    reasons: dict[str, int] = Field(description="Bad rows by reason")
    carried_from: str | None = Field(description="The cycle that vectors of unchanged rows were reused from")
    deleted: int | None = Field(description="Rows of that cycle that were removed (none: no vectors were reused)")
    previous: str | None = Field(description="The cycle with the newest vectors at planning time")
    parts: tuple[PartInfo, ...]


class VectorSet:
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
        self.layout = self.info.layout

    def key(self, name: str) -> str:
        return join_key(self.prefix, name)

    def columns(self, part: int, names: Sequence[str]) -> pa.Table:
        """Read some columns of a part's Parquet file. Raises DataError."""
        with self._open(part) as file:
            if missing := set(names) - set(file.schema_arrow.names):
                raise ValueError(f"the column {min(missing)} is missing")
            return file.read(list(names), use_threads=False)

    def schema(self, part: int) -> pa.Schema:
        """Return the schema of a part's Parquet file, with its metadata."""
        with self._open(part) as file:
            return file.schema_arrow

    def hashes(self, part: int) -> tuple[UInt64s, UInt64s]:
        """Return the hashes of ids and of texts of a part, [N] each."""
        table = self.columns(part, ["id_hash", "text_hash"])
        return table["id_hash"].to_numpy(), table["text_hash"].to_numpy()

    def ids_at(self, part: int, rows: Int64s) -> list[Any]:
        ids: list[Any] = self.columns(part, ["id"])["id"].take(pa.array(rows)).to_pylist()
        return ids

    def stored(self, part: int, rows: Int64s) -> tuple[Stored, Float32s | None]:
        """Return stored vectors [M, dim] and scales [M] of the given rows of a part, in the given order."""
        vectors = np.empty((len(rows), self.layout.dim), dtype=self.layout.numpy_dtype)
        scale = np.empty(len(rows), dtype=np.float32) if self.layout.has_scale else None
        groups = rows // ROWS_PER_GROUP
        with self._open(part) as file:
            for group in np.unique(groups).tolist():
                chosen = np.flatnonzero(groups == group)
                local = rows[chosen] - group * ROWS_PER_GROUP
                names = [name for name in ("vector", "scale") if name in file.schema_arrow.names]
                table = file.read_row_group(group, columns=names, use_threads=False)
                if self.layout.format == "npy":
                    vectors[chosen] = self._npy_group(part, group)[local]
                else:
                    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["vector"].chunks]
                    vectors[chosen] = np.concatenate(chunks).reshape(len(table), -1)[local]
                if scale is not None:
                    scale[chosen] = table["scale"].to_numpy()[local]
        return vectors, scale

    def _npy_group(self, part: int, group: int) -> Stored:
        """Read the vectors of a row group from the separate matrix file of a part."""
        name = self.info.parts[part].files[0]
        with self.storage.open_read(self.key(name)) as file:
            if npy.read_magic(file) != (1, 0):
                raise ValueError(f"{name} is not a .npy file of version 1.0")
            (rows, dim), dtype = (self.info.parts[part].rows, self.layout.dim), self.layout.numpy_dtype
            header, expected = npy.read_array_header_1_0(file), ((rows, dim), False, dtype)
            if header != expected:
                raise ValueError(f"{name} is an array of {header[0]} {header[2]}, expected {expected[0]} {dtype}")
            first = group * ROWS_PER_GROUP
            count = min(ROWS_PER_GROUP, rows - first)
            file.seek(first * dim * dtype.itemsize, os.SEEK_CUR)
            data = file.read(count * dim * dtype.itemsize)
        return np.frombuffer(data, dtype=dtype).reshape(count, dim)

    def blocks(self, part: int) -> Iterator[tuple[pa.RecordBatch, Float32s]]:
        """Yield (id, id_hash and text_hash, fp32 vectors) of the rows of a part, ROWS_PER_GROUP at a time."""
        start = 0
        for batch in self.columns(part, KEYS).to_batches(ROWS_PER_GROUP):
            rows = np.arange(start, start + len(batch), dtype=np.int64)
            yield batch, from_stored(*self.stored(part, rows))
            start += len(batch)

    @contextmanager
    def _open(self, part: int) -> Iterator[pq.ParquetFile]:
        key = self.key(self.info.parts[part].files[-1])
        try:
            with open_parquet(self.storage, key) as file:
                yield file
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(
                f"{self.storage.uri(key)} cannot be read: {error}",
                expected="the part as it was committed",
                next_command="run trnpipe embed verify, then delete that folder and embed again",
            ) from error


def find_vectors(storage: Storage, cycle: str) -> VectorSet:
    """Find the complete vectors of a cycle. Raises DataError if there are none, also during an embed run."""
    prefix = vectors_prefix(cycle)
    manifest = read_manifest(storage, prefix)
    if manifest is None or manifest.kind != KIND:
        raise DataError(
            f"{storage.uri(prefix)} has no complete vectors",
            expected="the MANIFEST.json that trnpipe embed writes last",
            next_command=f"trnpipe embed --cycle {cycle}",
        )
    return VectorSet(storage, prefix, manifest)


# Vectors for programs: one memory-mapped matrix and the id of each row.

MATRIX, IDS = "vectors.npy", "ids.arrow"
_MATRIX_KIND = "handover"


@dataclass(frozen=True)
class MappedVectors:
    """Vectors of one cycle: `vectors` [N, D], fp16 or fp32 and read-only, and `ids` [N] in the same order."""

    ids: pa.ChunkedArray
    vectors: Stored
    cycle: str
    model_digest: str
    vectors_digest: str

    def __len__(self) -> int:
        return len(self.vectors)


def open_vectors(uri: str, cache: str | Path | None = None, *, stop: StopSignal | None = None) -> MappedVectors:
    """Open the vectors of `<workspace>/embeddings/<cycle>` or of a folder of `trnpipe export vectors`.

    The vectors of a cycle are first written as one matrix to `cache` (default: `vectors` in cache_folder), unless the
    cache has them. Raises DataError if there are none, ConfigError for a bad URI.
    """
    stop = stop or StopSignal()
    storage, name = open_parent(uri, retry=RetryPolicy(), stop=stop)
    manifest, folder = read_manifest(storage, name), storage.local_path(name)
    if manifest is not None and manifest.kind == KIND:
        folder = user_path(str(cache or cache_folder(os.environ) / "vectors")) / manifest.digest
        manifest = write_matrix(VectorSet(storage, name, manifest), folder, stop)
    if manifest is None or manifest.kind != _MATRIX_KIND or manifest.fields["form"] != "npy":
        raise DataError(
            f"{storage.uri(name)} has no complete vectors",
            expected="embeddings/<cycle> of a workspace, or a folder of trnpipe export vectors",
            next_command="trnpipe export vectors --out DIR",
        )
    if folder is None:
        raise ConfigError(
            f"{storage.uri(name)} is not on a local disk, so its files cannot be memory-mapped",
            expected="embeddings/<cycle> of a workspace, or a local folder",
            next_command=f"aws s3 sync {storage.uri(name)} DIR",
        )
    with os_errors("reading", folder.as_uri()):
        # An empty matrix cannot be mapped.
        matrix = np.load(folder / MATRIX, mmap_mode="r" if manifest.fields["rows"] else None, allow_pickle=False)
        ids = pa.ipc.open_file(pa.memory_map(str(folder / IDS))).read_all()["id"]
    if len(ids) != len(matrix):
        raise DataError(f"{folder} has {len(ids):,} ids but {len(matrix):,} vectors", next_command="delete that folder")
    fields = {field: str(manifest.fields[field]) for field in ("cycle", "model", "vectors")}
    return MappedVectors(ids, matrix, fields["cycle"], fields["model"], fields["vectors"])


def write_matrix(vectors: VectorSet, folder: Path, stop: StopSignal) -> Manifest:
    """Write all vectors as one matrix, fp16 or fp32, and a file of ids, unless the folder already has them.

    Memory: one row group. Raises ConfigError if the folder has other files, DataError if a part is damaged.
    """
    info, parent = vectors.info, open_storage(str(folder.parent), stop=stop)
    dtype, shape = np.dtype("<f2" if info.layout.dtype == "fp16" else "<f4"), (info.rows, info.layout.dim)
    fields: dict[str, JsonValue] = {
        "dtype": "fp16" if info.layout.dtype == "fp16" else "fp32",
        "form": "npy",
        "cycle": info.cycle,
        "vectors": vectors.manifest.digest,
        "model": info.model.digest,
        "rows": info.rows,
        "dim": info.layout.dim,
    }
    with os_errors("writing", folder.as_uri()):
        make_dirs(folder)
    with os_errors("writing", folder.as_uri()), exclusive(folder, stop):
        existing = read_manifest(parent, folder.name)
        if existing is not None and existing.kind == _MATRIX_KIND and existing.fields == fields:
            try:
                check_sizes(parent, folder.name, existing)
                return existing
            except DataError:  # one of its files was lost
                parent.delete([join_key(folder.name, MANIFEST_NAME)])
        # A killed writer may have left the matrix or the ids.
        others = {path.name for path in folder.iterdir() if not atomic.is_temp(path.name)} - {MATRIX, IDS}
        if others:
            raise ConfigError(
                f"{folder} already contains {min(others)}",
                expected="a new or empty folder, or one with the same vectors",
                next_command="set another folder with --out",
            )
        with staging_dir(folder) as staged, progress("writing vectors", info.rows, "rows") as advance:
            schema = pa.schema([vectors.layout.columns(with_vectors=False).field("id")])
            with (staged / MATRIX).open("wb") as file, pa.OSFile(str(staged / IDS), "wb") as id_file:
                header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                npy.write_array_header_1_0(file, header)
                with pa.ipc.new_file(id_file, schema) as writer:
                    for part in range(len(info.parts)):
                        for batch, values in vectors.blocks(part):
                            stop.raise_if_set("writing vectors")
                            file.write(np.ascontiguousarray(values, dtype=dtype).tobytes())
                            writer.write_batch(batch.select(["id"]).cast(schema))
                            advance(len(batch))
            return commit_dir(parent, staged, folder.name, kind=_MATRIX_KIND, fields=fields)
