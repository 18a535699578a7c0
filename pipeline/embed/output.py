"""How vectors are stored: the numbers, and the bytes of one part's files. The same rows give the same bytes."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from pipeline.core.arrays import Float32s
from pipeline.core.errors import ConfigError
from pipeline.embed.catalogue import IdType
from pipeline.embed.texts import ID_TYPES

Stored = npt.NDArray[Any]
ROWS_PER_GROUP = 8192
"""Vectors that are read together when a few of a part are wanted."""
_DTYPES: Mapping[str, np.dtype[Any]] = {
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "int8": np.dtype(np.int8),
}
_INT8_MAX = 127.0
_METADATA = "trnpipe."


class VectorLayout(BaseModel):
    """What a part's files look like."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["parquet", "npy"]
    dtype: Literal["fp16", "fp32", "int8"]
    dim: int
    id_type: IdType

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return _DTYPES[self.dtype]

    @property
    def has_scale(self) -> bool:
        return self.dtype == "int8"

    def names(self, stem: str) -> tuple[str, ...]:
        """Names of the files of one part; the last holds the ids and is written last."""
        return (f"{stem}.npy", f"{stem}.ids.parquet") if self.format == "npy" else (f"{stem}.parquet",)

    def columns(self, *, with_vectors: bool) -> pa.Schema:
        """Columns of a Parquet file: id, vector [dim], scale of int8 vectors, and the hashes for carrying over."""
        vector = pa.list_(pa.from_numpy_dtype(self.numpy_dtype), self.dim)
        fields = [
            pa.field("id", ID_TYPES[self.id_type], nullable=False),
            *([pa.field("vector", vector, nullable=False)] if with_vectors else []),
            *([pa.field("scale", pa.float32(), nullable=False)] if self.has_scale else []),
            pa.field("id_hash", pa.uint64(), nullable=False),
            pa.field("text_hash", pa.uint64(), nullable=False),
        ]
        return pa.schema(fields)


@dataclass(frozen=True)
class PartRows:
    """N finished rows: ids, stored vectors [N, dim], scales [N] (int8 only), hashes [N]."""

    ids: pa.Array
    vectors: Stored
    scale: Float32s | None
    id_hash: npt.NDArray[np.uint64]
    text_hash: npt.NDArray[np.uint64]


def check_dimensions(setting: str, dimensions: int, width: int) -> None:
    """Raises ConfigError when vectors of a model of `width` dimensions have not as many."""
    if dimensions > width:
        raise ConfigError(
            f"{setting} is {dimensions}, the model's vectors have {width}",
            expected=f"at most {width}",
            next_command="--embed.output.dimensions 0 for all" if setting.startswith("embed") else "",
        )


def shorten_vectors(vectors: Float32s, dim: int) -> Float32s:
    """Vectors [N, D] to [N, dim]: the leading dimensions, of length one again; as they are when none is left out."""
    if dim == vectors.shape[1]:
        return vectors
    kept = vectors[:, :dim]
    length = np.sqrt((kept.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
    shortened: Float32s = (kept / np.maximum(length, 1e-12)).astype(np.float32)
    return shortened


def to_stored(vectors: Float32s, layout: VectorLayout) -> tuple[Stored, Float32s | None]:
    """fp32 vectors [N, dim] as they are kept; int8 values times their scale [N] give the vector again."""
    if layout.dtype == "fp16":
        return _half(vectors), None
    if not layout.has_scale:
        return vectors.astype(layout.numpy_dtype), None
    scale = (np.abs(vectors).max(axis=1) / _INT8_MAX).astype(np.float32)
    scale[scale == 0] = 1.0
    return np.rint(vectors / scale[:, None]).astype(np.int8), scale


def _half(vectors: Float32s) -> Stored:
    """fp16 of the same shape: the bits NumPy comes to, in 40 % of its time."""
    import torch  # here, as the processes that tokenise import this module and need none of it

    halves: Stored = torch.from_numpy(vectors).to(torch.float16).numpy()
    return halves


def from_stored(vectors: Stored, scale: Float32s | None) -> Float32s:
    """The numbers that stored vectors stand for, fp32 [N, dim]."""
    values = vectors.astype(np.float32)
    return values if scale is None else values * scale[:, None]


def part_files(layout: VectorLayout, stem: str, rows: PartRows, metadata: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a part by name, in the order in which they must appear."""
    names = layout.names(stem)
    files: dict[str, bytes] = {}
    if layout.format == "npy":
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(rows.vectors))
        files[names[0]] = stream.getvalue()
    schema = layout.columns(with_vectors=layout.format == "parquet")
    schema = schema.with_metadata({_METADATA + name: value for name, value in sorted(metadata.items())})
    columns: dict[str, Any] = {"id": rows.ids, "scale": rows.scale, "id_hash": rows.id_hash}
    columns |= {"text_hash": rows.text_hash}
    if layout.format == "parquet":
        flat = pa.array(np.ascontiguousarray(rows.vectors).reshape(-1))
        columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, type=schema.field("vector").type)
    table = pa.table([columns[name] for name in schema.names], schema=schema)
    sink = pa.BufferOutputStream()
    # Vectors do not compress (8 % with zstd, for ten times the time); statistics of them would say nothing.
    with pq.ParquetWriter(sink, schema, compression="none", use_dictionary=False, write_statistics=["id"]) as writer:
        writer.write_table(table, row_group_size=ROWS_PER_GROUP)
    files[names[-1]] = sink.getvalue().to_pybytes()
    return files


def metadata_of(schema: pa.Schema) -> dict[str, str]:
    """What `part_files` was told, read back from a file."""
    found = {name.decode(): value.decode() for name, value in (schema.metadata or {}).items()}
    return {name.removeprefix(_METADATA): value for name, value in found.items() if name.startswith(_METADATA)}
