"""Flat parameters: the same tensors, the same gradients."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.relevance import RelevanceInputs, build_model
from pipeline.parallel.strategies.flat import FlatLayout

CONFIG = ModelConfig(
    hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, interaction_size=8, mlp_sizes=(12,)
)
WHOLE_MIB, SMALL_MIB = 64.0, 0.004
SPEC = InputSpec(vocab_size=30, pad_id=0, labels=("a", "b"), label_gains=(0.0, 1.0), categorical_ids=(4,))


EITHER = pytest.mark.parametrize("chunk_mib", [WHOLE_MIB, SMALL_MIB])


@EITHER
def test_round_trip_is_bit_exact_and_keeps_names_and_shapes(chunk_mib: float) -> None:
    state = build_model(CONFIG, SPEC, 1).state_dict()
    layout = FlatLayout.of(build_model(CONFIG, SPEC, 1), chunk_mib)
    flats = layout.pack(state)
    assert [flat.numel() for flat in flats] == [chunk.size for chunk in layout.chunks]
    assert layout.size == sum(tensor.numel() for tensor in state.values())
    back = layout.unpack(flats)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    decayed = {name for chunk in layout.chunks if chunk.decayed for name in chunk.names}
    assert state.keys() - decayed == {name for name in state if name.endswith("bias") or "norm" in name}
    low = layout.pack({name: tensor.double() for name, tensor in state.items()})
    assert all(flat.dtype == torch.float32 for flat in low)


@EITHER
def test_gradients_equal_those_of_plain_parameters(chunk_mib: float) -> None:
    model = build_model(CONFIG, SPEC, 1)
    generator = torch.Generator().manual_seed(1)
    inputs = RelevanceInputs(
        torch.randint(0, 30, (4, 6), generator=generator),
        torch.randint(0, 30, (4, 8), generator=generator),
        torch.zeros(4, 0),
        torch.randint(0, 4, (4, 1), generator=generator),
    )
    model(inputs).logits.square().sum().backward()
    layout = FlatLayout.of(model, chunk_mib)
    flats = [flat.requires_grad_() for flat in layout.pack(model.state_dict())]
    outputs = torch.func.functional_call(model, layout.unpack(flats), (inputs,))
    gradients = layout.unpack(torch.autograd.grad(outputs.logits.square().sum(), flats))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-8)


def test_an_unused_parameter_gets_a_zero_gradient() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(3, 3)})
    layout = FlatLayout.of(module, WHOLE_MIB)
    flats = [flat.requires_grad_() for flat in layout.pack(module.state_dict())]
    named = layout.unpack(flats)
    gradients = layout.unpack(torch.autograd.grad((named["used.weight"].sum() + named["used.bias"].sum()), flats))
    assert (gradients["used.weight"] == 1).all() and (gradients["idle.weight"] == 0).all()


def test_a_chunk_holds_whole_parameters_up_to_its_limit_or_one_segment() -> None:
    module = build_model(CONFIG, SPEC, 1)
    whole, small = FlatLayout.of(module, WHOLE_MIB), FlatLayout.of(module, SMALL_MIB)
    kinds = [(True, True), (True, False), (False, True), (False, False)]
    assert [(chunk.decayed, chunk.encoder) for chunk in whole.chunks] == kinds and len(small.chunks) > 6
    for chunk in small.chunks:
        assert {name.startswith("encoder.") for name in chunk.names} == {chunk.encoder}
    names = [name for chunk in small.chunks for name in chunk.names]
    assert names == [name for chunk in whole.chunks for name in chunk.names]
    assert sorted(names) == sorted(name for name, _ in module.named_parameters())
    limit = int(SMALL_MIB * 2**20 / 4)
    assert all(chunk.size <= limit or len(chunk.segments) == 1 for chunk in small.chunks)
    joined = [
        chunk.size + following.segments[0]
        for chunk, following in pairwise(small.chunks)
        if (chunk.decayed, chunk.encoder) == (following.decayed, following.encoder)
    ]
    assert all(size > limit for size in joined), "no chunk could have held the next segment, too"
    for kind in kinds:
        sizes = [chunk.size for chunk in small.chunks if (chunk.decayed, chunk.encoder) == kind]
        assert all(size % 16 == 0 for size in sizes[:-1])


def test_the_last_norm_of_a_modernbert_lies_where_checkpoints_have_it() -> None:
    module = build_model(CONFIG.model_copy(update={"architecture": "modernbert"}), SPEC, 1)
    chunks = FlatLayout.of(module, WHOLE_MIB).chunks
    assert len(chunks) == 4 and chunks[2].names[-1] == "encoder.final_norm.weight"


def test_odd_parameters_are_not_parted() -> None:
    """The fused update computes the end of a vector with other last bits."""
    module = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(4, 4, bias=False)])
    layout = FlatLayout.of(module, 1e-6)
    assert [chunk.names for chunk in layout.chunks] == [("0.weight", "1.weight"), ("2.weight",)]


def test_the_sum_of_squares_has_the_same_bits_in_any_chunks() -> None:
    module = build_model(CONFIG.model_copy(update={"hidden_size": 64, "intermediate_size": 256}), SPEC, 1)
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(p.shape, generator=generator) for name, p in module.named_parameters()}
    found = {}
    for chunk_mib in (WHOLE_MIB, 0.3, 0.1, 1e-6):
        layout = FlatLayout.of(module, chunk_mib)
        found[len(layout.chunks)] = layout.sum_of_squares(layout.pack(values))
    assert len(found) == 4 and len({float(total) for total in found.values()}) == 1, found
    expected: Tensor = sum(value.double().square().sum() for value in values.values())  # type: ignore[assignment]
    torch.testing.assert_close(found[4], expected.float(), rtol=1e-6, atol=0.0)
