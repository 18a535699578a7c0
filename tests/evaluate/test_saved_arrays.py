"""Arrays of an evaluation on disk: read as written, or named when they cannot be."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.evaluate.scores import ARRAYS_FILE, load_arrays, save_arrays
from pipeline.io.storage import open_storage

ARRAYS = {"items": np.arange(6).reshape(2, 3).T, "scores": np.array([0.5, np.nan])}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "workspace"))
    for _ in range(2):  # the second time over the first
        save_arrays(storage, "baselines/x/bm25-1", "retrieval", ARRAYS, tmp_path / "scratch", {"threshold": 0.25})
    arrays, fields = load_arrays(storage, "baselines/x/bm25-1", "retrieval", tmp_path / "cache")
    assert arrays.keys() == ARRAYS.keys() and fields == {"threshold": 0.25}
    for name, values in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], values)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "workspace"))
    with pytest.raises(DataError, match="holds no retrieval figures"):
        load_arrays(storage, "a", "retrieval", tmp_path)
    save_arrays(storage, "a", "retrieval", ARRAYS, tmp_path / "scratch")
    with pytest.raises(DataError, match="of kind retrieval"):
        load_arrays(storage, "a", "boosting", tmp_path)
    path = tmp_path / "workspace" / "a" / ARRAYS_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(DataError, match=r"xxh3_128"):
        load_arrays(storage, "a", "retrieval", tmp_path)
