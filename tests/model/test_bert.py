"""The encoder is Hugging Face BERT: same numbers, same names, both ways."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.core.errors import CheckpointError
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import encoder_from_hf, hf_config, to_hf
from pipeline.model.relevance import RelevanceModel, build_model
from pipeline.model.weights import initial_model

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.stage  # importing BertModel takes seconds

CONFIG = ModelConfig(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_positions=24, mlp_sizes=(8,))
SPEC = InputSpec(vocab_size=50, pad_id=0, labels=("a", "b"), label_gains=(0.0, 1.0), numeric=("n",))
TOKENS = torch.tensor([[1, 7, 8, 2, 0, 0], [1, 9, 30, 31, 49, 2], [1, 2, 0, 0, 0, 0]])


def random_model() -> RelevanceModel:
    """Weights far from their initial values, biases and norms included."""
    model = build_model(CONFIG, SPEC, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def folder_of(model: RelevanceModel, folder: Path) -> Path:
    save_file(
        {name: tensor.contiguous() for name, tensor in to_hf(model.state_dict()).items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(hf_config(CONFIG, SPEC))
    return folder


def bert_states(bert: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        states: torch.Tensor = bert.eval()(TOKENS, attention_mask=(TOKENS != 0).long()).last_hidden_state
    return states


def assert_same_on_real_tokens(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    real = TOKENS != 0
    torch.testing.assert_close(ours[real], theirs[real], rtol=1e-5, atol=1e-5)


def test_bert_opens_our_checkpoint_folder_and_agrees(tmp_path: Path) -> None:
    model = random_model()
    bert = transformers.BertModel.from_pretrained(folder_of(model, tmp_path), add_pooling_layer=False)
    assert_same_on_real_tokens(model.encoder.hidden_states(TOKENS), bert_states(bert))


def random_bert(**changes: int) -> torch.nn.Module:
    torch.manual_seed(11)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 40,  # more than ours: the first rows are taken
    }
    bert: torch.nn.Module = transformers.BertModel(transformers.BertConfig(**{**sizes, **changes}))
    with torch.no_grad():
        for parameter in bert.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return bert


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_we_start_from_a_bert_folder_and_agree(tmp_path: Path, prefix: str) -> None:
    bert = random_bert()
    weights = {prefix + name: tensor.contiguous() for name, tensor in bert.state_dict().items()}
    if prefix:
        weights["cls.predictions.bias"] = torch.zeros(50)
        weights["classifier.weight"] = torch.zeros(2, 32)
    save_file(weights, tmp_path / "model.safetensors")
    config = CONFIG.model_copy(update={"init_from": str(tmp_path)})
    model = initial_model(config, SPEC, 3, tmp_path / "scratch")
    assert_same_on_real_tokens(model.eval().encoder.hidden_states(TOKENS), bert_states(bert))
    fresh = build_model(CONFIG, SPEC, 3).state_dict()
    head = {name for name in fresh if not name.startswith("encoder.")}
    assert head and all(torch.equal(model.state_dict()[name], fresh[name]) for name in head)


def test_layer_norms_called_gamma_and_beta_are_understood() -> None:
    """bert-base-uncased as published names them so."""
    template = build_model(CONFIG, SPEC, 3).state_dict()
    weights = random_bert().state_dict()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in weights.items()
    }
    assert old.keys() != weights.keys()
    expected, seen = (encoder_from_hf(w, template, source="x") for w in (weights, old))
    assert all(torch.equal(expected[name], seen[name]) for name in expected)


def test_a_bert_of_other_sizes_is_refused_by_name() -> None:
    template = build_model(CONFIG, SPEC, 3).state_dict()
    with pytest.raises(CheckpointError, match=r"bert.encoder.layer.2.* has no place"):
        encoder_from_hf(random_bert(num_hidden_layers=3).state_dict(), template, source="x")
    with pytest.raises(CheckpointError, match=r"bert.encoder.layer.1.*no such tensor"):
        encoder_from_hf(random_bert(num_hidden_layers=1).state_dict(), template, source="x")
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight: shape \[60, 32\]"):
        encoder_from_hf(random_bert(vocab_size=60).state_dict(), template, source="x")
    with pytest.raises(CheckpointError, match="has no place"):
        encoder_from_hf({**random_bert().state_dict(), "embeddings.rotary": torch.zeros(1)}, template, source="x")
    with pytest.raises(CheckpointError, match=r"position_embeddings.weight: shape \[16, 32\]"):
        encoder_from_hf(random_bert(max_position_embeddings=16).state_dict(), template, source="x")
