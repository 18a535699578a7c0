"""Every family of encoders gives the numbers of transformers: forwards, in training, packed into rows."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.backends import open_backend
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.encoder import TextEncoder
from pipeline.model.hf import FAMILIES, as_bert, encoder_from_hf, from_hf, hf_config, read_config, to_hf
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import build_model
from pipeline.model.weights import initial_model
from pipeline.parallel.activations import checkpointed_call
from tests.model.test_factory import packed

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.stage  # importing the models takes seconds
WITH_OFFSET = [name for name in FAMILIES if FAMILIES[name].is_bert_with_offset]
LONGEST = 200  # beyond the farthest distance of MPNet
PAD = 1
SPEC = InputSpec(vocab_size=50, pad_id=PAD, labels=("a", "b"), label_gains=(0.0, 1.0), numeric=("n",))
SHAPES = ((3, 6), (1, LONGEST), (5, 9))


def config_of(model_type: str, **changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": FAMILIES[model_type].architecture,
        "hidden_size": 32,
        "num_layers": 4,  # of ModernBERT two see everything
        "num_heads": 4,
        "intermediate_size": 64,
        "max_positions": LONGEST,
        "layer_norm_eps": 1e-5,
        "mlp_sizes": (8,),
    }
    return ModelConfig(**fields | changes)


def config_json(model_type: str, **changes: Any) -> dict[str, Any]:
    """Return what transformers writes of a family."""
    found: dict[str, Any] = json.loads(hf_config(config_of(model_type, **changes), SPEC))
    if model_type in WITH_OFFSET:
        positions = LONGEST + FAMILIES[model_type].offset(PAD)
        found |= {"model_type": model_type, "max_position_embeddings": positions, "type_vocab_size": 1}
    return found


def foreign(model_type: str, **changes: Any) -> torch.nn.Module:
    described = config_json(model_type, **changes) | {"embedding_dropout": 0.0, "mlp_dropout": 0.0}
    made = transformers.AutoConfig.for_model(**described, attn_implementation="eager")
    torch.manual_seed(11)
    pooler = {} if model_type == "modernbert" else {"add_pooling_layer": False}
    model: torch.nn.Module = transformers.AutoModel.from_config(made, **pooler)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def folder_of(model: torch.nn.Module, folder: Path) -> Path:
    folder.mkdir()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))  # type: ignore[union-attr,operator]
    return folder


def texts(rows: int, tokens: int, seed: int) -> torch.Tensor:
    """Padded to the right; every row has a token."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 50, (rows, tokens), generator=generator)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    return torch.where(torch.arange(tokens) < lengths, ids, PAD)


def theirs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    states: torch.Tensor = model(ids, attention_mask=(ids != PAD).long()).last_hidden_state
    return states


def ours_of(model_type: str, folder: Path, scratch: Path, **changes: Any) -> TextEncoder:
    config = config_of(model_type, init_from=str(folder), **changes)
    return initial_model(config, SPEC, 1, scratch).encoder


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_hidden_states_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = foreign(model_type).eval()
    folder = folder_of(model, tmp_path / "model")
    ours = ours_of(model_type, folder, tmp_path).eval()
    with torch.no_grad():
        for seed, shape in enumerate(SHAPES):
            ids = texts(*shape, seed)
            real = ids != PAD
            torch.testing.assert_close(ours.hidden_states(ids)[real], theirs(model, ids)[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_twenty_steps_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = foreign(model_type)
    folder = folder_of(model, tmp_path / "model")
    ours = ours_of(model_type, folder, tmp_path)
    losses = []
    for side in (ours, model):
        optimizer = torch.optim.AdamW(side.parameters(), lr=1e-3)
        found = []
        for step in range(20):
            ids = texts(6, 10, step)
            real = (ids != PAD).unsqueeze(-1).float()
            states = side.hidden_states(ids) if isinstance(side, TextEncoder) else theirs(side, ids)
            pooled = (states * real).sum(1) / real.sum(1)
            loss = (pooled - pooled.roll(1, 0)).square().mean() + pooled.sin().mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("architecture", ["bert", "mpnet", "modernbert"])
def test_texts_of_a_row_are_as_alone(architecture: str, pooling: str, tmp_path: Path) -> None:
    folder = folder_of(foreign(architecture), tmp_path / "model")
    ours = ours_of(architecture, folder, tmp_path, pooling=pooling).eval()
    alone, row = packed([4, 11, 2, 7], 5)
    padding = torch.full((1, 5), PAD, dtype=torch.int32)
    with torch.no_grad():
        together = ours.rows(*row, 5)[0]
        expected = torch.cat([ours(text) for text in alone])
        padded = torch.cat([ours(torch.cat([text, padding], dim=1)) for text in alone])
    torch.testing.assert_close(together[:4], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded, expected, rtol=1e-5, atol=1e-5)
    assert not together[4].any()


@pytest.mark.parametrize("architecture", ["mpnet", "modernbert"])
def test_forms_for_xla_and_recomputation_change_no_gradient(architecture: str, tmp_path: Path) -> None:
    folder = folder_of(foreign(architecture), tmp_path / "model")
    ids, found = texts(6, 10, 1), []
    for traced, again in ((False, False), (True, False), (False, True)):
        ours = ours_of(architecture, folder, tmp_path)
        choose_forms(ours, traced=traced, sums_by_matmul=traced)
        if again:
            ours.run_layer = partial(checkpointed_call, open_backend("cpu"))
        ours(ids).sin().sum().backward()
        found.append({name: parameter.grad for name, parameter in ours.named_parameters()})
    for name, expected in found[0].items():
        assert expected is not None and expected.any(), name
        for other in found[1:]:
            torch.testing.assert_close(other[name], expected, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("architecture", ["mpnet", "modernbert"])
def test_checkpoints_have_the_names_of_the_architecture(architecture: str, tmp_path: Path) -> None:
    """And transformers opens what they say of themselves."""
    model = initial_model(config_of(architecture), SPEC, 3, tmp_path)
    state = model.state_dict()
    named = to_hf(state)
    back = from_hf(named, state, source="x")
    assert all(torch.equal(tensor, back[name]) for name, tensor in state.items())
    folder = tmp_path / "theirs"
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(hf_config(config_of(architecture), SPEC))
    other = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    ids = texts(4, 9, 3)
    with torch.no_grad():
        found = model.encoder.eval().hidden_states(ids)
        torch.testing.assert_close(found[ids != PAD], theirs(other, ids)[ids != PAD], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_what_a_folder_says_of_itself_is_read_back(model_type: str) -> None:
    config = config_of(model_type)
    found = read_config(json.dumps(config_json(model_type)).encode(), "x")
    assert found.model_type == model_type
    found.check(config, source="x")
    assert found.fields().items() <= config.model_dump().items()


MODERN = {"model_type": "modernbert", "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 5} | {
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


ROPES = {"full_attention": {"rope_theta": 160_000, "rope_type": "default"}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2, "num_hidden_layers": 6},
        {"rope_parameters": ROPES, "sliding_window": 64},
    ],
)
def test_both_forms_of_a_modernbert(changes: dict[str, Any]) -> None:
    assert read_config(json.dumps(MODERN | changes).encode(), "x").fields()["architecture"] == "modernbert"


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"layer_types": ["sliding_attention"] * 5}, "layer_types"),
        ({"local_attention": 64}, "local_attention"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e4}}}, "rope_theta"),
        ({"norm_bias": True}, "norm_bias"),
        ({"hidden_activation": "silu"}, "hidden_activation"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type"),
        ({"local_rope_theta": None}, "local_rope_theta"),
    ],
)
def test_a_modernbert_that_is_not_computed(changes: dict[str, Any], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        read_config(json.dumps(MODERN | changes).encode(), "x")


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"architecture": "mpnet"}, "--model.architecture modernbert"),
        ({"num_heads": 8}, "--model.num-heads 4"),
        ({"layer_norm_eps": 1e-12}, "--model.layer-norm-eps 1e-05"),
        ({"max_positions": 300}, "--model.max-positions 200"),
    ],
)
def test_settings_that_would_compute_something_else(tmp_path: Path, changes: dict[str, Any], flag: str) -> None:
    folder = folder_of(foreign("modernbert"), tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        ours_of("modernbert", folder, tmp_path, **changes)
    assert str(folder / "config.json") in str(caught.value) and caught.value.next_command == flag


def test_an_mpnet_needs_the_padding_token_of_mpnet() -> None:
    with pytest.raises(ConfigError, match="pad_id 0"):
        initial_model(config_of("mpnet"), SPEC.model_copy(update={"pad_id": 0}), 1, Path())


def in_our_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return encoder_from_hf(weights, build_model(config_of("bert"), SPEC, 3).state_dict(), source="x")


@pytest.mark.parametrize(
    "renamed",
    [
        lambda name: f"bert.{name}",
        # bert-base-uncased as published names layer norms so.
        lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
    ],
)
def test_other_names_of_the_same_tensors(renamed: Callable[[str], str]) -> None:
    weights = foreign("bert").state_dict()
    other = {renamed(name): tensor for name, tensor in weights.items()} | {"cls.predictions.bias": torch.zeros(50)}
    expected, found = in_our_names(weights), in_our_names(other)
    assert other.keys() != weights.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_task_heads_and_prefixes(tmp_path: Path) -> None:
    weights = {f"roberta.{name}": tensor for name, tensor in foreign("roberta").state_dict().items()}
    weights |= {"lm_head.bias": torch.zeros(50), "roberta.pooler.dense.bias": torch.zeros(32)}
    found = as_bert(weights, "roberta", PAD, source="x")
    assert not any(name.startswith("roberta.") for name in found)
    assert in_our_names(found).keys() == in_our_names(foreign("bert").state_dict()).keys()


@pytest.mark.parametrize(
    ("tables", "seen"),
    [
        ({}, "no such tensor"),
        ({"embeddings.position_embeddings.weight": torch.zeros(2, 4)}, r"shape \[2, 4\]"),
        ({"embeddings.position_embeddings.weight": torch.zeros(9, 4)}, "token_type_embeddings.weight: no such"),
    ],
)
def test_tables_that_are_none_of_it(tables: dict[str, torch.Tensor], seen: str) -> None:
    with pytest.raises(CheckpointError, match=seen):
        as_bert(tables, "roberta", PAD, source="x")
