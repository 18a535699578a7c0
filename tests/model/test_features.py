"""Numeric features: how they are standardized, and what a missing number becomes."""

import pytest
import torch

from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.relevance import MISSING, FeatureEncoder, build_model

CONFIG = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=32, feature_sizes=(7,))
NAN = float("nan")


def spec_of(*numeric: str, missing: int = 0, bins: int = 0) -> InputSpec:
    spec = InputSpec(vocab_size=9, pad_id=0, labels=("a", "b"), label_gains=(0, 1), numeric=numeric, bins=bins)
    return spec.model_copy(update={"missing": numeric[:missing]})


def encoder_of(spec: InputSpec, rows: list[list[float]]) -> FeatureEncoder:
    encoder: FeatureEncoder = build_model(CONFIG, spec, seed=2).interactions.features
    encoder.fit(torch.tensor(rows))
    return encoder


def first_inputs(encoder: FeatureEncoder, rows: list[list[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What the first layer receives."""
    seen: list[torch.Tensor] = []
    hook = encoder.layers[0].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    encoder.to(dtype)(torch.tensor(rows).to(dtype), torch.zeros(len(rows), 0, dtype=torch.int32))
    hook.remove()
    return seen[0].detach().float()


def test_numbers_are_standardized_over_those_that_are_present() -> None:
    gaps = [[1.0, 5.0], [NAN, 5.0], [9.0, 5.0], [NAN, 5.0], [4.0, 5.0]]
    full = [[1.0, 5.0], [9.0, 5.0], [4.0, 5.0]]
    spec = spec_of("price", "lex_jaccard", missing=1)
    encoder, same = encoder_of(spec, gaps), encoder_of(spec, full)
    torch.testing.assert_close(encoder.scale, same.scale)
    torch.testing.assert_close(encoder.shift, same.shift)
    inputs = first_inputs(encoder, full)
    torch.testing.assert_close(inputs[:, 0].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(inputs[:, 0].std(unbiased=False), torch.tensor(1.0))
    assert not inputs[:, 1:].any(), "a constant, and the indicator of numbers that are all present"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_number_is_the_mean_and_sets_its_indicator(missing: int, dtype: torch.dtype) -> None:
    encoder = encoder_of(spec_of("price", "lex_jaccard", missing=missing), [[1.0, 0.1], [NAN, 0.2], [9.0, 0.3]])
    inputs = first_inputs(encoder, [[MISSING, 0.2], [-9.0, 0.2]], dtype)
    assert inputs.shape == (2, 2 + missing) and inputs[0, 0] == 0 and inputs[1, 0] < -1
    assert inputs[:, 2:].tolist() == [[1.0], [0.0]][: 2 if missing else 0] or not missing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_also_positions_in_bins_of_half_a_standard_deviation(dtype: torch.dtype) -> None:
    encoder = encoder_of(spec_of("price", "lex_jaccard", missing=1, bins=12), [[1.0, 0.1], [NAN, 0.2], [9.0, 0.3]])
    inputs = first_inputs(encoder, [[MISSING, 0.2], [4.0, 0.2], [1e6, 0.2], [-1e6, 0.2]], dtype)
    assert inputs.shape == (4, 3 + 12)
    assert inputs[0, 3:].tolist() == [1.0] * 6 + [0.0] * 6, "the mean"
    expected = ((inputs[1, 0] + 3 - torch.arange(12) / 2) * 2).clamp(0, 1)
    torch.testing.assert_close(inputs[1, 3:], expected, atol=0.01, rtol=0)
    assert (inputs[2, 3:] == 1).all() and (inputs[3, 3:] == 0).all()


def test_a_number_that_is_always_missing_is_zero() -> None:
    encoder = encoder_of(spec_of("price", missing=1), [[NAN], [NAN]])
    assert (encoder.scale.tolist(), encoder.shift.tolist()) == ([0.0], [0.0])
    assert first_inputs(encoder, [[MISSING], [3.0]]).tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_gradients_of_missing_numbers_are_finite() -> None:
    encoder = encoder_of(spec_of("price", "weight", missing=2), [[1.0, 2.0], [3.0, NAN]])
    encoder(torch.tensor([[MISSING, 2.0], [1.0, MISSING]]), torch.zeros(2, 0, dtype=torch.int32)).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_lexical_features_are_never_missing_so_their_models_stay_as_they_were() -> None:
    spec = spec_of("lex_jaccard", "lex_first_word")
    assert not spec.may_miss and "missing" not in spec.used_fields()
    encoder = encoder_of(spec, [[0.1, 1.0], [0.5, 0.0]])
    rows = torch.tensor([[0.2, 1.0]])
    expected = torch.sign(rows) * torch.log(1.0 + torch.abs(rows)) * encoder.scale + encoder.shift
    assert first_inputs(encoder, rows.tolist()).tolist() == expected.tolist()
