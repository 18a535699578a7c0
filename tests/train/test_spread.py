"""Plans that spread a model over ranks train it as one process does, and leave the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.train import spread
from tests.train.spread import HALF, SMALL, config_of

FIGURE, WEIGHT = 1e-6, 1e-5


def difference(ours: Path, theirs: Path) -> float:
    """Largest, of all tensors of two files, of values above 1 by their size; infinity where the names differ."""
    left, right = load_file(ours), load_file(theirs)
    if left.keys() != right.keys():
        return float("inf")
    apart = ((left[name] - right[name]).abs() / right[name].abs().clamp(min=1.0) for name in left)
    return max(float(one.max()) for one in apart)


def check_alike(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one["step"] == other["step"]
        assert one["loss"] == pytest.approx(other["loss"], rel=FIGURE)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=FIGURE)


def check_plans(
    folder: Path, ranks: int, cases: dict[str, dict[str, Any]], dropout: float = 0.0
) -> list[list[dict[str, Any]]]:
    config, model = config_of({}), SMALL.model_copy(update={"dropout": dropout})
    expected = spread.alone(config, folder, model=model)
    found = run_ranks("tests.train.spread:over_ranks", ranks, folder, str(folder), json.dumps(cases), str(dropout))
    for number, name in enumerate(cases):
        for rank in found:
            whole, again = rank[number]["whole"], rank[number]["again"]
            check_alike(whole["figures"], expected.figures)
            torch.testing.assert_close(torch.tensor(whole["logits"]), torch.tensor(expected.logits), rtol=0, atol=1e-5)
            assert whole == again, f"{name}: a resume is the same to the bit"
            check_alike(rank[number]["theirs"]["figures"], expected.figures[HALF:])
            assert rank[number]["holdout"] == pytest.approx(expected.holdout, rel=1e-4)
        for kind in ("weights", "optimizer"):
            assert (folder / f"{name}-end.{kind}").read_bytes() == (folder / f"{name}-again.{kind}").read_bytes()
            assert difference(folder / f"{name}-end.{kind}", folder / f"alone-end.{kind}") <= WEIGHT
        check_alike(spread.go_on(config, folder, name, model).figures, expected.figures[HALF:])
    return found


@pytest.mark.stage
def test_four_ranks_in_hybrid_shards_and_with_tensor_peers(tmp_path: Path) -> None:
    cases = {
        "hybrid": {"plan": {"shard_degree": 2}},
        "tensor": {"plan": {"shard_degree": 2, "tensor_degree": 2}},
    }
    found = check_plans(tmp_path, 4, cases)
    sizes = [[rank[number]["state"] for rank in found] for number in range(2)]
    whole = sum(tensor.numel() for tensor in load_file(tmp_path / "alone-end.weights").values())
    assert all(size <= 0.6 * whole for size in sizes[0]) and sum(sizes[0][:2]) == whole


MESHES: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one": {"shard_degree": 1}},
    2: {"state 2": {"shard": "state", "shard_degree": 2}},
    4: {
        "all 4": {"shard_degree": 4},
        "hybrid 2x2": {"shard_degree": 2},
        "tensor 2x2": {"shard_degree": 2, "tensor_degree": 2},
    },
}
"""By the number of ranks: flat vectors, flat vectors with state in slices, modules."""


@pytest.mark.stage
@pytest.mark.parametrize("left_out", [("all 4", "hybrid 2x2"), pytest.param((), marks=pytest.mark.thorough)])
def test_a_run_goes_on_from_every_mesh_on_every_other(tmp_path: Path, left_out: tuple[str, ...]) -> None:
    meshes = {
        ranks: {name: plan for name, plan in found.items() if name not in left_out} for ranks, found in MESHES.items()
    }
    names = [name for cases in meshes.values() for name in cases]
    whole: dict[str, list[dict[str, float]]] = {}
    for ranks, cases in meshes.items():
        case, folder = "tests.train.spread:to_the_end", tmp_path / f"first-{ranks}"
        found = run_ranks(case, ranks, folder, str(tmp_path), json.dumps(cases))
        whole |= dict(zip(cases, found[0], strict=True))
    for ranks, cases in meshes.items():
        case, folder = "tests.train.spread:from_each", tmp_path / f"second-{ranks}"
        for rank in run_ranks(case, ranks, folder, str(tmp_path), json.dumps(cases), *names):
            for name, figures in zip(cases, rank, strict=True):
                assert figures[name] == whole[name], f"{name}: a resume is the same to the bit"
                for source in names:
                    check_alike(figures[source], whole["one"])


@pytest.mark.thorough
def test_two_ranks(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        "shards": {"plan": {"shard_degree": 0}},
        "replicas": {"plan": {"shard_degree": 1}},
        "tensor": {"plan": {"tensor_degree": 2}},
        "recompute": {"plan": {"shard_degree": 2, "recompute": "units"}},
        "offload": {"plan": {"shard_degree": 2, "recompute": "units", "offload": True}},
    }
    check_plans(tmp_path, 2, cases)


@pytest.mark.thorough
def test_tensor_peers_draw_the_dropout_of_one_rank(tmp_path: Path) -> None:
    peers: dict[str, Any] = {"tensor_degree": 2}
    again = {**peers, "recompute": "units", "offload": True}
    cases: dict[str, dict[str, Any]] = {"peers": {"plan": peers}, "again": {"plan": again}}
    check_plans(tmp_path, 2, cases, dropout=0.1)


@pytest.mark.thorough
def test_four_ranks(tmp_path: Path) -> None:
    check_plans(tmp_path, 4, {"shards": {"plan": {"shard_degree": 0}}, "tensor": {"plan": {"tensor_degree": 4}}})


@pytest.mark.thorough
def test_eight_ranks(tmp_path: Path) -> None:
    check_plans(
        tmp_path, 8, {"all": {"plan": {"shard_degree": 2, "tensor_degree": 2, "recompute": "units", "offload": True}}}
    )


@pytest.mark.stage
def test_a_rank_that_does_not_come_ends_all_in_time(tmp_path: Path) -> None:
    """Or this test would not end. Seven seconds, as all have to come to the step before within them."""
    run_ranks("tests.train.spread:hung", 2, tmp_path, str(tmp_path), "7", code=75)
    assert float((tmp_path / "waited-1").read_text()) > 6
