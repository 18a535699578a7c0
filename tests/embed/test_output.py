"""The numbers and the bytes of stored vectors."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.arrays import Float32s
from pipeline.embed.vectors import (
    ROWS_PER_GROUP,
    VectorLayout,
    from_stored,
    metadata_of,
    part_files,
    shorten_vectors,
    to_stored,
)


def unit(rows: int) -> Float32s:
    values: Float32s = np.random.default_rng(0).normal(size=(rows, 24)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    return values


def layout(dtype: str = "fp16", format: str = "parquet", dim: int = 24) -> VectorLayout:
    return VectorLayout.model_validate({"format": format, "dtype": dtype, "dim": dim, "id_type": "string"})


@given(st.integers(0, 40), st.integers(1, 24))
def test_leading_dimensions_have_length_one_again(rows: int, dim: int) -> None:
    short = shorten_vectors(unit(rows), dim)
    assert short.shape == (rows, dim) and short.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), np.ones(rows), atol=1e-6)
    if dim == 24:
        assert np.array_equal(short, unit(rows)), "nothing left out, nothing changed"


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp32", 0.0), ("fp16", 5e-4), ("int8", 0.5 / 127 + 1e-6)])
def test_stored_numbers_stand_for_the_vector(dtype: str, tolerance: float) -> None:
    values = unit(500)
    stored, scale = to_stored(values, layout(dtype))
    assert stored.dtype == layout(dtype).numpy_dtype
    assert np.abs(from_stored(stored, scale) - values).max() <= tolerance
    if dtype == "int8":
        assert np.abs(stored).max(axis=1).min() == 127, "every vector uses the whole range"
        assert to_stored(np.zeros((2, 24), dtype=np.float32), layout(dtype))[1] is not None


@pytest.mark.parametrize("rows", [0, 1, ROWS_PER_GROUP + 3])
@pytest.mark.parametrize("format", ["parquet", "npy"])
@pytest.mark.parametrize("dtype", ["int8", "fp16"])
def test_the_same_rows_give_the_same_bytes_and_say_what_they_are(rows: int, format: str, dtype: str) -> None:
    of, hashes = layout(dtype, format), np.arange(rows, dtype=np.uint64)
    ids = pa.array([f"p{n}" for n in range(rows)], pa.string())
    table = pa.table({"id": ids, "id_hash": hashes, "text_hash": hashes})
    told = {"model": "relevance", "checkpoint_digest": "abc"}
    files, again = (
        part_files(of, "part-00000", table, *to_stored(unit(rows), of), metadata)
        for metadata in (told, dict(reversed(told.items())))
    )
    assert files == again and tuple(files) == of.names("part-00000")
    found = pq.ParquetFile(io.BytesIO(files[of.names("part-00000")[-1]]))
    schema = found.schema_arrow
    assert found.read()["id"].to_pylist() == ids.to_pylist()
    assert metadata_of(schema) == told
    assert metadata_of(schema.with_metadata({"pandas": "{}", "trnpipe.plan": "p"})) == {"plan": "p"}
    assert metadata_of(schema.remove_metadata()) == {}
    scale = ["scale"] if dtype == "int8" else []
    assert [name for name in schema.names if name != "vector"] == ["id", *scale, "id_hash", "text_hash"]
    if format == "npy":
        assert np.load(io.BytesIO(files["part-00000.npy"])).shape == (rows, 24)
    else:
        assert schema.field("vector").type == pa.list_(pa.from_numpy_dtype(of.numpy_dtype), 24)
        assert found.num_row_groups == max(1, -(-rows // ROWS_PER_GROUP))
