"""Small foreign models as files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pipeline.convert.folder import ImportSource, open_source
from pipeline.convert.importing import ForeignModel, ImportDefaults, read_model
from pipeline.core.stop import StopSignal
from pipeline.data.config import TokenizerConfig
from pipeline.data.tokenizer import TextTokenizer, train_tokenizer
from pipeline.io.requests import RetryPolicy
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import to_hf
from pipeline.model.relevance import build_model

RETRY = RetryPolicy()
TEXT = "the red blue running shoe phone case leather size large small für größe 12 64 gb café ü ö x"
MODEL = ModelConfig(
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    intermediate_size=24,
    max_positions=32,
    interaction_size=8,
    cross_layers=1,
    mlp_sizes=(8,),
    feature_sizes=(4,),
)
SPEC = InputSpec(vocab_size=8, pad_id=0, labels=("no", "yes"), label_gains=(0.0, 1.0), numeric=("price",))


def tokenizer_bytes(*, lowercase: bool = True) -> bytes:
    words = TEXT.split()
    texts = [" ".join(words[place:] + words[:place]) for place in range(len(words))]
    content = json.loads(train_tokenizer([*texts, *(text.title() for text in texts)], TokenizerConfig()))
    content["normalizer"] |= {"lowercase": lowercase, "strip_accents": lowercase}
    return json.dumps(content).encode()


def bert_json(vocab_size: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": vocab_size,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 32,
        **changes,
    }


def encoder_weights(vocab_size: int, seed: int = 3) -> dict[str, Tensor]:
    """A random encoder under the names of transformers, far from its initial values."""
    spec = SPEC.model_copy(update={"vocab_size": vocab_size})
    generator = torch.Generator().manual_seed(seed)
    state = build_model(MODEL, spec, seed).state_dict()
    named = {name: tensor for name, tensor in to_hf(state).items() if name.startswith("bert.")}
    return {
        name.removeprefix("bert."): tensor + torch.randn(tensor.shape, generator=generator) * 0.2
        for name, tensor in named.items()
    }


@dataclass
class Folder:
    """A Hugging Face folder, written file by file."""

    path: Path
    tokenizer: bytes = field(default_factory=tokenizer_bytes)
    weights: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.mkdir(parents=True)
        self.vocab_size = TextTokenizer(self.tokenizer).vocab_size
        self.weights = encoder_weights(self.vocab_size)
        self.json("config.json", bert_json(self.vocab_size))
        self.json("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 24})
        (self.path / "tokenizer.json").write_bytes(self.tokenizer)
        self.save()

    def json(self, name: str, content: Any) -> None:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))

    def save(self, **changes: Tensor) -> None:
        self.weights |= changes
        save_file(self.weights, self.path / "model.safetensors", {"format": "pt"})

    def sentence(self, *, pooling: Mapping[str, Any] | None = None, **settings: Any) -> None:
        """Make it a folder of sentence-transformers."""
        kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
        modules = [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (kind, path) in enumerate(kinds)
        ]
        self.json("modules.json", modules)
        self.json(
            "1_Pooling/config.json", pooling or {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
        )
        self.json("sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False, **settings})

    @property
    def source(self) -> ImportSource:
        return source_of(self.path)

    def read(self, **changes: Any) -> ForeignModel:
        return read_model(self.source, given(**changes), self.path.parent / "scratch")


def source_of(path: Path | str) -> ImportSource:
    return open_source(str(path), retry=RETRY, stop=StopSignal())


def given(**changes: Any) -> ImportDefaults:
    fields: dict[str, Any] = {"model": MODEL, "spec": SPEC, "tokenizer": None, "seed": 5}
    return ImportDefaults(**{**fields, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "model")
