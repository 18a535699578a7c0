"""Arrays and scores in the workspace: what is saved comes back; anything that does not fit is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.core.manifest import Manifest
from pipeline.evaluate import score as module
from pipeline.evaluate.score import (
    FILE,
    KIND,
    ScoreInfo,
    ScoreSet,
    load_arrays,
    load_scores,
    save_arrays,
    save_scores,
)
from pipeline.io.commit import commit_dir, require_manifest
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
    settings_hash="s",
    code_version="v",
)
ARRAYS = {"items": np.arange(6).reshape(2, 3).T, "scores": np.array([0.5, np.nan])}


def scores(slices: bool = True, **changes: Any) -> ScoreSet:
    arrays = {
        "sample_id": np.array([2, 5, 9]),
        "query_id": np.array([1, 1, 2]),
        "label": np.array([-1, 0, 1], dtype=np.int32),
        "gain": np.array([0.0, 0.1, 1.0], dtype=np.float32),
        "logits": np.array([[0.0, 1.0], [3e4, -3e4], [np.nan, 0.0]], dtype=np.float32),
        **({"slice.käse": np.array([0, -1, 1])} if slices else {}),
        **changes,
    }
    return ScoreSet(INFO, arrays, {"käse": ("ä", "b")} if slices else {})


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "workspace"))


@pytest.mark.parametrize("slices", [True, False])
def test_scores_come_back(storage: Storage, tmp_path: Path, slices: bool) -> None:
    saved = scores(slices)
    save_scores(storage, PREFIX, saved, tmp_path)
    found = load_scores(storage, PREFIX, tmp_path / "cache")
    assert (found.info, found.slices, found.arrays.keys()) == (INFO, saved.slices, saved.arrays.keys())
    for name, expected in saved.arrays.items():
        assert found.arrays[name].dtype == expected.dtype
        np.testing.assert_array_equal(found.arrays[name], expected)
    assert found.rows.slices.keys() == saved.slices.keys()


def test_the_vectors_that_an_earlier_version_stored_are_passed_over(storage: Storage, tmp_path: Path) -> None:
    save_scores(storage, PREFIX, scores(), tmp_path)
    fields = {**require_manifest(storage, PREFIX).fields, "info": {**INFO.model_dump(mode="json"), "vector_rows": 2}}
    arrays, _ = load_arrays(storage, PREFIX, KIND, tmp_path / "cache", FILE)
    arrays["vector.query"] = np.zeros((2, 4), dtype=np.float32)
    save_arrays(storage, "older", KIND, arrays, tmp_path, fields, FILE)
    found = load_scores(storage, "older", tmp_path / "cache")
    assert found.info == INFO and found.slices == {"käse": ("ä", "b")} and "vector.query" not in found.arrays


def test_probabilities() -> None:
    rows = scores().rows
    np.testing.assert_allclose(rows.probabilities[0], [1 / (1 + np.e), np.e / (1 + np.e)], rtol=1e-12)
    np.testing.assert_array_equal(rows.probabilities[1], [1.0, 0.0])
    assert rows.unusable.tolist() == [False, False, True]
    logits = np.array([[np.inf, 0.0], [-np.inf, 0.0], [np.inf, np.inf]], dtype=np.float32)
    assert scores(logits=logits).rows.unusable.tolist() == [True, False, True]


@pytest.mark.parametrize("damage", ["kind", "fields", "bytes", "none"])
def test_scores_that_do_not_fit_are_refused(storage: Storage, tmp_path: Path, damage: str) -> None:
    save_scores(storage, PREFIX, scores(), tmp_path)
    folder, manifest = tmp_path / "workspace" / PREFIX, require_manifest(storage, PREFIX)
    if damage == "kind":
        commit_dir(storage, folder, PREFIX, kind="tokens", fields=manifest.fields)
    if damage == "fields":
        commit_dir(storage, folder, PREFIX, kind=KIND, fields={**manifest.fields, "slices": {"käse": 3}})
    if damage == "bytes":
        data = bytearray((folder / FILE).read_bytes())
        data[-3] ^= 1
        (folder / FILE).write_bytes(data)
    with pytest.raises(DataError) as caught:
        load_scores(storage, PREFIX if damage != "none" else "cycles/none", tmp_path / "cache")
    assert "cannot read the scores" in caught.value.seen and "run trnpipe evaluate again" in caught.value.next_command


def test_two_cycles_that_save_at_once_have_each_their_own(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the scratch folder of the machine."""
    scratch, commit, others = tmp_path / "scratch", commit_dir, [np.full(3, 2), np.full(3, 3)]

    def late(*args: Any, **more: Any) -> Manifest:
        while others:
            save_arrays(storage, f"cycles/{len(others)}/x", "retrieval", {"items": others.pop()}, scratch)
        return commit(*args, **more)

    monkeypatch.setattr(module, commit_dir.__name__, late)
    save_arrays(storage, "cycles/0/x", "retrieval", {"items": np.full(3, 1)}, scratch)
    found = [load_arrays(storage, f"cycles/{n}/x", "retrieval", tmp_path / "cache")[0]["items"][0] for n in (0, 1, 2)]
    assert found == [1, 2, 3]
    assert not list((scratch / "arrays").iterdir())
