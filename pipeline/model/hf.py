"""Weights under Hugging Face BERT names, so that `transformers` and every backend read the same file.

Encoder tensors carry the prefix `bert.`; interactions and head keep their own names.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.io.storage import KeyNotFound, Storage, open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.families import FAMILIES, as_bert
from pipeline.model.relevance import RelevanceModel, build_model

PREFIX = "bert."
ENCODER_PARTS = ("embeddings.", "encoder.")
"""How names of the encoder begin where they have no prefix, as `transformers.BertModel` has them."""
HEAD_PARTS = ("interactions.", "head.")
"""How the names of everything else begin."""
_OF_TRAINING = ("temperature.",)
"""How names begin that only a training run has a use for."""
_OPTIONAL = ("pooler.", "cls.", "classifier.", "qa_outputs.", "embeddings.position_ids", *_OF_TRAINING)
_OLD_NORM = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # as in bert-base-uncased
_EMBEDDINGS = {
    "word_embeddings.weight": "embeddings.word_embeddings.weight",
    "position_embeddings.weight": "embeddings.position_embeddings.weight",
    "type_embeddings.weight": "embeddings.token_type_embeddings.weight",
    "embedding_norm.weight": "embeddings.LayerNorm.weight",
    "embedding_norm.bias": "embeddings.LayerNorm.bias",
}
_LAYER = {
    "attention_output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


def to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict to Hugging Face names; the joint query-key-value matrix is cut in three."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.startswith("encoder."):
            result[name] = tensor
        elif ".qkv." in name:
            layer, kind = name.removeprefix("encoder.layers.").split(".qkv.")
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3, dim=0), strict=True):
                result[f"{PREFIX}encoder.layer.{layer}.attention.self.{part}.{kind}"] = piece
        else:
            result[_hf_name(name.removeprefix("encoder."))] = tensor
    return result


def _hf_name(name: str) -> str:
    if name in _EMBEDDINGS:
        return PREFIX + _EMBEDDINGS[name]
    _, layer, part, kind = name.split(".")
    return f"{PREFIX}encoder.layer.{layer}.{_LAYER[part]}.{kind}"


def from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Hugging Face names back to ours, complete and in the shapes of `template`.

    Raises CheckpointError naming the first tensor that is missing or of another shape: another architecture.
    """
    result: dict[str, Tensor] = {}
    # Scale and shift of features as models had them before they were kept: none.
    fills = {"interactions.features.scale": torch.ones, "interactions.features.shift": torch.zeros}
    weights = {name: fill(template[name].shape) for name, fill in fills.items() if name in template} | dict(weights)
    for name, tensor in _expected(template).items():
        found = weights.get(name)
        if found is None or found.shape != tensor.shape:
            seen = "no such tensor" if found is None else f"shape {list(found.shape)}"
            raise CheckpointError(
                f"{source}: {name}: {seen}",
                expected=f"shape {list(tensor.shape)}, from the model settings",
                next_command="use the model settings of the checkpoint (its state.json), or --train.start scratch",
            )
    for name in template:
        if ".qkv." in name:
            layer, kind = name.removeprefix("encoder.layers.").split(".qkv.")
            parts = [
                weights[f"{PREFIX}encoder.layer.{layer}.attention.self.{part}.{kind}"]
                for part in ("query", "key", "value")
            ]
            result[name] = torch.cat(parts, dim=0)
        else:
            hf_name = _hf_name(name.removeprefix("encoder.")) if name.startswith("encoder.") else name
            result[name] = weights[hf_name]
    return result


def encoder_from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """The encoder's part of a foreign BERT/MiniLM checkpoint (with or without the `bert.` prefix), in our names.

    Position rows beyond ours are left out; pooler and task heads are ignored; anything else unknown is an error.
    """

    def modern(name: str) -> str:
        for old, new in _OLD_NORM.items():  # layer norms of checkpoints converted from TensorFlow
            name = name.replace(old, new)
        return PREFIX + name.removeprefix(PREFIX)

    prefixed = _renamed(weights, modern, source)
    encoder = {name: tensor for name, tensor in template.items() if name.startswith("encoder.")}
    known = _expected(encoder).keys()
    unknown = sorted(n for n in prefixed.keys() - known if not n.removeprefix(PREFIX).startswith(_OPTIONAL))
    if unknown:
        raise CheckpointError(
            f"{source}: {unknown[0]} has no place in this model",
            expected="a BERT encoder of as many layers as the model settings",
            next_command="--model.preset or --model.num-layers as in its config.json",
        )
    positions = PREFIX + "embeddings.position_embeddings.weight"
    rows = encoder["encoder.position_embeddings.weight"].shape[0]
    if positions in prefixed:
        prefixed[positions] = prefixed[positions][:rows]
    return from_hf(prefixed, encoder, source=source)


def model_from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """A whole model in our names: every tensor of `template` and no other. The encoder may lack the `bert.` prefix.

    A temperature that was learnt is left out.

    Raises CheckpointError naming the first tensor that is too many, missing or of another shape.
    """
    named = _renamed(weights, lambda name: PREFIX + name if name.startswith(ENCODER_PARTS) else name, source)
    unknown = sorted(n for n in named.keys() - _expected(template).keys() if not n.startswith(_OF_TRAINING))
    if unknown:
        raise CheckpointError(
            f"{source}: {unknown[0]} has no place in this model",
            expected="the tensors of a relevance model of these settings",
            next_command="give the model settings it was trained with (--model...)",
        )
    return from_hf(named, template, source=source)


def _expected(template: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names and shapes that `template` has under Hugging Face names, without content."""
    return to_hf({name: torch.empty_like(tensor, device="meta") for name, tensor in template.items()})


def _renamed(weights: Mapping[str, Tensor], rename: Callable[[str], str], source: str) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        new = rename(name)
        if new in result:
            raise CheckpointError(
                f"{source}: {new} is there twice, once as {name}",
                expected="every tensor once",
                next_command="save the model again with one naming",
            )
        result[new] = tensor
    return result


def hf_config(config: ModelConfig, spec: InputSpec) -> str:
    """config.json that lets `transformers.BertModel.from_pretrained` open a checkpoint folder."""
    size = config.encoder
    return json.dumps(
        {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "hidden_size": size.hidden_size,
            "num_hidden_layers": size.num_layers,
            "num_attention_heads": size.num_heads,
            "intermediate_size": size.intermediate_size,
            "hidden_act": "gelu",
            "layer_norm_eps": config.layer_norm_eps,
            "max_position_embeddings": config.max_positions,
            "type_vocab_size": 2,
            "vocab_size": spec.vocab_size,
            "pad_token_id": spec.pad_id,
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": 0.0,
        },
        indent=1,
    )


# The model a run from scratch starts with: random, or with the encoder of a Hugging Face folder.


def initial_model(config: ModelConfig, spec: InputSpec, seed: int, scratch: Path) -> RelevanceModel:
    """A model on CPU, the same on every rank. `config.init_from` names a folder with model.safetensors.

    Raises CheckpointError for weights that do not fit, ConfigError for an architecture that is not computed here.
    """
    model = build_model(config, spec, seed)
    if config.init_from is None:
        return model
    storage: Storage = open_storage(config.init_from)
    source = storage.uri("model.safetensors")
    local = storage.local_path("model.safetensors")
    if local is None:
        local = scratch / "init.safetensors"
        storage.download("model.safetensors", local)
    try:
        weights = load_file(local)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{source}: {error}",
            expected="the safetensors weights of a BERT encoder",
            next_command="--model.init-from FOLDER",
        ) from error
    weights = as_bert(weights, _model_type(storage), spec.pad_id, source=source)
    state = model.state_dict()
    model.load_state_dict(state | encoder_from_hf(weights, state, source=source))
    return model


def _model_type(storage: Storage) -> str:
    """Of the folder's config.json; bert where there is none."""
    try:
        found = json.loads(storage.read_bytes("config.json")).get("model_type", "bert")
    except KeyNotFound:
        return "bert"
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{storage.uri('config.json')}: {error}", expected="a Hugging Face config.json") from error
    if found not in FAMILIES:
        raise ConfigError(
            f"{storage.uri('config.json')}: architecture {found}",
            expected=f"model_type {', '.join(FAMILIES)}",
            next_command="--model.init-from FOLDER of a model of those families",
        )
    return str(found)
