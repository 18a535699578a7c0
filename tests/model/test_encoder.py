"""The encoder's own properties; test_families.py compares it with Hugging Face's."""

from pathlib import Path

import pytest
import torch

from pipeline.core.errors import CheckpointError
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.encoder import BertEncoder
from pipeline.model.relevance import build_model
from pipeline.model.weights import initial_model

CONFIG = ModelConfig(hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64, max_positions=24, mlp_sizes=(8,))
SPEC = InputSpec(vocab_size=50, pad_id=0, labels=("a", "b"), label_gains=(0.0, 1.0), numeric=("n",))
TOKENS = torch.tensor([[1, 7, 8, 2, 0, 0], [1, 9, 30, 31, 49, 2], [1, 2, 0, 0, 0, 0]])


def test_a_folder_without_weights_is_a_checkpoint_error(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"init_from": str(tmp_path)})
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        initial_model(config, SPEC, 3, tmp_path / "scratch")
    (tmp_path / "model.safetensors").write_bytes(b"not it")
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        initial_model(config, SPEC, 3, tmp_path / "scratch")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_changes_nothing(pooling: str) -> None:
    encoder = BertEncoder(CONFIG.model_copy(update={"pooling": pooling}), 50, pad_id=0)
    short = encoder(TOKENS)
    longer = encoder(torch.cat([TOKENS, torch.zeros(3, 9, dtype=TOKENS.dtype)], dim=1))
    torch.testing.assert_close(short, longer, rtol=1e-5, atol=1e-6)


def test_mean_pooling_is_over_real_tokens() -> None:
    encoder = BertEncoder(CONFIG, 50, pad_id=0)
    states = encoder.hidden_states(TOKENS)
    torch.testing.assert_close(encoder(TOKENS)[0], states[0, :4].mean(0))
    assert torch.isfinite(encoder(torch.zeros(1, 5, dtype=torch.int64))).all()  # a text of padding only


def test_initial_weights_are_a_function_of_the_seed() -> None:
    one, same, other = (build_model(CONFIG, SPEC, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])
    assert float(one["encoder.word_embeddings.weight"].std()) == pytest.approx(0.02, rel=0.1)
