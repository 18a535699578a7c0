"""Flat parameters: the same tensors, the same gradients."""

import torch
from torch import nn

from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.flat import FlatLayout
from pipeline.model.relevance import RelevanceInputs, build_model

CONFIG = ModelConfig(
    hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, interaction_size=8, mlp_sizes=(12,)
)
SPEC = InputSpec(vocab_size=30, pad_id=0, labels=("a", "b"), label_gains=(0.0, 1.0), categorical_ids=(4,))


def test_round_trip_is_bit_exact_and_keeps_names_and_shapes() -> None:
    state = build_model(CONFIG, SPEC, 1).state_dict()
    layout = FlatLayout.of(build_model(CONFIG, SPEC, 1))
    flats = layout.pack(state)
    assert [flat.numel() for flat in flats] == list(layout.sizes)
    assert sum(layout.sizes) == sum(tensor.numel() for tensor in state.values())
    back = layout.unpack(flats)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    low = layout.pack({name: tensor.double() for name, tensor in state.items()})
    assert all(flat.dtype == torch.float32 for flat in low)


def test_only_matrices_are_decayed() -> None:
    layout = FlatLayout.of(build_model(CONFIG, SPEC, 1))
    decayed, plain = (set(group) for group in layout.names)
    assert {name for name in decayed | plain if name.endswith("bias") or "norm" in name} == plain
    assert "encoder.word_embeddings.weight" in decayed and "encoder.layers.0.output_norm.weight" in plain


def test_gradients_equal_those_of_plain_parameters() -> None:
    model = build_model(CONFIG, SPEC, 1)
    generator = torch.Generator().manual_seed(1)
    inputs = RelevanceInputs(
        torch.randint(0, 30, (4, 6), generator=generator),
        torch.randint(0, 30, (4, 8), generator=generator),
        torch.zeros(4, 0),
        torch.randint(0, 4, (4, 1), generator=generator),
    )
    model(inputs).logits.square().sum().backward()
    layout = FlatLayout.of(model)
    flats = [flat.requires_grad_() for flat in layout.pack(model.state_dict())]
    outputs = torch.func.functional_call(model, layout.unpack(flats), (inputs,))
    gradients = layout.unpack(torch.autograd.grad(outputs.logits.square().sum(), flats))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-6, atol=1e-8)


def test_an_unused_parameter_gets_a_zero_gradient() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(3, 3)})
    layout = FlatLayout.of(module)
    flats = [flat.requires_grad_() for flat in layout.pack(module.state_dict())]
    named = layout.unpack(flats)
    gradients = layout.unpack(torch.autograd.grad((named["used.weight"].sum() + named["used.bias"].sum()), flats))
    assert (gradients["used.weight"] == 1).all() and (gradients["idle.weight"] == 0).all()
