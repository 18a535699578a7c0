"""A model spread over ranks computes what it computes in one process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.model.config import LossConfig
from pipeline.model.relevance import RelevanceInputs, build_model
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import parallelize
from pipeline.parallel.tensors import clip_grad_norm
from pipeline.train.loss import Targets, pair_loss
from tests.kit.ranks import run_ranks
from tests.parallel.models import INPUTS, MODEL, encoder_layers, opened, plain_tensors

CASES = "tests.parallel.test_parallelize"
STEPS, QUERIES, SLOTS = 3, 8, 4
PAIRS = QUERIES * SLOTS


def batch_of(step: int, part: int, parts: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1000 + step)
    product = torch.randint(1, 103, (PAIRS, 16), generator=draw, dtype=torch.int32)
    product[:, 12:] = 0
    whole = {
        "product": product,
        "query": torch.randint(1, 103, (QUERIES, 8), generator=draw, dtype=torch.int32),
        "numeric": torch.randn(PAIRS, 1, generator=draw),
        "categorical": torch.randint(0, 7, (PAIRS, 1), generator=draw, dtype=torch.int32),
        "label": torch.randint(0, 3, (PAIRS,), generator=draw),
        "gain": torch.rand(PAIRS, generator=draw).round(),
    }
    return {name: values.tensor_split(parts)[part] for name, values in whole.items()}


def loss_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    outputs = model(RelevanceInputs(*(batch[name] for name in RelevanceInputs._fields)))
    keys = torch.arange(len(batch["label"]))
    targets = Targets(batch["label"], batch["gain"], keys[: len(batch["query"])], keys)
    return pair_loss(outputs, targets, LossConfig())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # of many DTensors the fastest on a CPU


def train(model: nn.Module, mesh: Mesh | None, steps: range, optimizer: torch.optim.Optimizer) -> list[list[float]]:
    """(loss, norm of the gradient) by step: of the global batch, whatever the ranks."""
    place = mesh.layout if mesh else None
    part, parts = (place.data_rank, place.data_size) if place else (0, 1)
    found = []
    for step in steps:
        loss = loss_of(model, batch_of(step, part, parts))
        loss.backward()  # type: ignore[no-untyped-call]
        norm = clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach().clone()
        if place:
            dist.all_reduce(whole)
        found.append([float(whole) / (place.world_size if place else 1), float(norm)])
    return found


def matrix(*plans: str) -> list[dict[str, float]]:
    """By plan: the largest differences from one process, which this rank is as well before.

    `exact`: no bit is different from the last plan before it that recomputes nothing.
    """
    torch.set_num_threads(1)
    alone = build_model(MODEL, INPUTS, seed=1)
    expected = train(alone, None, range(STEPS), adamw(alone))
    dist.init_process_group("gloo")
    results: list[dict[str, float]] = []
    plain: tuple[list[list[float]], dict[str, Tensor]] = [], {}
    for plan in plans:
        mesh = opened(json.loads(plan))
        model = build_model(MODEL, INPUTS, seed=1 + dist.get_rank())  # the weights are those of rank 0
        parallelize(model, mesh, units=encoder_layers)
        found = train(model, mesh, range(STEPS), adamw(model))
        weights, reference = plain_tensors(model), plain_tensors(alone)
        if mesh.plan.recompute == "none":
            plain = found, weights
        results.append(
            {
                "exact": found == plain[0] and all(torch.equal(weights[name], plain[1][name]) for name in weights),
                "loss": max(abs(a[0] - b[0]) for a, b in zip(found, expected, strict=True)),
                "norm": max(abs(a[1] / b[1] - 1) for a, b in zip(found, expected, strict=True)),
                "weights": max(float((weights[name] - reference[name]).abs().max()) for name in reference),
            }
        )
    return results


SAVINGS: list[dict[str, Any]] = [{}, {"recompute": "units"}, {"recompute": "units", "offload": True}]
REPLICAS: dict[str, Any] = {"shard_degree": 1}
STATE: dict[str, Any] = {"shard": "state"}
TWO: list[dict[str, Any]] = [REPLICAS, STATE, {}, {"tensor_degree": 2}]
FOUR: list[dict[str, Any]] = [
    *({"shard_degree": 2}, REPLICAS, {"shard_degree": 2, **STATE}, STATE),
    *({"tensor_degree": 2}, {"tensor_degree": 4}, {"tensor_degree": 2, **REPLICAS}, {}),
]
EIGHT: list[dict[str, Any]] = [
    *(REPLICAS, STATE, {"shard_degree": 2, **STATE}, {}, {"shard_degree": 2}),
    *({"tensor_degree": 2}, {"shard_degree": 2, "tensor_degree": 2}, {"tensor_degree": 4, **REPLICAS}),
]


@pytest.mark.parametrize(
    ("ranks", "modes", "savings"),
    [
        (1, [{}], SAVINGS),
        (2, TWO, SAVINGS[::2]),
        pytest.param(2, TWO, SAVINGS, marks=pytest.mark.thorough),
        (4, FOUR[::2], SAVINGS[-1:]),
        pytest.param(4, FOUR, SAVINGS, marks=pytest.mark.thorough),
        pytest.param(8, EIGHT[:4], SAVINGS, marks=pytest.mark.thorough),
        pytest.param(8, EIGHT[4:], SAVINGS, marks=pytest.mark.thorough),
    ],
)
def test_a_plan_changes_no_number(
    tmp_path: Path, ranks: int, modes: list[dict[str, Any]], savings: list[dict[str, Any]]
) -> None:
    """Every mode as it is, with recomputation, and with offloading as well: these two change no bit."""
    plans = [{**mode, **saving} for mode in modes for saving in savings]
    for found in run_ranks(f"{CASES}:matrix", ranks, tmp_path, *map(json.dumps, plans)):
        for plan, difference in zip(plans, found, strict=True):
            assert difference["loss"] <= 1e-6, (plan, difference)
            assert difference["norm"] <= 1e-6, (plan, difference)
            assert difference["weights"] <= 1e-5, (plan, difference)
            assert difference["exact"] or savings == SAVINGS[-1:], plan
