"""A spread model in plain files: the same tensors from every mesh, and a run goes on from any on any other."""

import json
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from pipeline.core.errors import CheckpointError, ConfigError, TrnpipeError
from pipeline.model.relevance import build_model
from pipeline.parallel.checkpoint import load, save
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import delayed_init, parallelize
from tests.kit.ranks import run_ranks
from tests.parallel.models import INPUTS, MODEL, bert, encoder_layers, llama, opened
from tests.parallel.test_parallelize import adamw, train

CASES = "tests.parallel.test_checkpoint"
STEPS, HALF = 4, 2
FILES = ("model.safetensors", "optimizer.safetensors")
MESHES: list[dict[str, Any]] = [{"shard_degree": 2}, {"shard_degree": 2, "tensor_degree": 2}]
ALL: list[dict[str, Any]] = [*MESHES, {"shard_degree": 4}, {"shard_degree": 1}, {"shard": "state", "shard_degree": 2}]


def same_files(one: Path, other: Path) -> bool:
    for name in FILES:
        ours, theirs = load_file(one / name), load_file(other / name)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[key], theirs[key]) for key in ours):
            return False
    return True


def matrix(folder: str, *plans: str) -> dict[str, Any]:
    """Half a run on each mesh, and from there the rest on each; losses, and whether files are the same on all."""
    torch.set_num_threads(1)
    alone = build_model(MODEL, INPUTS, seed=1)
    optimizer = adamw(alone)
    expected = train(alone, None, range(STEPS), optimizer)
    dist.init_process_group("gloo")
    meshes = [opened(json.loads(plan)) for plan in plans]
    worst, exact = 0.0, []
    halves: dict[Path, tuple[Mesh, list[list[float]]]] = {}
    for mesh in meshes:
        model = parallelize(build_model(MODEL, INPUTS, seed=1), mesh, units=encoder_layers)
        optimizer = adamw(model)
        train(model, mesh, range(HALF), optimizer)
        saved = Path(folder) / str(len(halves))
        save(saved, model, optimizer)
        halves[saved] = (mesh, train(model, mesh, range(HALF, STEPS), optimizer))
    for saved, (first, rest) in halves.items():
        for mesh in meshes:
            with delayed_init():
                model = build_model(MODEL, INPUTS, seed=9)
            parallelize(model, mesh, units=encoder_layers, weights=saved)
            optimizer = adamw(model)
            optimizer.param_groups[0]["lr"] = 7.0
            load(saved, model, optimizer)
            if mesh is not first and mesh is not meshes[0]:
                save(saved / "again", model, optimizer)
                assert same_files(saved, saved / "again")
            found = train(model, mesh, range(HALF, STEPS), optimizer)
            worst = max(worst, *(abs(a[0] - b[0]) for a, b in zip(found, expected[HALF:], strict=True)))
            if mesh is first:
                exact.append(found == rest)
    return {"worst": worst, "exact": exact}


@pytest.mark.parametrize("plans", [MESHES, pytest.param(ALL, marks=pytest.mark.thorough)])
def test_a_run_goes_on_from_any_mesh_on_any_other(tmp_path: Path, plans: list[dict[str, Any]]) -> None:
    words = map(json.dumps, plans)
    for found in run_ranks(f"{CASES}:matrix", 4, tmp_path, str(tmp_path / "saved"), *words):
        assert found["exact"] == [True] * len(plans)
        assert found["worst"] <= 1e-6


def full_disk(folder: str) -> list[str]:
    """Rank 0 alone fails, half way through."""
    dist.init_process_group("gloo")
    model = parallelize(build_model(MODEL, INPUTS, seed=1), opened({}), units=encoder_layers)
    save(folder, model)
    if dist.get_rank() == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    found = []
    for target in (folder, "/proc/none"):
        with pytest.raises(TrnpipeError) as caught:
            save(target, model)
        found.append(caught.value.seen)
    load(folder, model)
    return found


def test_what_fails_on_rank_0_fails_on_all_and_leaves_what_was_there(tmp_path: Path) -> None:
    first, second = run_ranks(f"{CASES}:full_disk", 2, tmp_path / "ranks", str(tmp_path / "saved"))
    assert first == second
    assert "model.safetensors cannot be written" in first[0] and "/proc/none" in first[1]


def test_what_is_not_this_models(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = adamw(model)
    save(tmp_path / "saved", model, optimizer)
    with pytest.raises(CheckpointError, match=r"'weight' is \[4, 3\].*\n.*\[4, 5\]"):
        load(tmp_path / "saved", nn.Linear(5, 4))
    with pytest.raises(CheckpointError, match=r"the shape of 'bias' is \[4\].*\n.*no such tensor"):
        load(tmp_path / "saved", nn.Linear(3, 4, bias=False))
    with pytest.raises(CheckpointError, match="1 parameter groups that differ"):
        load(tmp_path / "saved", model, torch.optim.SGD([model.weight]))
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "other", model)
    with pytest.raises(ConfigError, match=r"2 parameters that do not belong to the model.*\n.*\n.*transform"):
        save(tmp_path / "saved", nn.Linear(3, 4), optimizer)
    (tmp_path / "saved/model.safetensors").write_bytes(b"0" * (tmp_path / "saved/model.safetensors").stat().st_size)
    with pytest.raises(CheckpointError, match="xxh3_128"):
        load(tmp_path / "saved", model)


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

    with pytest.raises(ConfigError, match="_extra_state, which is not a tensor"):
        save(tmp_path / "saved", Counting(3, 4))


@pytest.mark.parametrize("kind", ["SGD", "SGD without momentum", "Adagrad", "NAdam"])
def test_other_optimizers_go_on_where_they_were(tmp_path: Path, kind: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    options = {"momentum": 0.9, "nesterov": True} if kind == "SGD" else {}
    kind = kind.partition(" ")[0]
    model = nn.Linear(3, 4)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(model, optimizer)
    schedule.step()
    save(tmp_path, model, optimizer)
    other = nn.Linear(3, 4)
    other_optimizer = getattr(torch.optim, kind)(other.parameters())
    load(tmp_path, other, other_optimizer)
    assert other_optimizer.param_groups[0]["lr"] == 0.005
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        step(one, its_optimizer)
    assert torch.equal(model.weight, other.weight)


def test_it_loads_in_transformers(tmp_path: Path) -> None:
    for make in (bert, partial(llama, tie_word_embeddings=True)):
        model: Any = make()
        save(tmp_path, model)
        model.config.save_pretrained(tmp_path)
        again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
