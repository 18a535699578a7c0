"""Score sets: what is saved comes back; anything that does not fit is refused by name."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import DataError
from pipeline.evaluate.metrics.scored_rows import SliceColumn
from pipeline.evaluate.scores import FILE, KIND, ScoreInfo, ScoreSet, VectorSample, load_scores, save_scores, to_rows
from pipeline.io.commit import commit_dir
from pipeline.io.storage import Storage, open_storage

PREFIX = "cycles/c1/evaluate/scores/x"
INFO = ScoreInfo(
    role="candidate",
    checkpoint="file:///w/checkpoints/c1/step-5",
    digest="0" * 64,
    cycle="c1",
    step=5,
    split="test",
    backend="cpu",
    device="cpu",
    precision="fp32",
    data=("f1",),
    labels=("bad", "good"),
    label_gains=(0.0, 1.0),
    rows=3,
    vector_rows=2,
    settings_hash="s",
    code_version="v",
)
UNIT = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)


def scores(**changes: Any) -> ScoreSet:
    made = ScoreSet(
        info=INFO,
        sample_id=np.array([2, 5, 9]),
        query_id=np.array([1, 1, 2]),
        label=np.array([-1, 0, 1], dtype=np.int32),
        gain=np.array([0.0, 0.1, 1.0], dtype=np.float32),
        logits=np.array([[0.0, 1.0], [3e4, -3e4], [np.nan, 0.0]], dtype=np.float32),
        slices={"käse": SliceColumn(np.array([0, -1, 1]), ("ä", "b"))},
        vectors=VectorSample(np.array([2, 9]), UNIT, UNIT[::-1].copy()),
    )
    return replace(made, **changes)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "workspace"))


def test_what_was_saved_comes_back(storage: Storage, tmp_path: Path) -> None:
    save_scores(storage, PREFIX, scores(), tmp_path)
    found = load_scores(storage, PREFIX, tmp_path / "cache")
    assert found.info == INFO
    for name in ("sample_id", "query_id", "label", "gain", "logits"):
        seen, expected = getattr(found, name), getattr(scores(), name)
        assert seen.dtype == expected.dtype
        np.testing.assert_array_equal(seen, expected)
    assert found.slices["käse"].names == ("ä", "b")
    assert found.slices["käse"].codes.tolist() == [0, -1, 1]
    assert found.vectors is not None
    np.testing.assert_array_equal(found.vectors.product, UNIT[::-1])


def test_without_vectors_and_slices(storage: Storage, tmp_path: Path) -> None:
    plain = scores(slices={}, vectors=None, info=INFO.model_copy(update={"vector_rows": 0}))
    save_scores(storage, PREFIX, plain, tmp_path)
    found = load_scores(storage, PREFIX, tmp_path / "cache")
    assert found.vectors is None and found.slices == {}


def test_probabilities() -> None:
    rows = to_rows(scores())
    np.testing.assert_allclose(rows.probabilities[0], [1 / (1 + np.e), np.e / (1 + np.e)], rtol=1e-12)
    np.testing.assert_array_equal(rows.probabilities[1], [1.0, 0.0])
    assert rows.unusable.tolist() == [False, False, True]


def test_infinite_logits_are_unusable() -> None:
    logits = np.array([[np.inf, 0.0], [-np.inf, 0.0], [np.inf, np.inf]], dtype=np.float32)
    assert to_rows(scores(logits=logits)).unusable.tolist() == [True, False, True]


def test_no_rows(storage: Storage, tmp_path: Path) -> None:
    empty = scores(
        info=INFO.model_copy(update={"rows": 0, "vector_rows": 0}),
        sample_id=np.zeros(0, dtype=np.int64),
        query_id=np.zeros(0, dtype=np.int64),
        label=np.zeros(0, dtype=np.int32),
        gain=np.zeros(0, dtype=np.float32),
        logits=np.zeros((0, 2), dtype=np.float32),
        slices={},
        vectors=None,
    )
    save_scores(storage, PREFIX, empty, tmp_path)
    assert load_scores(storage, PREFIX, tmp_path / "cache").info.rows == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_id": np.array([2, 2, 9])}, "sample_id that do not ascend"),
        ({"sample_id": np.array([2, 5])}, "2 rows of sample_id, not 3"),
        ({"gain": np.zeros(4, dtype=np.float32)}, "4 rows of gain"),
        ({"logits": np.zeros((3, 3), dtype=np.float32)}, "over 3 classes, not 2"),
        ({"label": np.array([0, 1, 2], dtype=np.int32)}, "label outside -1 to 1"),
        ({"slices": {"s": SliceColumn(np.array([0, 0, 2]), ("a", "b"))}}, r"slice\.s outside -1 to 1"),
        ({"vectors": None}, r"no tensor vector\.product"),
        ({"vectors": VectorSample(np.array([2, 9]), UNIT, UNIT[:1])}, r"1 rows of vector\.product, not 2"),
        ({"vectors": VectorSample(np.array([2, 7]), UNIT, UNIT)}, "rows it does not have"),
        ({"vectors": VectorSample(np.array([9, 2]), UNIT, UNIT)}, r"vector\.sample_id that do not ascend"),
    ],
)
def test_arrays_that_disagree_are_not_saved(
    storage: Storage, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        save_scores(storage, PREFIX, scores(**changes), tmp_path)
    assert not list(storage.list(PREFIX))


Tensors = dict[str, np.ndarray[Any, Any]]


def _without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def _with(**changes: np.ndarray[Any, Any]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("logits"), "has no tensor logits"),
        (_without("slice.käse"), "has no tensor slice.käse"),
        (_without("vector.query"), "has no tensor vector.query"),
        (_with(more=np.zeros(1)), "a tensor more that its manifest does not name"),
        (_with(label=np.zeros(3, dtype=np.int64)), "label as int64 of 1 dimensions"),
        (_with(logits=np.zeros(6, dtype=np.float32)), "logits as float32 of 1 dimensions"),
        (_with(label=np.full(3, 7, dtype=np.int32)), "label outside"),
    ],
)
def test_files_that_do_not_fit_are_refused_by_name(
    storage: Storage, tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    manifest = save_scores(storage, PREFIX, scores(), tmp_path)
    folder = tmp_path / "workspace" / PREFIX
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)
    commit_dir(storage, folder, PREFIX, kind=KIND, fields=manifest.fields)
    with pytest.raises(DataError, match=message):
        load_scores(storage, PREFIX, tmp_path / "cache")


def test_flipped_bytes_and_other_folders_are_refused(storage: Storage, tmp_path: Path) -> None:
    manifest = save_scores(storage, PREFIX, scores(), tmp_path)
    folder = tmp_path / "workspace" / PREFIX
    commit_dir(storage, folder, PREFIX, kind="tokens", fields=manifest.fields)
    with pytest.raises(DataError, match="holds no scores"):
        load_scores(storage, PREFIX, tmp_path / "cache")
    commit_dir(storage, folder, PREFIX, kind=KIND, fields={**manifest.fields, "slices": {"käse": 3}})
    with pytest.raises(DataError, match=r"slices\.käse"):
        load_scores(storage, PREFIX, tmp_path / "cache")
    commit_dir(storage, folder, PREFIX, kind=KIND, fields=manifest.fields)
    data = bytearray((folder / FILE).read_bytes())
    data[-3] ^= 1
    (folder / FILE).write_bytes(data)
    with pytest.raises(DataError, match="xxh3_128"):
        load_scores(storage, PREFIX, tmp_path / "cache")
    with pytest.raises(DataError, match="holds no scores"):
        load_scores(storage, "cycles/c1/evaluate/scores/none", tmp_path / "cache")
