"""Recompute: the same bits with fewer of them kept, in modules and where weights are flat vectors."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pipeline.backends import open_host
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.relevance import RelevanceInputs, RelevanceOutputs, build_model
from pipeline.parallel.recompute import recompute_units
from pipeline.parallel.strategies.base import Precision
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
LAYERS = CONFIG.encoder.num_layers


def batch() -> dict[str, Tensor]:
    """Texts of two lengths: two passes of the encoder in one forward pass."""
    generator = torch.Generator().manual_seed(2)
    draw = partial(torch.randint, generator=generator, dtype=torch.int32)
    texts = {"query": draw(0, 50, (16, 8)), "product": draw(0, 50, (16, 24))}
    return {**texts, "numeric": torch.zeros(16, 0), "categorical": draw(0, 4, (16, 1))}


def loss_of(outputs: RelevanceOutputs) -> Tensor:
    return outputs.logits.float().square().mean() + (outputs.query * outputs.product).float().mean()


def kept(forward: Callable[[], Tensor], apart_from: Mapping[int, Any]) -> tuple[Tensor, int]:
    """What it gives, and the bytes of activations that autograd keeps for it, each storage once."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart_from:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        found = forward()
    return found, sum(storages.values())


@pytest.mark.parametrize("autocast", [False, True])
def test_units_of_a_module(autocast: bool) -> None:
    plain = build_model(CONFIG, SPEC, 1)
    ours = build_model(CONFIG, SPEC, 1)
    recompute_units(list(ours.encoder.layers))
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in ours.named_modules()] == [name for name, _ in plain.named_modules()]
    found = []
    for model in (plain, ours, deepcopy(ours)):
        torch.manual_seed(3)
        context: AbstractContextManager[object] = nullcontext()
        if autocast:
            context = open_host().autocast(torch.bfloat16)
        with context:
            loss, size = kept(
                lambda model=model: loss_of(model(RelevanceInputs(**batch()))),  # type: ignore[misc]
                {p.untyped_storage().data_ptr(): p for p in model.parameters()},
            )
        drawn = torch.rand(1)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append(((loss.detach(), drawn, *gradients), size))
    (values, size), *others_found = found
    for others, fewer in others_found:
        assert all(torch.equal(one, other) for one, other in zip(values, others, strict=True))
        assert fewer < size / 4


def flat(precision: Precision, recompute: bool, mib: float = 0.004) -> FlatStrategy:
    model = build_model(CONFIG, SPEC, 1)
    return FlatStrategy(
        model, open_host(), precision=precision, chunk_mib=mib, recompute=recompute, host_mean=lambda tensors: tensors
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_layers_over_flat_vectors(precision: Precision) -> None:
    found = []
    for recompute in (False, True):
        strategy = flat(precision, recompute)
        strategy.model.train()
        calls: list[nn.Module] = []
        for layer in strategy.model.encoder.layers:
            layer.register_forward_hook(lambda unit, *_, calls=calls: calls.append(unit))
        torch.manual_seed(3)
        apart = {master.untyped_storage().data_ptr(): master for master in strategy.masters}
        loss, size = kept(lambda s=strategy: loss_of(s.forward(batch())), apart)  # type: ignore[misc]
        drawn = torch.rand(1)
        gradient = strategy.gradient(loss, is_last=True)
        again = torch.rand(1)
        assert len(calls) == 2 * LAYERS * (2 if recompute else 1)
        with torch.no_grad():
            strategy.model.eval()
            scores = strategy.forward(batch()).logits
        found.append(((loss.detach(), drawn, again, scores, *gradient), size))
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


def test_arguments_by_name_and_caches() -> None:
    unit = Cached()
    recompute_units([unit])
    hidden, mask = torch.randn(2, 4, requires_grad=True), torch.ones(2, 4)
    unit(hidden=hidden, mask=mask, past_key_values=[], scale=2.0).sum().backward()
    assert unit.runs == 2 and hidden.grad is not None
    unit(hidden, mask=mask).detach()
    with torch.no_grad():
        unit(hidden, mask=mask)
    assert unit.runs == 4
