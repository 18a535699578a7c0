"""The whole model in its three interaction modes."""

import pytest
import torch
from torch import Tensor

from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.interactions import CrossNetwork
from pipeline.model.relevance import RelevanceInputs, RelevanceModel, build_model

CONFIG = ModelConfig(
    hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, interaction_size=8, mlp_sizes=(12,)
)
SPEC = InputSpec(
    vocab_size=30,
    pad_id=0,
    labels=("a", "b", "c"),
    label_gains=(0.0, 0.5, 1.0),
    numeric=("x", "y"),
    categorical_ids=(4, 6),
)
MODES = ("explicit", "implicit", "both")


def inputs_of(query_tokens: int, product_tokens: int, batch: int = 5) -> RelevanceInputs:
    generator = torch.Generator().manual_seed(1)

    def text(tokens: int) -> Tensor:
        ids = torch.randint(1, 30, (batch, 4), generator=generator, dtype=torch.int32)
        return torch.cat([ids, torch.zeros(batch, tokens - 4, dtype=torch.int32)], dim=1)

    return RelevanceInputs(
        text(query_tokens),
        text(product_tokens),
        torch.randn(batch, 2, generator=generator) * 100,
        torch.randint(0, 4, (batch, 2), generator=generator, dtype=torch.int32),
    )


def model_of(mode: str = "both", spec: InputSpec = SPEC) -> RelevanceModel:
    return build_model(CONFIG.model_copy(update={"interactions": mode}), spec, seed=2).eval()


@pytest.mark.parametrize("mode", MODES)
def test_every_parameter_and_every_input_matters(mode: str) -> None:
    model = model_of(mode)
    inputs = inputs_of(6, 6)
    outputs = model(inputs)
    assert outputs.logits.shape == (5, 3)
    assert outputs.query.shape == outputs.product.shape == (5, 16)
    outputs.logits.square().sum().backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert not unused
    for field in ("numeric", "categorical", "query", "product"):
        other = inputs._replace(**{field: getattr(inputs, field).flip(0)})
        assert not torch.allclose(model(other).logits, outputs.logits, atol=1e-7), field


@pytest.mark.parametrize("mode", MODES)
def test_one_or_two_encoder_passes_give_the_same(mode: str) -> None:
    model = model_of(mode)
    equal, unequal = model(inputs_of(6, 6)), model(inputs_of(6, 9))
    for one, two in zip(equal, unequal, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_without_features(mode: str) -> None:
    model = model_of(mode, SPEC.model_copy(update={"numeric": (), "categorical_ids": ()}))
    inputs = inputs_of(6, 6)._replace(numeric=torch.zeros(5, 0), categorical=torch.zeros(5, 0, dtype=torch.int32))
    assert torch.isfinite(model(inputs).logits).all()


def test_samples_do_not_see_each_other() -> None:
    model, inputs = model_of(), inputs_of(6, 9)
    alone = model(RelevanceInputs(*(field[2:3] for field in inputs)))
    torch.testing.assert_close(alone.logits, model(inputs).logits[2:3], rtol=1e-5, atol=1e-6)


def test_the_cross_network_is_the_formula_of_its_paper() -> None:
    network = CrossNetwork(3, 2)
    x0 = torch.randn(4, 3)
    expected = x0
    for layer in network.layers:
        assert isinstance(layer, torch.nn.Linear)
        expected = x0 * (expected @ layer.weight.T + layer.bias) + expected
    torch.testing.assert_close(network(x0), expected)
    assert torch.equal(CrossNetwork(3, 0)(x0), x0)


def test_huge_numbers_in_features_stay_finite() -> None:
    inputs = inputs_of(6, 6)
    assert torch.isfinite(model_of()(inputs._replace(numeric=torch.full((5, 2), -3e38))).logits).all()
