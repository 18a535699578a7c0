"""A user's model and loop under `init` and `transform`, and what is wrong with a model on one rank or on all."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import trnpipe
from pipeline.core.errors import ConfigError
from pipeline.parallel.delayed_init import delayed_init
from pipeline.parallel.parallelize import parallelize
from pipeline.parallel.tensor_plan import FusedColwise, TensorPlan
from tests.parallel.plain import plain_tensors
from tests.parallel.test_parallelize import opened
from tests.parallel.test_units import Fused, Tied, llama
from tests.ranks import run_ranks

CASES = "tests.parallel.test_adopt"
ROWS, STEPS = 16, 3


def dense(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    widths = (8, 8, 8, 8, 8, 8, 8, 4)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)), nn.BatchNorm1d(4, affine=False))


def loop(model: nn.Module, part: int, parts: int, micro_steps: int) -> list[float]:
    """A user's own, with gradients that are summed over micro-steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        rows = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(step)).tensor_split(parts)[part]
        for number, some in enumerate(rows.tensor_split(micro_steps)):
            if isinstance(model, torch.distributed.fsdp.FSDPModule):
                model.set_requires_gradient_sync(number == micro_steps - 1)
            found: Tensor = model(some).square().sum(1).mean() / micro_steps
            found.backward()  # type: ignore[no-untyped-call]
        norms.append(float(trnpipe.clip_grad_norm(model, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def accumulated(folder: str) -> list[list[float]]:
    alone = dense(0).eval()
    expected = loop(alone, 0, 1, 1)
    place = trnpipe.init({"shard_degree": 2})
    model: nn.Sequential = trnpipe.transform(made := dense(place.rank)).eval()  # for a type checker, too
    assert model is made
    found = loop(model, place.data_rank, place.data_size, 2)
    with torch.no_grad():
        model(torch.ones(2, 8))  # the parameters of the model itself are whole after this
    trnpipe.save(folder, model)
    loaded = dense(9)
    trnpipe.load(folder, loaded)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(alone.parameters(), loaded.parameters(), strict=True))
    return [expected, found]


def test_a_loop_that_accumulates_gradients(tmp_path: Path) -> None:
    for expected, found in run_ranks(f"{CASES}:accumulated", 2, tmp_path, str(tmp_path / "saved")):
        assert found == pytest.approx(expected, rel=1e-5)


def refused(_: str) -> list[str]:
    """By case the error of this rank."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    scalar = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if rank == 1:
        scalar.register_parameter("alone", nn.Parameter(torch.ones(())))
    with delayed_init():
        early = nn.Module()
        early.weight = nn.Parameter(torch.randn(600, 600))
    cases: list[tuple[nn.Module, dict[str, Any], Any]] = [
        (nn.Linear(2, 2 + rank), {}, None),
        (scalar, {}, None),
        (Tied(), {}, None),
        (nn.Linear(2, 2), {"recompute": "units"}, None),
        (nn.Linear(2, 2), {"tensor_degree": 2}, None),
        (Fused(), {"tensor_degree": 2}, {"qkv": "colwise", "out": "rowwise"}),
        (early, {}, None),
        (nn.Linear(2, 2, device="meta"), {}, None),
    ]
    for model, plan, tensor_plan in cases:
        with pytest.raises(ConfigError) as caught:
            parallelize(model, opened(plan), tensor_plan=tensor_plan)
        found.append(caught.value.seen)
    return found


def test_a_model_that_cannot_be_spread_is_one_error_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(f"{CASES}:refused", 2, tmp_path, "")
    assert first == second
    expected = (
        "rank 0 was given model Linear of 6 parameters",
        "rank 1: parameter 'alone' is a scalar",
        "are one parameter",
        "recompute units of Linear",
        "no plan of how it is split",
        "several matrices in one",
        "'weight' (Module) cannot be told: it has its values before",
        "'weight' (Linear) cannot be told: it was built on meta outside",
    )
    for seen, text in zip(first, expected, strict=True):
        assert text in seen


def drawn(_: str) -> dict[str, Any]:
    """A random number after `spread`, by plan; how far bf16 is from fp32, and the types of what comes out of it."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    parallelize(Fused(), opened({"tensor_degree": 2}), tensor_plan={"qkv": FusedColwise(3), "out": "rowwise"})
    found: dict[str, Any] = {"tensor": float(torch.rand(1))}
    parallelize(nn.Linear(2, 2), opened({"seed": 5}))
    found["data"] = float(torch.rand(1))
    alone = dense(0).eval()
    model = parallelize(dense(0).eval(), opened({"precision": "bf16"}))
    inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    outputs = model(inputs)
    outputs.sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    types = {tensor.dtype for tensor in (outputs, *model.parameters(), *grads)}
    return found | {"bf16": float((outputs - alone(inputs)).abs().max()), "types": sorted(map(str, types))}


def test_tensor_peers_draw_the_same_and_data_ranks_do_not(tmp_path: Path) -> None:
    first, second = run_ranks(f"{CASES}:drawn", 2, tmp_path, "")
    assert first["tensor"] == second["tensor"] and first["data"] != second["data"]
    assert 0 < first["bf16"] < 0.02 and first["types"] == ["torch.float32"]


def halves(_: str) -> float:
    """A fused matrix over tensor peers gives what it gives in one piece."""
    dist.init_process_group("gloo")
    alone = Fused()
    plan: TensorPlan = {"qkv": FusedColwise(3), "out": "rowwise"}
    model = parallelize(Fused(), opened({"shard_degree": 1, "tensor_degree": 2}), tensor_plan=plan)
    alone.load_state_dict(plain_tensors(model))
    inputs = torch.ones(3, 4)
    return float((model(inputs) - alone(inputs)).abs().max())


def test_a_fused_matrix_is_split_by_its_parts(tmp_path: Path) -> None:
    assert max(run_ranks(f"{CASES}:halves", 2, tmp_path, "")) < 1e-6


def of_hugging_face(*plans: str) -> list[float]:
    """The largest differences of a loss from one process, by model and plan; the weights are still to be drawn."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def qwen() -> nn.Module:
        model: nn.Module = Qwen3ForCausalLM(
            Qwen3Config(
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                intermediate_size=32,
                vocab_size=32,
            )
        )
        return model

    dist.init_process_group("gloo")
    worst = []
    for make in (qwen, lambda: llama(tie_word_embeddings=True)):
        torch.manual_seed(3)
        alone = make()
        expected = steps(alone, 0, 1)
        for plan in plans:
            mesh = opened(json.loads(plan))
            torch.manual_seed(3 + dist.get_rank())
            with delayed_init():
                model = make()
            found = steps(parallelize(model, mesh), mesh.layout.data_rank, mesh.layout.data_size)
            worst.append(max(abs(a - b) for a, b in zip(found, expected, strict=True)))
    return worst


def steps(model: nn.Module, part: int, parts: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        tokens = torch.randint(0, 32, (8, 12), generator=torch.Generator().manual_seed(step)).tensor_split(parts)[part]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        trnpipe.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if parts > 1:
            dist.all_reduce(whole)
            whole /= dist.get_world_size()
        losses.append(float(whole))
    return losses


@pytest.mark.thorough
def test_hugging_face_models_by_their_own_tensor_plan(tmp_path: Path) -> None:
    plans = [{"tensor_degree": 2}, {"tensor_degree": 2, "shard_degree": 1, "recompute": "units"}, {"shard_degree": 0}]
    for worst in run_ranks(f"{CASES}:of_hugging_face", 4, tmp_path, *map(json.dumps, plans)):
        assert max(worst) <= 1e-6
