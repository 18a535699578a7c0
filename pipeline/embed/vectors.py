"""Read and write the files in which vectors are stored.

Writing the same rows always produces the same bytes. Committed vectors can be read part by part with `VectorSet`, or as
a single memory-mapped matrix with `open_vectors`, which is intended for programs that use the vectors.
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
"""Number of vectors per Parquet row group, which is the smallest unit that can be read."""
_DTYPES = {"fp16": "float16", "fp32": "float32", "int8": "int8"}
_INT8_MAX = 127.0
_METADATA = "trnpipe."
KEYS = ("id", "id_hash", "text_hash")
"""Columns that identify a row and its text."""


class VectorLayout(Record):
    """The file format and data types of a part."""

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
        """Return the file names of a part. The last file contains the ids and must be written last."""
        return (f"{stem}.npy", f"{stem}.ids.parquet") if self.format == "npy" else (f"{stem}.parquet",)

    def columns(self, *, with_vectors: bool) -> pa.Schema:
        """Return the schema of the Parquet file of a part. Only int8 vectors have a scale column."""
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
    """Raise ConfigError if a setting requests more dimensions than the vectors of the model have."""
    if dimensions > width:
        raise ConfigError(
            f"{setting} is {dimensions}, but the model's vectors have {width}",
            expected=f"at most {width}",
            next_command="--embed.output.dimensions 0 for all" if setting.startswith("embed") else "",
        )


def shorten_vectors(vectors: Float32s, dim: int) -> Float32s:
    """Truncate vectors [N, D] to their leading dimensions [N, dim] and normalise them again.

    Returns `vectors` itself if dim is D.
    """
    if dim == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dim]
    length = np.sqrt((kept.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    shortened: Float32s = (kept / np.maximum(length, 1e-12)).astype(np.float32)
    return shortened


def to_stored(vectors: Float32s, layout: VectorLayout) -> tuple[Stored, Float32s | None]:
    """Convert fp32 vectors [N, dim] to the data type of the layout.

    Returns the converted values and their scale [N], which is None unless the data type is int8.
    """
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
    """Build the files of a part. Returns their content by name, in the order in which they must be written.

    `rows` has the columns KEYS for N rows. `vectors` [N, dim] and `scale` [N] are the result of `to_stored`.
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
    # Compression is not worthwhile, because zstd makes vectors only 8 % smaller and takes ten times as long. Statistics
    # are only useful for the ids.
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
    """Identifies the checkpoint that was used to compute vectors."""

    name: str = Field(description="Name of the model in the registry")
    place: str = Field(description="Prefix of the checkpoint in the workspace, or its URI if it is elsewhere")
    digest: str = Field(description="Digest of the checkpoint's manifest, which identifies its content")


class PartCounts(Record):
    """Row counts of a single part or of all parts."""

    read: int = Field(0, description="Number of rows that passed the filter")
    bad: int = Field(0, description="Number of rows without a usable id or text")
    embedded: int = 0
    carried: int = Field(0, description="Number of vectors that were reused from the earlier cycle")
    known: int = Field(0, description="Number of rows whose id was in the earlier cycle, even if the text has changed")
    truncated: int = Field(0, description="Number of embedded texts that were truncated to the maximum length")
    chunked: int = Field(0, description="Number of embedded texts that were split into chunks")
    tokens: int = Field(0, description="Number of tokens in the embedded texts, excluding padding")

    def __add__(self, other: "PartCounts") -> "PartCounts":
        other_counts = other.model_dump()
        return PartCounts(**{name: count + other_counts[name] for name, count in self.model_dump().items()})


class PartInfo(Record):
    """The files of a part (the last one contains the ids), its number of rows, and the range of its ids."""

    files: tuple[str, ...]
    rows: int
    id_min: str
    id_max: str


class VectorSetInfo(Record):
    """The manifest fields of committed vectors."""

    cycle: str
    generation: int = Field(description="One more than the generation of the newest vectors at planning time")
    plan: str = Field(description="Fingerprint of cycles/<cycle>/embed/plan.json")
    catalogue: str = Field(description="Fingerprint of the catalogue's files, rows and columns")
    model: ModelRef
    made_by: dict[str, JsonValue] = Field(description="All inputs that affect a vector, except for its text")
    layout: VectorLayout
    rows: int
    counts: PartCounts
    reasons: dict[str, int] = Field(description="Number of bad rows by reason")
    carried_from: str | None = Field(description="The cycle whose vectors were reused for unchanged rows")
    deleted: int | None = Field(description="Number of rows removed since that cycle (none: no vectors were reused)")
    previous: str | None = Field(description="The cycle with the newest vectors at planning time")
    parts: tuple[PartInfo, ...]


class VectorSet:
    def __init__(self, storage: Storage, prefix: str, manifest: Manifest) -> None:
        self.storage, self.prefix, self.manifest = storage, prefix, manifest
        try:
            self.info = VectorSetInfo.model_validate(manifest.fields)
        except ValidationError as error:
            raise DataError(
                f"{storage.uri(prefix)} was written by a different version:"
                f" {error.errors(include_url=False)[0]['loc']}",
                expected="vectors written by this version of trnpipe embed",
                next_command="trnpipe embed, in a new cycle",
            ) from error
        self.layout = self.info.layout

    def key(self, name: str) -> str:
        return join_key(self.prefix, name)

    def columns(self, part: int, names: Sequence[str]) -> pa.Table:
        """Read the given columns from the Parquet file of a part. Raises DataError if the file is damaged."""
        with self._open(part) as file:
            if missing := set(names) - set(file.schema_arrow.names):
                raise ValueError(f"the column {min(missing)} is missing")
            return file.read(list(names), use_threads=False)

    def schema(self, part: int) -> pa.Schema:
        """Return the schema of a part's Parquet file, including the metadata."""
        with self._open(part) as file:
            return file.schema_arrow

    def hashes(self, part: int) -> tuple[UInt64s, UInt64s]:
        """Return the id hashes [N] and the text hashes [N] of a part."""
        table = self.columns(part, ["id_hash", "text_hash"])
        return table["id_hash"].to_numpy(), table["text_hash"].to_numpy()

    def ids_at(self, part: int, rows: Int64s) -> list[Any]:
        ids: list[Any] = self.columns(part, ["id"])["id"].take(pa.array(rows)).to_pylist()
        return ids

    def stored(self, part: int, rows: Int64s) -> tuple[Stored, Float32s | None]:
        """Read the vectors [M, dim] and scales [M] of the given rows of a part, in the order of `rows`."""
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
        """Read the vectors of a row group from the .npy file of a part."""
        name = self.info.parts[part].files[0]
        with self.storage.open_read(self.key(name)) as file:
            if npy.read_magic(file) != (1, 0):
                raise ValueError(f"{name} is not a version 1.0 .npy file")
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
        """Yield the KEYS columns and the fp32 vectors of a part, ROWS_PER_GROUP rows at a time."""
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
    """Find the complete vectors of a cycle. Raises DataError if there are none or if embed is still running."""
    prefix = vectors_prefix(cycle)
    manifest = read_manifest(storage, prefix)
    if manifest is None or manifest.kind != KIND:
        raise DataError(
            f"{storage.uri(prefix)} has no complete vectors",
            expected="a MANIFEST.json, which trnpipe embed writes after all parts are complete",
            next_command=f"trnpipe embed --cycle {cycle}, if that is the name of a cycle (trnjobs history)",
        )
    return VectorSet(storage, prefix, manifest)


# Provide all vectors as a single memory-mapped matrix, together with the id of each row.

MATRIX, IDS = "vectors.npy", "ids.arrow"
_MATRIX_KIND = "handover"


@dataclass(frozen=True)
class MappedVectors:
    """The vectors [N, D] of a cycle, which are read-only fp16 or fp32, and their ids [N] in the same order."""

    ids: pa.ChunkedArray
    vectors: Stored
    cycle: str
    model_digest: str
    vectors_digest: str

    def __len__(self) -> int:
        return len(self.vectors)


def open_vectors(uri: str, cache: str | Path | None = None, *, stop: StopSignal | None = None) -> MappedVectors:
    """Open the vectors in `<workspace>/embeddings/<cycle>` or in a folder written by `trnpipe export vectors`.

    The vectors of a cycle are first written to `cache` as a single matrix, unless they are already there. The default
    is the folder `vectors` in `cache_folder`. Raises DataError if there are no complete vectors, and ConfigError if the
    URI is invalid.
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
        # An empty matrix cannot be memory-mapped.
        matrix = np.load(folder / MATRIX, mmap_mode="r" if manifest.fields["rows"] else None, allow_pickle=False)
        ids = pa.ipc.open_file(pa.memory_map(str(folder / IDS))).read_all()["id"]
    if len(ids) != len(matrix):
        raise DataError(f"{folder} has {len(ids):,} ids but {len(matrix):,} vectors", next_command="delete that folder")
    fields = {field: str(manifest.fields[field]) for field in ("cycle", "model", "vectors")}
    return MappedVectors(ids, matrix, fields["cycle"], fields["model"], fields["vectors"])


def write_matrix(vectors: VectorSet, folder: Path, stop: StopSignal) -> Manifest:
    """Write all vectors to a folder as a single fp16 or fp32 matrix and a file of ids, unless they are already there.

    Only one row group is kept in memory at a time. Raises ConfigError if the folder contains other files, and DataError
    if a part is damaged.
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
            except DataError:  # one of the files is missing or truncated
                parent.delete([join_key(folder.name, MANIFEST_NAME)])
        # The matrix and the ids may be left over from a writer that was killed.
        others = {path.name for path in folder.iterdir() if not atomic.is_temp(path.name)} - {MATRIX, IDS}
        if others:
            raise ConfigError(
                f"{folder} already contains {min(others)}",
                expected="a new or empty folder, or one with the same vectors",
                next_command="set a different folder with --out",
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
