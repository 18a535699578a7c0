"""Plans that spread a model over ranks train it as one process does, leave the same files, and go on from any."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.kit.ranks import run_ranks
from tests.train.spread import HALF, Figures

FIGURE, WEIGHT = 1e-6, 1e-5
MESHES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {"shard_degree": 1}},
    2: {"state 2": {"shard": "state", "shard_degree": 2}},
    4: {"hybrid 2x2": {"shard_degree": 2}, "tensor 2x2": {"shard_degree": 2, "tensor_degree": 2}},
}
"""By the number of ranks: flat vectors, flat vectors with state in slices, modules."""
AGAIN = {"recompute": "units", "offload": True}
MORE: dict[int, dict[str, dict[str, Any]]] = {
    1: MESHES[1],
    2: {"shards": {"shard_degree": 0}, "tensor": {"tensor_degree": 2}, "again": {"shard_degree": 2, **AGAIN}},
    4: {"all": {"shard_degree": 0}, "tensor 4": {"tensor_degree": 4}},
    8: {"all and again": {"shard_degree": 2, "tensor_degree": 2, **AGAIN}},
}
PEERS: dict[int, dict[str, dict[str, Any]]] = {
    1: MESHES[1],
    2: {"peers": {"tensor_degree": 2}, "peers again": {"tensor_degree": 2, **AGAIN}},
}


def difference(ours: Path, theirs: Path) -> float:
    """Largest, of all tensors of two files, of values above 1 by their size; infinity where the names differ."""
    left, right = load_file(ours), load_file(theirs)
    if left.keys() != right.keys():
        return float("inf")
    apart = ((left[name] - right[name]).abs() / right[name].abs().clamp(min=1.0) for name in left)
    return max(float(one.max()) for one in apart)


def check_alike(ours: Figures, theirs: Figures) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one["step"] == other["step"]
        assert one["loss"] == pytest.approx(other["loss"], rel=FIGURE)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=FIGURE)


@pytest.mark.stage
@pytest.mark.parametrize(
    ("meshes", "dropout"),
    [
        (MESHES, 0.0),
        pytest.param(MORE, 0.0, marks=pytest.mark.thorough),
        pytest.param(PEERS, 0.1, marks=pytest.mark.thorough),
    ],
)
def test_every_mesh_trains_as_one_process_and_goes_on_from_every_other(
    tmp_path: Path, meshes: dict[int, dict[str, dict[str, Any]]], dropout: float
) -> None:
    """Peers by tensor parallelism draw the dropout of one rank."""
    names = [name for cases in meshes.values() for name in cases]
    runs: dict[str, tuple[dict[str, Any], ...]] = {}
    for ranks, cases in meshes.items():
        case, folder = "tests.train.spread:to_the_end", tmp_path / f"first-{ranks}"
        by_rank = run_ranks(case, ranks, folder, str(tmp_path), json.dumps(cases), str(dropout))
        runs |= dict(zip(cases, zip(*by_rank, strict=True), strict=True))
    expected = runs["one"][0]
    for name, found in runs.items():
        for rank in found:
            check_alike(rank["figures"], expected["figures"])
            assert rank["holdout"] == pytest.approx(expected["holdout"], rel=1e-4)
        for kind in ("weights", "optimizer"):
            assert difference(tmp_path / f"{name}-end.{kind}", tmp_path / f"one-end.{kind}") <= WEIGHT
    for ranks, cases in meshes.items():
        case, folder = "tests.train.spread:from_each", tmp_path / f"second-{ranks}"
        for resumed in run_ranks(case, ranks, folder, str(tmp_path), json.dumps(cases), str(dropout), *names):
            for name, figures in zip(cases, resumed, strict=True):
                assert figures[name] == runs[name][0]["figures"][HALF:], f"{name}: a resume is the same to the bit"
                for source in names:
                    check_alike(figures[source], expected["figures"][HALF:])
    if "hybrid 2x2" in runs:
        assert all(rank["state"] <= 0.6 * expected["state"] for rank in runs["hybrid 2x2"])


@pytest.mark.stage
def test_a_rank_that_does_not_come_ends_all_in_time(tmp_path: Path) -> None:
    """Or this test would not end. Seven seconds, as all have to come to the step before within them."""
    run_ranks("tests.train.spread:hung", 2, tmp_path, str(tmp_path), "7", code=75)
    assert float((tmp_path / "waited-1").read_text()) > 6
