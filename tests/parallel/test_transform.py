"""What `transform` makes of a user's model: units, tensor plans, delayed weights, and what cannot be spread."""

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import trnpipe
from pipeline.core.errors import ConfigError
from pipeline.core.layout import Layout
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.parallelize import check_units, delayed_init, find_units, parallelize
from pipeline.parallel.tensors import FusedColwise, TensorPlan, interleave_rows, tensor_styles
from tests.kit.ranks import run_ranks
from tests.parallel.models import Fused, Tied, bert, blocks, dense, llama, opened, plain_tensors
from tests.train.rows import SPEC

CASES = "tests.parallel.test_transform"
ROWS, STEPS = 16, 3
FUSED: TensorPlan = {"qkv": FusedColwise(3), "out": "rowwise"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), ["0", "2"]),
        (nn.Sequential(nn.Embedding(9, 4), nn.Sequential(*blocks(2)), nn.Linear(4, 2)), ["1.0", "1.1"]),
        (nn.ModuleList([nn.ModuleList(blocks(2)), nn.ModuleList(blocks(2))]), ["0.0", "0.1", "1.0", "1.1"]),
        (nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.LayerNorm(4))), []),
    ],
)
def test_units_are_members_of_lists_of_one_class(model: nn.Module, expected: list[str]) -> None:
    units = find_units(model)
    assert [name for name, _ in units] == expected
    check_units(model, units)


def test_hugging_face_models_have_units_and_a_tensor_plan() -> None:
    for model, first in ((llama(tie_word_embeddings=True), "model.layers.0"), (bert(), "bert.encoder.layer.0")):
        assert [name for name, _ in find_units(model)] == [first, f"{first[:-1]}1"]
    styles = dict(tensor_styles(llama(tie_word_embeddings=True), None, Layout(tensor_size=2)))
    assert len(styles) == 14 and "model.layers.1.mlp.down_proj" in styles


def test_a_tie_is_named_by_both_its_names() -> None:
    model = Tied()
    with pytest.raises(ConfigError, match=r"'layers.1.0.weight' \(in unit 'layers.1'\) and 'head.weight' \(in no unit"):
        check_units(model, find_units(model))
    check_units(model, [])
    inside = nn.Sequential(*blocks(2))
    inside[0].append(nn.Linear(4, 4))  # type: ignore[operator]
    inside[0][2].weight = inside[0][0].weight  # type: ignore[index]
    check_units(inside, find_units(inside))


def test_interleaved_rows_come_back() -> None:
    rows = torch.arange(24).view(12, 2)
    assert interleave_rows(rows, 3)[:, 0].tolist() == [0, 8, 16, 2, 10, 18, 4, 12, 20, 6, 14, 22]
    assert torch.equal(interleave_rows(interleave_rows(rows, 3), 4), rows)


def modernbert() -> nn.Module:
    return build_model(ModelConfig(preset="tiny", architecture="modernbert"), SPEC, 1)


@pytest.mark.parametrize(
    ("make", "plan", "degree", "match"),
    [
        (Fused, None, 2, "tensor plan, but Fused doesn't have one.*\n.*\n.*tensor_plan="),
        (Fused, {"qkv": "colwise", "out": "rowwise"}, 2, "fuses several matrices.*\n.*FusedColwise"),
        (Fused, {"qkv": FusedColwise(3), "output": "rowwise"}, 2, "no module of Fused matches 'output'"),
        (Fused, {"qkv": FusedColwise(3)}, 8, "tensor_degree 8 does not divide 4 outputs of 'qkv'"),
        (Fused, {"out": "rows"}, 2, "'out' has the unknown style 'rows'.*\n.*colwise, rowwise"),
        (
            lambda: nn.Sequential(nn.Linear(4, 6)),
            {"0": "colwise"},
            2,
            "shard_degree 2 by tensor_degree 2 does not divide 6",
        ),
        (llama, None, 4, "tensor_degree 4 does not divide the number of heads .2, 2"),
        (modernbert, None, 2, "ModernBertEncoder does not support.*\n.*\n.*--train.parallel.tensor-degree 1"),
        (partial(llama, tie_word_embeddings=True), {"lm_head": "colwise"}, 2, "'lm_head' shares a parameter"),
    ],
)
def test_what_cannot_be_split(make: Callable[[], nn.Module], plan: Any, degree: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        tensor_styles(make(), plan, Layout(tensor_size=degree, shard_size=2))


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
    alone = dense(0)
    expected = loop(alone, 0, 1, 1)
    place = trnpipe.init({"shard_degree": 2})
    model: nn.Sequential = trnpipe.transform(made := dense(place.rank))  # for a type checker, too
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


class Script(nn.Module):
    """A model of a DDP script: parameters outside of the layers, one that is never used, and buffers that change."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.norm, self.layers = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ModuleList(blocks(2, 8))
        self.unused, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.norm(self.first(rows))
        for layer in self.layers:
            hidden = layer(hidden)
        output: Tensor = self.head(hidden)
        return output


def evaluated(folder: str, shard: str) -> list[list[float]]:
    """Train as a script does that evaluates before it builds its optimizer, and before it saves."""
    place = trnpipe.init({"shard": shard})

    def evaluate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            loss = float(model(torch.ones(4, 8)).sum())
        model.train()
        return loss

    def train(model: Any, optimizer: torch.optim.Optimizer, first: int) -> float:
        for step in (first, first + 1):
            rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * step + place.rank))

            def closure(rows: Tensor = rows) -> Tensor:
                optimizer.zero_grad()
                with model.no_sync():
                    model(rows[:4]).square().mean().backward()
                assert model.head.weight.grad is None, "not reduced yet"
                loss: Tensor = model(rows[4:]).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                assert math.isfinite(model.first.weight.grad.norm().item()), "a warning, not an error of the optimizer"
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
        return evaluate(model)

    found = []
    for seed in (1, 2):
        model = trnpipe.transform(Script(seed + place.rank))
        evaluate(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        assert all(isinstance(each, DTensor) for each in optimizer.param_groups[0]["params"])
        if seed == 1:
            found.append(train(model, optimizer, 0))
            trnpipe.save(folder, model, optimizer)
        else:
            trnpipe.load(folder, model, optimizer)
            found.append(evaluate(model))
        found.append(train(model, optimizer, 2))
        assert not optimizer.state[model.unused.weight] and model.unused.weight.requires_grad
    return [found[:2], found[2:]]


@pytest.mark.parametrize("shard", ["all", "state"])
def test_a_script_that_evaluates_at_any_time(tmp_path: Path, shard: str) -> None:
    first, second = run_ranks(f"{CASES}:evaluated", 2, tmp_path, str(tmp_path / "saved"), shard)
    assert first == second, "buffers are those of rank 0"
    assert first[0] == first[1], "as if it had not been loaded"
    assert len(set(first[0])) == 2


class Mixed(nn.Module):
    """Parameters with and without memory, a tie, a buffer and a module with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: Tensor
        self.register_buffer("positions", torch.arange(8), persistent=False)
        self.table = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 9)
        self.head.weight = self.table.weight


def delayed(_: str) -> list[float]:
    """The sums of all tensors, by plan: of what `reset_parameters` draws, whatever the mesh and the seeds of ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    found = []
    for plan in ({}, {"shard_degree": 1}, {"tensor_degree": 2}):
        with delayed_init():
            model = Mixed()
        assert all(parameter.is_meta for parameter in model.parameters()) and model.positions.sum() == 28
        tensor_plan: TensorPlan = {"layers.0": "colwise", "layers.1": "rowwise"}
        parallelize(model, opened({**plan, "seed": 3}), tensor_plan=tensor_plan)
        tensors = plain_tensors(model)
        assert torch.equal(tensors["head.weight"], tensors["table.weight"]) and tensors["norm.weight"].sum() == 8
        assert not torch.equal(tensors["layers.0.weight"][:4], tensors["layers.0.weight"][4:])
        found.append(float(sum(tensor.double().sum() for tensor in tensors.values())))
    return found


def test_delayed_weights_are_the_same_on_every_mesh(tmp_path: Path) -> None:
    first, second = run_ranks(f"{CASES}:delayed", 2, tmp_path, "")
    assert first == second and len(set(first)) == 1
    with pytest.raises(ZeroDivisionError), delayed_init():
        raise ZeroDivisionError
    assert not nn.Linear(2, 2).weight.is_meta


def test_a_delayed_parameter_of_two_modules_stays_one() -> None:
    with delayed_init():
        shared, first, second = nn.Parameter(torch.ones(2, 2)), nn.Linear(2, 2), nn.Linear(2, 2)
        first.weight = shared
        second.weight = shared
    assert first.weight is second.weight and first.weight.is_meta and first.bias is not second.bias


def refused(_: str) -> list[str]:
    """By case the error of this rank: models that differ, and what is wrong with one."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    with delayed_init():
        bare = nn.Module()
        bare.weight = nn.Parameter(torch.randn(6, 6))
    cases: list[tuple[nn.Module, dict[str, Any]]] = [
        (nn.Linear(2, 2 + rank), {}),
        (nn.Linear(2, 2) if rank else Tied(), {}),
        (nn.Linear(2, 2), {"recompute": "units"}),
        (bare, {}),
    ]
    for model, plan in cases:
        with pytest.raises(ConfigError) as caught:
            parallelize(model, opened(plan))
        found.append(caught.value.seen)
    return found


def test_a_model_that_cannot_be_spread_is_one_error_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(f"{CASES}:refused", 2, tmp_path, "")
    assert first == second
    expected = (
        "rank 0 has model Linear of 6 parameters",
        "rank 0: 'layers.1.0.weight'",
        "recompute units is set, but Linear has no units",
        "weight cannot be initialized because Module has no reset_parameters",
    )
    assert all(text in seen for seen, text in zip(first, expected, strict=True)), first


def spread(_: str) -> dict[str, Any]:
    """A random number after it, by plan; a fused matrix in halves; how far bf16 is from fp32, and types of results."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    alone, model = Fused(), parallelize(Fused(), opened({"tensor_degree": 2}), tensor_plan=FUSED)
    found: dict[str, Any] = {"tensor": float(torch.rand(1))}
    alone.load_state_dict(plain_tensors(model))
    found["fused"] = float((model(torch.ones(3, 4)) - alone(torch.ones(3, 4))).abs().max())
    parallelize(nn.Linear(2, 2), opened({"seed": 5}))
    found["data"] = float(torch.rand(1))
    low = parallelize(dense(0), opened({"precision": "bf16"}))
    inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    outputs = low(inputs)
    outputs.sum().backward()
    grads = [parameter.grad for parameter in low.parameters() if parameter.grad is not None]
    types = {tensor.dtype for tensor in (outputs, *low.parameters(), *grads)}
    return found | {"bf16": float((outputs - dense(0)(inputs)).abs().max()), "types": sorted(map(str, types))}


def test_tensor_peers_draw_the_same_and_data_ranks_do_not(tmp_path: Path) -> None:
    first, second = run_ranks(f"{CASES}:spread", 2, tmp_path, "")
    assert first["tensor"] == second["tensor"] and first["data"] != second["data"]
    assert max(first["fused"], second["fused"]) < 1e-6
    assert 0 < first["bf16"] < 0.02 and first["types"] == ["torch.float32"]


def of_hugging_face(_: str) -> float:
    """The largest difference of a loss from one process, with its own tensor plan and recomputed layers."""
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    alone = llama(tie_word_embeddings=True)
    expected = losses(alone, 0, 1)
    torch.manual_seed(3)
    mesh = opened({"tensor_degree": 2, "recompute": "units"})
    found = losses(parallelize(llama(tie_word_embeddings=True), mesh), mesh.layout.data_rank, mesh.layout.data_size)
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def losses(model: nn.Module, part: int, parts: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
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
        found.append(float(whole))
    return found


@pytest.mark.thorough
def test_hugging_face_models_by_their_own_tensor_plan(tmp_path: Path) -> None:
    assert max(run_ranks(f"{CASES}:of_hugging_face", 4, tmp_path, "")) <= 1e-6
