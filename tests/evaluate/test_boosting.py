"""Gradient boosting on numeric features: what it learns, from which rows, and when it cannot."""

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import Preempted
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.evaluate.baselines import Boosting, fit, to_rows
from tests.evaluate.holdouts import holdout_of
from tests.train.rows import BUCKETS, PAD, token_set_info, write_shard

INFO = token_set_info("flat")


def rows_of(folder: Path, sizes: tuple[int, int], features: int = 2, labels: int = 2, seed: int = 1) -> TokenRows:
    """The first feature is the label with some noise; sample ids fall, so that their order is not that of the rows."""
    path = folder / f"{seed}.safetensors"
    stream, shard = np.random.default_rng(seed), write_shard(path, sizes, first_id=1)
    tensors = load_file(path)
    for bucket in (0, 1) if tensors else ():
        label = stream.integers(0, labels, sizes[bucket])
        numeric = stream.normal(size=(sizes[bucket], features)).astype(np.float32)
        numeric[:, :1] = label[:, None] + 0.3 * numeric[:, :1]
        label[::7] = -1
        ids = sum(sizes) + 1 - tensors[f"b{bucket}.sample_id"]
        tensors |= {
            f"b{bucket}.label": label.astype(np.int16),
            f"b{bucket}.gain": np.maximum(label, 0).astype(np.float32),
            f"b{bucket}.numeric": numeric,
            f"b{bucket}.sample_id": ids,
            f"b{bucket}.query_id": ids // 5,
        }
    save_file(tensors, path)
    return TokenRows([shard], BUCKETS, PAD)


def fitted(rows: TokenRows, max_rows: int = 1000, num_labels: int = 2) -> Boosting:
    found = fit(rows, num_labels, max_rows, StopSignal())
    assert isinstance(found, Boosting)
    return found


def test_it_learns_the_labels_from_the_features(tmp_path: Path) -> None:
    model = fitted(rows_of(tmp_path, (150, 60)))
    arrays = model.score(holdout_of(rows_of(tmp_path, (40, 30), seed=2)), StopSignal())
    assert arrays["sample_id"].tolist() == list(range(1, 71))
    rows = to_rows(arrays, INFO)
    labelled = rows.label >= 0
    right = rows.probabilities[labelled].argmax(axis=1) == rows.label[labelled]
    assert right.mean() > 0.9
    assert rows.query_id.tolist() == [number // 5 for number in range(1, 71)]
    assert rows.gain.tolist() == np.maximum(rows.label, 0).tolist()


def test_a_label_that_never_occurs_has_no_probability(tmp_path: Path) -> None:
    model = fitted(rows_of(tmp_path, (90, 30)), num_labels=4)
    table = model.score(holdout_of(rows_of(tmp_path, (9, 4), seed=2)), StopSignal())["probabilities"]
    assert table.shape == (13, 4) and not table[:, 2:].any()
    np.testing.assert_allclose(table.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "features", "labels", "reason"),
    [
        ((60, 20), 0, 2, "no numeric feature"),
        ((60, 20), 2, 1, "fewer than two labels"),
        ((0, 0), 2, 2, "the train split has no rows"),
    ],
)
def test_when_there_is_nothing_to_fit(
    tmp_path: Path, sizes: tuple[int, int], features: int, labels: int, reason: str
) -> None:
    found = fit(rows_of(tmp_path, sizes, features, labels), 2, 100, StopSignal())
    assert isinstance(found, str) and reason in found


def test_without_scikit_learn_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    found = fit(rows_of(tmp_path, (60, 20)), 2, 100, StopSignal())
    assert isinstance(found, str) and "pip install 'scikit-learn>=1.7'" in found


def test_a_stop_ends_it(tmp_path: Path) -> None:
    train, stop = rows_of(tmp_path, (60, 20)), StopSignal()
    model = fitted(train)
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="gradient boosting"):
        fit(train, 2, 100, stop)
    with pytest.raises(Preempted, match="scoring with gradient boosting"):
        model.score(holdout_of(train), stop)
