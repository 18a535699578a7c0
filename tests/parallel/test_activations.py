"""Recomputation and offloading: the same bits with fewer of them kept, in modules and where weights are flat."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.backends import open_host
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.relevance import RelevanceInputs, RelevanceOutputs, build_model
from pipeline.parallel.activations import recompute_units
from pipeline.parallel.strategies import Precision
from pipeline.parallel.strategies.flat import FlatStrategy

SPEC = InputSpec(vocab_size=50, pad_id=0, labels=("a", "b"), label_gains=(0.0, 1.0), categorical_ids=(4,))
CONFIG = ModelConfig(
    hidden_size=16,
    num_layers=3,
    num_heads=2,
    intermediate_size=64,
    interaction_size=8,
    mlp_sizes=(12,),
    dropout=0.3,
)


def batch(rows: int = 16) -> dict[str, Tensor]:
    """Texts of two lengths: two passes of the encoder in one forward pass."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    texts = {"query": draw(0, 50, (rows, 8)), "product": draw(0, 50, (rows, 24))}
    return {**texts, "numeric": torch.zeros(rows, 0), "categorical": draw(0, 4, (rows, 1))}


def loss_of(outputs: RelevanceOutputs) -> Tensor:
    return outputs.logits.float().square().mean() + (outputs.query * outputs.product).float().mean()


def kept(forward: Callable[[], Tensor], apart_from: Mapping[int, Any]) -> tuple[Tensor, int]:
    """The loss, and the bytes of activations that autograd keeps for it, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart_from:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    return loss, sum(storages.values())


def drawn_and_gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), torch.rand(1), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("autocast", [False, True])
def test_units_of_a_module(autocast: bool) -> None:
    plain = build_model(CONFIG, SPEC, 1)
    expected, size = None, 0
    for offload in (None, False, True):
        model = build_model(CONFIG, SPEC, 1)
        if offload is not None:
            recompute_units(list(model.encoder.layers), offload=offload)
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
        apart = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
        torch.manual_seed(3)
        with open_host().autocast(torch.bfloat16) if autocast else nullcontext():
            loss, bytes_kept = kept(lambda model=model: loss_of(model(RelevanceInputs(**batch()))), apart)  # type: ignore[misc]
        found = drawn_and_gradients(model, loss)
        expected, size = expected or found, size or 4 * bytes_kept + 1
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert offload is None or bytes_kept < size / 16


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_layers_over_flat_vectors(precision: Precision) -> None:
    found = []
    for recompute in (False, True):
        model = build_model(CONFIG, SPEC, 1)
        strategy = FlatStrategy(
            model, open_host(), precision=precision, chunk_mib=0.004, recompute=recompute, host_mean=list
        )
        strategy.model.train()
        torch.manual_seed(3)
        apart = {master.untyped_storage().data_ptr(): master for master in strategy.masters}
        loss, size = kept(lambda s=strategy: loss_of(s.forward(batch())), apart)  # type: ignore[misc]
        drawn = torch.rand(1)
        gradient = strategy.gradient(loss, is_last=True)
        found.append(((loss.detach(), drawn, torch.rand(1), *gradient), size))
    (values, size), (others, fewer) = found
    assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))
    assert fewer < size / (2 if precision == "bf16" else 4), (size, fewer)


class Cached(nn.Module):
    """A layer with the arguments of those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, hidden: Tensor, *, mask: Tensor, past_key_values: Any = None, scale: float = 1.0) -> Tensor:
        self.runs += 1
        assert past_key_values is None, "it would be written twice"
        result: Tensor = torch.tanh(self.inner(hidden)) * mask * scale
        return result


class Counting(nn.BatchNorm1d):
    """Statistics that change in place, and a number of calls that is replaced."""

    def __init__(self) -> None:
        super().__init__(4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(rows)


def test_statistics_are_updated_once() -> None:
    found = []
    for way in ("plain", "recomputed", "compiled"):
        torch.manual_seed(0)
        unit = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4) if way == "compiled" else Counting())
        if way != "plain":
            recompute_units([unit])
        call = torch.compile(unit, backend="aot_eager") if way == "compiled" else unit
        loss = call(torch.randn(3, 4, generator=torch.Generator().manual_seed(1))).square().sum()
        if way != "compiled":
            loss.backward(retain_graph=True)
            unit.zero_grad()
        loss.backward()  # recomputed again
        found.append([unit[1].running_mean, unit[1].running_var, *(parameter.grad for parameter in unit.parameters())])
        assert unit[1].num_batches_tracked == 1 and getattr(unit[1], "calls", 1) == 1, way
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_arguments_by_name_and_caches() -> None:
    unit = Cached()
    recompute_units([unit])
    hidden, mask = torch.randn(2, 4, requires_grad=True), torch.ones(2, 4)
    unit(hidden=hidden, mask=mask, past_key_values=[], scale=2.0).sum().backward()
    assert unit.runs == 2 and hidden.grad is not None
    with torch.no_grad():
        unit(hidden, mask=mask)
    assert unit.runs == 3
