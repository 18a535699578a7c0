"""Arrays of an evaluation on disk: read as written, or named when they cannot be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.core.manifest import Manifest
from pipeline.evaluate import scores
from pipeline.evaluate.scores import ARRAYS_FILE, load_arrays, save_arrays
from pipeline.io.commit import commit_dir
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


def test_two_cycles_that_save_at_once_have_each_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the scratch folder of the machine."""
    storage, scratch = open_storage(str(tmp_path / "workspace")), tmp_path / "scratch"
    commit, others = commit_dir, [np.full(3, 2), np.full(3, 3)]

    def late(*args: Any, **more: Any) -> Manifest:
        while others:
            save_arrays(storage, f"cycles/{len(others)}/x", "retrieval", {"items": others.pop()}, scratch)
        return commit(*args, **more)

    monkeypatch.setattr(scores, commit_dir.__name__, late)
    save_arrays(storage, "cycles/0/x", "retrieval", {"items": np.full(3, 1)}, scratch)
    found = [load_arrays(storage, f"cycles/{n}/x", "retrieval", tmp_path / "cache")[0]["items"][0] for n in (0, 1, 2)]
    assert found == [1, 2, 3]
    assert not list((scratch / "arrays").iterdir())


def test_what_another_cycle_has_saved_stays(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "workspace"))
    save_arrays(storage, "baselines/x", "boosting", ARRAYS, tmp_path / "scratch")
    before = storage.stat("baselines/x/MANIFEST.json")
    save_arrays(storage, "baselines/x", "boosting", ARRAYS, tmp_path / "scratch")
    assert storage.stat("baselines/x/MANIFEST.json") == before


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
