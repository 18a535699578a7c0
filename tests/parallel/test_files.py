"""A spread model in plain files: the same bytes from every mesh, and a run goes on from any on any other."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from pipeline.backends import open_host
from pipeline.model.relevance import build_model
from pipeline.parallel.config import Plan
from pipeline.parallel.delayed import delayed_init
from pipeline.parallel.files import load, save
from pipeline.parallel.mesh import open_mesh
from pipeline.parallel.tensors import local
from pipeline.parallel.transform import spread
from tests.parallel.test_transform import INPUTS, MODEL, adamw, encoder_layers, opened, train
from tests.ranks import run_ranks

CASES = "tests.parallel.test_files"
HALF, STEPS = 2, 4


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def matrix(folder: str, *plans: str) -> dict[str, Any]:
    """Half a run on each mesh, and from there the rest on each; losses, and what the files are."""
    torch.set_num_threads(1)
    alone = build_model(MODEL, INPUTS, seed=1)
    optimizer = adamw(alone)
    expected = train(alone, None, range(STEPS), optimizer)
    dist.init_process_group("gloo")
    meshes = [opened(json.loads(plan)) for plan in plans]
    worst, exact, halves = 0.0, [], {}
    for mesh in meshes:
        model = spread(build_model(MODEL, INPUTS, seed=1), mesh, units=encoder_layers)
        optimizer = adamw(model)
        train(model, mesh, range(HALF), optimizer)
        saved = Path(folder) / f"{mesh.layout.shard_size}-{mesh.layout.tensor_size}"
        save(saved, model, optimizer)
        halves[saved] = (mesh, train(model, mesh, range(HALF, STEPS), optimizer))
    for saved, (first, rest) in halves.items():
        for mesh in meshes:
            model = spread(build_model(MODEL, INPUTS, seed=9), mesh, units=encoder_layers)
            optimizer = adamw(model)
            optimizer.param_groups[0]["lr"] = 7.0
            load(saved, model, optimizer)
            if mesh is not first and mesh is not meshes[0]:
                save(saved / "again", model, optimizer)
                assert [sha256(saved / name) for name in FILES] == [sha256(saved / "again" / name) for name in FILES]
            found = train(model, mesh, range(HALF, STEPS), optimizer)
            worst = max(worst, *(abs(a[0] - b[0]) for a, b in zip(found, expected[HALF:], strict=True)))
            if mesh is first:
                exact.append(found == rest)
    return {"worst": worst, "exact": exact}


FILES = ("model.safetensors", "optimizer.safetensors")
MESHES: list[dict[str, Any]] = [
    {"shard_degree": 4},
    {"shard_degree": 2},
    {"shard_degree": 2, "tensor_degree": 2},
]


def test_a_run_goes_on_from_any_mesh_on_any_other(tmp_path: Path) -> None:
    plans = map(json.dumps, MESHES)
    for found in run_ranks(f"{CASES}:matrix", 4, tmp_path, str(tmp_path / "saved"), *plans):
        assert found["exact"] == [True] * len(MESHES)
        assert found["worst"] <= 1e-6


def same_bytes(folder: str, *plans: str) -> list[int]:
    """A model loaded and saved on each mesh; the elements that this rank read."""
    dist.init_process_group("gloo")
    read = []
    for plan in plans:
        mesh = opened(json.loads(plan))
        with delayed_init(Path(folder) / "one"):
            model = build_model(MODEL, INPUTS, seed=2 + dist.get_rank())
        spread(model, mesh, units=encoder_layers)
        read.append(sum(local(parameter).numel() for parameter in model.parameters()))
        save(Path(folder) / str(len(read)), model)
    return read


def test_files_are_the_same_bytes_from_every_mesh(tmp_path: Path) -> None:
    model = build_model(MODEL, INPUTS, seed=1)
    save(tmp_path / "one", model)
    save_file(model.state_dict(), tmp_path / "theirs.safetensors", {"format": "pt"})
    expected = sha256(tmp_path / "theirs.safetensors")
    assert sha256(tmp_path / "one/model.safetensors") == expected
    plans = list(map(json.dumps, MESHES))
    size = sum(parameter.numel() for parameter in model.parameters())
    for read in run_ranks(f"{CASES}:same_bytes", 4, tmp_path / "ranks", str(tmp_path), *plans):
        assert read[0] < size / 3.5 and read[1] < size / 1.9
    assert [sha256(tmp_path / str(number) / "model.safetensors") for number in (1, 2, 3)] == [expected] * 3


def one_rank(model: nn.Module) -> nn.Module:
    return spread(model, open_mesh(Plan(), open_host(), timeout_s=30))
