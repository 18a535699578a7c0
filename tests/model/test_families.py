"""RoBERTa, XLM-R and CamemBERT are the encoder we have: same numbers as transformers, forwards and in training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.encoder import TextEncoder
from pipeline.model.families import FAMILIES, as_bert, family_config, from_bert
from pipeline.model.hf import hf_config, initial_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.stage  # importing the models takes seconds
OTHERS = [name for name in FAMILIES if name != "bert"]
CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    intermediate_size=64,
    max_positions=24,
    layer_norm_eps=1e-5,
    mlp_sizes=(8,),
)
PAD = 1
SPEC = InputSpec(vocab_size=50, pad_id=PAD, labels=("a", "b"), label_gains=(0.0, 1.0), numeric=("n",))
SHAPES = ((3, 6), (1, 24), (5, 9))


def foreign(model_type: str) -> torch.nn.Module:
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=24 + PAD + 1,
        type_vocab_size=1,
        pad_token_id=PAD,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(11)
    model: torch.nn.Module = transformers.AutoModel.from_config(config, add_pooling_layer=False)
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


@pytest.mark.parametrize("model_type", OTHERS)
def test_hidden_states_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = foreign(model_type).eval()
    folder = folder_of(model, tmp_path / "model")
    ours = initial_model(CONFIG.model_copy(update={"init_from": str(folder)}), SPEC, 1, tmp_path).encoder.eval()
    with torch.no_grad():
        for seed, shape in enumerate(SHAPES):
            ids = texts(*shape, seed)
            real = ids != PAD
            torch.testing.assert_close(ours.hidden_states(ids)[real], theirs(model, ids)[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", OTHERS)
def test_twenty_steps_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    model = foreign(model_type)
    folder = folder_of(model, tmp_path / "model")
    ours = initial_model(CONFIG.model_copy(update={"init_from": str(folder)}), SPEC, 1, tmp_path).encoder
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


@pytest.mark.parametrize("model_type", OTHERS)
def test_there_and_back(model_type: str) -> None:
    """Of the rows of padding nothing is kept: no token of a text reads them."""
    weights = {name: tensor for name, tensor in foreign(model_type).state_dict().items() if "position_ids" not in name}
    back = from_bert(as_bert(weights, model_type, PAD, source="x"), model_type, PAD)
    assert back.keys() == {name for name in weights if "token_type_ids" not in name}
    for name, tensor in back.items():
        rows = slice(PAD + 1, None) if "position" in name else slice(None)
        assert torch.equal(tensor[rows], weights[name][rows])
    described = family_config(json.loads(hf_config(CONFIG, SPEC)), model_type)
    assert (described["model_type"], described["max_position_embeddings"], described["type_vocab_size"]) == (
        model_type,
        24 + PAD + 1,
        1,
    )


def test_task_heads_and_prefixes(tmp_path: Path) -> None:
    weights = {f"roberta.{name}": tensor for name, tensor in foreign("roberta").state_dict().items()}
    weights |= {"lm_head.bias": torch.zeros(50), "roberta.pooler.dense.bias": torch.zeros(32)}
    found = as_bert(weights, "roberta", PAD, source="x")
    assert not any(name.startswith(("roberta.", "lm_head.", "pooler.")) for name in found)


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


@pytest.mark.parametrize(("content", "seen"), [('{"model_type": "t5"}', "architecture t5"), ("[", "config.json")])
def test_an_architecture_that_is_not_computed(tmp_path: Path, content: str, seen: str) -> None:
    folder = folder_of(foreign("roberta"), tmp_path / "model")
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=seen):
        initial_model(CONFIG.model_copy(update={"init_from": str(folder)}), SPEC, 1, tmp_path)
