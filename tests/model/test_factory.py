"""Encoders that a function of the user builds: as exact as our own, and refused in one line where they are none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from pipeline.backends import open_backend
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.model.config import InputSpec, ModelConfig, check_architecture
from pipeline.model.factory import PREFIX, FactoryEncoder
from pipeline.model.hf import from_hf, hf_config, to_hf
from pipeline.model.relevance import RelevanceModel, build_model
from pipeline.model.weights import initial_model
from pipeline.parallel.strategies.flat import parameters_to_meta

pytestmark = pytest.mark.stage
PLACE = "tests.model.factories"
PAD = 1
# Of `used_fields` before there were factories.
GOLDEN, GOLDEN_MODERN = "4b8c1d523aaba0022d05320e364e81e0", "a2f0245d47f55f312b9a8cc063fc3fdd"
SPEC = InputSpec(vocab_size=50, pad_id=PAD, labels=("a", "b"), label_gains=(0.0, 1.0), numeric=("n",))


def config_of(name: str, **changes: Any) -> ModelConfig:
    fields = {
        "factory": name if ":" in name else f"{PLACE}:{name}",
        "hidden_size": 16,
        "max_positions": 40,
        "mlp_sizes": (8,),
    }
    return ModelConfig.model_validate({**fields, **changes})


def encoder_of(name: str, **changes: Any) -> FactoryEncoder:
    made = build_model(config_of(name, **changes), SPEC, 3).encoder.eval()
    assert isinstance(made, FactoryEncoder)
    return made


Row = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def packed(lengths: list[int], rest: int) -> tuple[list[torch.Tensor], Row]:
    """Texts alone [1, n], and all of them in one row with `rest` tokens of padding: tokens, positions, segments."""
    generator = torch.Generator().manual_seed(5)
    alone = [torch.randint(2, 50, (1, length), generator=generator, dtype=torch.int32) for length in lengths]
    padding = torch.full((1, rest), PAD, dtype=torch.int32)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in [*lengths, rest]])[None]
    segments = [torch.full((n,), number + 1, dtype=torch.int32) for number, n in enumerate(lengths)]
    together = torch.cat([*segments, torch.zeros(rest, dtype=torch.int32)])[None]
    return alone, (torch.cat([*alone, padding], dim=1), positions, together)


@pytest.mark.parametrize("longest", [40, 11])
@pytest.mark.parametrize(("change", "pooling"), [("", "mean"), ("", "cls"), ("", "last"), ("vectors", "mean")])
def test_texts_of_a_row_are_as_alone(change: str, pooling: str, longest: int) -> None:
    made = encoder_of("states", factory_options={"change": change}, pooling=pooling)
    made.longest_text = longest
    alone, row = packed([4, 11, 2, 7], 5)
    with torch.no_grad():
        together = made.rows(*row, 5)[0]
        expected = torch.cat([made(text) for text in alone])
    torch.testing.assert_close(together[:4], expected, rtol=1e-5, atol=1e-6)
    assert not together[4].any()


def test_an_empty_text_gives_no_gradient_that_is_not_finite() -> None:
    made = encoder_of("states").train()
    _, row = packed([4, 3], 1)
    made.rows(*row, 4).square().sum().backward()  # type: ignore[no-untyped-call]
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_the_seed_decides_the_weights_and_nothing_else_moves() -> None:
    config = config_of("states")
    before = torch.get_rng_state()
    first, again, other = (FactoryEncoder(config, 50, PAD, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["module.words.weight"], other["module.words.weight"])


def test_made_whole_where_only_the_structure_is_asked_for() -> None:
    with torch.device("meta"):
        model = RelevanceModel(config_of("states"), SPEC)
    assert {tensor.device.type for tensor in model.encoder.state_dict().values()} == {"cpu"}
    backend = open_backend("cpu")
    bare = parameters_to_meta(model, backend)
    assert {tensor.device.type for tensor in bare.state_dict().values()} == {"meta"}
    assert isinstance(bare.encoder, FactoryEncoder)
    assert torch.equal(bare.encoder.module.get_buffer("share"), torch.full((16,), 0.5))


def test_names_of_a_checkpoint_and_back() -> None:
    state = build_model(config_of("states"), SPEC, 3).state_dict()
    named = to_hf(state)
    assert {name for name in named if "words" in name} == {"encoder.module.words.weight"}
    back = from_hf(named, state, source="x")
    assert all(torch.equal(tensor, back[name]) for name, tensor in state.items())
    described = json.loads(hf_config(config_of("states", factory_options={"width": 16}), SPEC))
    assert described["model_type"] == "trnpipe-factory" and described["factory_options"] == '{"width": 16}'


# What it takes from a file.


@pytest.mark.parametrize("prefix", ["", "model.", "bert.encoder."])
def test_weights_with_a_prefix_and_heads_beside_them(tmp_path: Path, prefix: str) -> None:
    given = encoder_of("states").module.state_dict()
    weights = {prefix + name: tensor + 1.0 for name, tensor in given.items()}
    weights |= {
        "cls.bias": torch.zeros(3),
        "h.0.mask": torch.ones(2, dtype=torch.bool),
        "h.0.far": torch.tensor(-torch.inf),
    }
    save_file(weights, tmp_path / "model.safetensors")
    found = initial_model(config_of("states", init_from=str(tmp_path)), SPEC, 9, tmp_path).state_dict()
    for name, tensor in given.items():
        assert torch.equal(found[PREFIX + name], tensor + 1.0)


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"mix.bias": None}, "mix.bias: no such tensor"),
        ({"words.weight": torch.zeros(60, 16)}, r"words.weight: shape \[60, 16\]"),
        ({"words.weight": None, "mix.bias": None, "mix.weight": None}, "words.weight: no such tensor"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, changes: dict[str, torch.Tensor | None], seen: str) -> None:
    weights: dict[str, Any] = {**encoder_of("states").module.state_dict(), "other": torch.zeros(1), **changes}
    save_file({name: one for name, one in weights.items() if one is not None}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=seen) as caught:
        initial_model(config_of("states", init_from=str(tmp_path)), SPEC, 9, tmp_path)
    assert caught.value.exit_code == 74 and f"{PLACE}:states" in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "options", "seen"),
    [
        ("no_such_package.encoders:build", {}, "raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("nothing", {}, "has no function nothing"),
        ("no_arguments", {}, r"has no_arguments\(\)"),
        ("raises", {}, r"raised KeyError: 'layers' \(.*factories.py:\d+\)"),
        ("states", {"depth": 2}, "raised TypeError: .*'depth'"),
        ("states", {"change": "tuple"}, "returned a tuple for 2 texts of 8 tokens"),
        ("states", {"change": "scores"}, r"returned shape \[2\]"),
        ("states", {"change": "integers"}, "returned a tensor of torch.int64"),
        ("states", {"change": "nan"}, "returned NaN or infinite values"),
        ("states", {"change": "raise"}, r"raised RuntimeError: no such head \(.*factories.py:\d+\)$"),
        ("states", {"change": "padding"}, "changes by .* when its row is padded from 8 to 40 tokens"),
        ("states", {"width": 24}, r"returned shape \[2, 8, 24\]"),
        ("wrong", {"fault": "no module"}, "returned a str"),
        ("wrong", {"fault": "few words"}, "called with 2 texts of 8 tokens, raised IndexError"),
        ("wrong", {"fault": "few positions"}, "called with 1 texts of 40 tokens, raised IndexError"),
        ("wrong", {"fault": "tied"}, "words.weight and again.weight, which are tied"),
        ("wrong", {"fault": "frozen"}, "words.weight, which does not require gradients"),
        ("wrong", {"fault": "buffer"}, "norm.running_var, a persistent buffer"),
        ("wrong", {"fault": "empty"}, "its module has no parameter"),
    ],
)
def test_a_factory_that_is_none(factory: str, options: dict[str, Any], seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(config_of(factory, factory_options=options), SPEC, 1)
    first, *_ = str(caught.value).splitlines()
    assert first.startswith("model.factory ") and re.search(seen, first), first
    assert caught.value.exit_code == 78 and caught.value.next_command


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"hidden_size": None}, "factory is set without hidden_size"),
        ({"dropout": 0.1}, "dropout has no effect with a factory"),
        ({"architecture": "mpnet"}, "architecture has no effect with a factory"),
        ({"factory": None, "factory_options": {"a": 1}}, "factory_options is set without factory"),
        ({"factory": "os.system"}, "pattern"),
    ],
)
def test_settings_that_say_nothing_to_a_factory(changes: dict[str, Any], seen: str) -> None:
    with pytest.raises(ValidationError, match=seen):
        config_of("states", **changes)


def test_what_an_identity_holds_and_a_parent_must_share() -> None:
    """Nothing new without a factory; its name and options with one, and no size that is of our own encoders."""
    assert fingerprint(ModelConfig().used_fields()) == GOLDEN
    assert fingerprint(ModelConfig(architecture="modernbert").used_fields()) == GOLDEN_MODERN
    plain = config_of("states")
    assert {"factory", "factory_options"} <= plain.used_fields().keys()
    assert plain.model_copy(update={"num_layers": 9}).used_fields() == plain.used_fields()
    assert config_of("states", factory_options={"width": 16}).used_fields() != plain.used_fields()
    assert plain.model_copy(update={"num_layers": 9}).shape() == plain.shape()

    check_architecture(plain.model_copy(update={"num_layers": 9}), plain, source="x")
    with pytest.raises(ConfigError, match=r"x has model\.factory None"):
        check_architecture(ModelConfig(hidden_size=16, max_positions=40, mlp_sizes=(8,)), plain, source="x")
    with pytest.raises(ConfigError, match=r"model\.factory_options"):
        check_architecture(config_of("states", factory_options={"width": 16}), plain, source="x")
