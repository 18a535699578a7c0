"""Convert configurations and weights to and from the formats of Hugging Face transformers.

RoBERTa, XLM-R and CamemBERT differ from BERT in three ways. Their positions start at `pad_token_id + 1`, since the
first rows of the table are reserved for padding, they have a single token type, and their tensors have a different
prefix. Once the reserved rows are removed, these models are bitwise identical to BERT. They therefore use the same
encoder, and their checkpoints and exports use the names of BERT. MPNet and ModernBERT have separate encoders.

The names of encoder tensors start with the prefix of the architecture (`bert.`, `mpnet.`, `model.`), or with
`encoder.module.` for a factory's module. The tensors of interactions and head keep their names.

See `create_position_ids_from_input_ids` in modeling_roberta.py and modeling_xlm_roberta.py of transformers.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from torch import Tensor

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.io.storage import HEAD_BYTES, check_downloaded
from pipeline.model.config import MAX_POSITIONS, MPNET_PAD, Architecture, EncoderSize, InputSpec, ModelConfig
from pipeline.model.encoder import GLOBAL_EVERY, LOCAL_ATTENTION, ROPE_THETA
from pipeline.model.factory import PREFIX as FACTORY_PREFIX

CONFIG = "config.json"
_POSITION_TABLE = "embeddings.position_embeddings.weight"
_TYPE_TABLE = "embeddings.token_type_embeddings.weight"
_IGNORED = ("pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs.", "embeddings.position_ids")
"""Prefixes of tensors that are not part of the encoder, most of which belong to task heads."""
_WORDS = "encoder.word_embeddings.weight"
_POSITIONS = "encoder.position_embeddings.weight"
HEAD_PARTS = ("interactions.", "head.")
"""Prefixes of all tensors that are not part of the encoder."""
TRAINING_ONLY = ("temperature.", "teacher.")
"""Prefixes of tensors that are only used for training."""
_OLD_NORM = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # as in bert-base-uncased


# Encoder families and their conversion to BERT.


@dataclass(frozen=True)
class Family:
    """A model type of transformers, and how its files differ from those of BERT."""

    prefix: str
    """Prefix of the encoder's tensor names, which may be missing in files."""
    architecture: Architecture
    """The encoder to use for this family."""
    has_offset: bool = False
    """Whether positions start at the padding id plus one."""

    @property
    def is_bert_with_offset(self) -> bool:
        """True if the position and type tables need to be converted to those of BERT."""
        return self.has_offset and self.architecture == "bert"

    def offset(self, pad_id: int) -> int:
        """Return the number of reserved rows at the beginning of the position table."""
        return pad_id + 1 if self.has_offset else 0


FAMILIES: Mapping[str, Family] = {
    "bert": Family("bert.", "bert"),
    "roberta": Family("roberta.", "bert", has_offset=True),
    "xlm-roberta": Family("roberta.", "bert", has_offset=True),
    "camembert": Family("roberta.", "bert", has_offset=True),
    "mpnet": Family("mpnet.", "mpnet", has_offset=True),
    "modernbert": Family("model.", "modernbert"),
}
"""Encoder families, keyed by the model_type in config.json."""
_CLASSES = {"bert": "BertModel", "mpnet": "MPNetModel", "modernbert": "ModernBertModel"}
"""Class names in transformers, keyed by architecture, which are written to config.json."""


def as_bert(weights: Mapping[str, Tensor], model_type: str, pad_id: int, *, source: str) -> dict[str, Tensor]:
    """Convert the weights of a BERT-like family to those of an equivalent BERT model, and remove the prefix.

    Weights of other architectures are returned unchanged. Raises CheckpointError if a table is missing or too small.
    """
    family = FAMILIES[model_type]
    if not family.is_bert_with_offset:
        return dict(weights)
    converted = {name.removeprefix(family.prefix): tensor for name, tensor in weights.items()}
    offset = family.offset(pad_id)
    for name, rows in ((_POSITION_TABLE, offset + 1), (_TYPE_TABLE, 1)):
        table = converted.get(name)
        if table is None or table.dim() != 2 or table.shape[0] < rows:
            actual = "no such tensor" if table is None else f"shape {list(table.shape)}"
            raise CheckpointError(
                f"{source}: {name}: {actual}",
                expected=f"at least {rows} rows for {model_type}",
                next_command="check model_type and pad_token_id in config.json",
            )
    converted[_POSITION_TABLE] = converted[_POSITION_TABLE][offset:].contiguous()
    types = converted[_TYPE_TABLE]
    converted[_TYPE_TABLE] = torch.cat([types, torch.zeros_like(types[:1])])[:2]  # the second row is never used
    return converted


# Validation of config.json and conversion to and from model settings.


class Foreign(BaseModel):
    """Base class for JSON files that were written by other tools. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


Json = TypeVar("Json", bound=BaseModel)


def parse_json(data: bytes, model: type[Json], where: str) -> Json:
    """Parse a JSON file that was written by other tools. Raises ConfigError for the first invalid field."""
    check_downloaded(data[:HEAD_BYTES], where, ConfigError)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where}: {field + ': ' if field else ''}{first['msg'].removeprefix('Value error, ')}",
            expected=(model.__doc__ or "").splitlines()[0].rstrip("."),
            next_command="correct the file, or use a different model",
        ) from error


_SUPPORTED: Mapping[str, Mapping[str, Any]] = {
    "bert": {
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "is_causal": False,
        "add_cross_attention": False,
    },
    "mpnet": {"hidden_act": "gelu", "pad_token_id": MPNET_PAD, "relative_attention_num_buckets": 32},
    "modernbert": {
        "hidden_activation": "gelu",
        "norm_bias": False,
        "attention_bias": False,
        "mlp_bias": False,
        "local_attention": LOCAL_ATTENTION,
        # These include the keys of both transformers 4 and transformers 5.
        "global_attn_every_n_layers": GLOBAL_EVERY,
        "global_rope_theta": ROPE_THETA[True],
        "local_rope_theta": ROPE_THETA[False],
        "rope_parameters.full_attention.rope_type": "default",
        "rope_parameters.full_attention.rope_theta": ROPE_THETA[True],
        "rope_parameters.sliding_attention.rope_type": "default",
        "rope_parameters.sliding_attention.rope_theta": ROPE_THETA[False],
        "sliding_window": LOCAL_ATTENTION // 2,
    },
}
"""The only supported values of keys that affect results, by architecture. Nested keys are separated by dots."""
_UNSUPPORTED = ("is_encoder_decoder", "pruned_heads", "quantization_config", "rope_scaling", "auto_map.AutoModel")
"""Keys that must be null, false or empty, since they would otherwise affect results or refer to code to run."""
_MAY_BE_NULL = ("layer_types", "sliding_window")


class EncoderJson(Foreign):
    """A Hugging Face config.json for a supported text encoder."""

    model_config = ConfigDict(extra="allow")

    model_type: str = "bert"
    pad_token_id: int = Field(0, ge=0)
    vocab_size: int = Field(ge=8, le=4_000_000)
    hidden_size: int = Field(ge=8, le=16_384)
    num_hidden_layers: int = Field(ge=1, le=256)
    num_attention_heads: int = Field(ge=1, le=256)
    intermediate_size: int = Field(ge=8, le=65_536)
    max_position_embeddings: int
    layer_norm_eps: float = Field(1e-12, gt=0, le=0.1)
    norm_eps: float = Field(1e-5, gt=0, le=0.1)  # only used by modernbert

    @field_validator("model_type")
    @classmethod
    def _has_family(cls, value: str) -> str:
        if value not in FAMILIES:
            raise ValueError(
                f"architecture {value} is not supported, expected {', '.join(FAMILIES)} or a custom module"
                " (--model.factory, docs/encoders.md)"
            )
        return value

    @model_validator(mode="after")
    def _is_supported(self) -> Self:
        values, architecture = self.model_dump(), FAMILIES[self.model_type].architecture
        kinds = ("full_attention", "sliding_attention")
        layers = [kinds[number % GLOBAL_EVERY > 0] for number in range(self.num_hidden_layers)]
        supported = {**_SUPPORTED[architecture], **dict.fromkeys(_UNSUPPORTED)}
        supported |= {"layer_types": layers} if architecture == "modernbert" else {}
        for name, value in supported.items():
            actual: Any = values
            for key in name.split("."):
                actual = actual.get(key, value) if isinstance(actual, dict) else value
            if actual != value and not (value is None and not actual) and not (actual is None and name in _MAY_BE_NULL):
                raise ValueError(f"{name} is {actual!r}, but trnpipe only supports {value!r}")
        if not 8 <= self.positions <= MAX_POSITIONS:
            raise ValueError(
                f"max_position_embeddings {self.max_position_embeddings} means {self.positions} positions in this"
                f" family, expected 8 to {MAX_POSITIONS}"
            )
        return self

    @property
    def positions(self) -> int:
        """Number of positions, without the reserved rows at the beginning of the table."""
        return self.max_position_embeddings - FAMILIES[self.model_type].offset(self.pad_token_id)

    @property
    def size(self) -> EncoderSize:
        return EncoderSize(
            hidden_size=self.hidden_size,
            num_layers=self.num_hidden_layers,
            num_heads=self.num_attention_heads,
            intermediate_size=self.intermediate_size,
        )

    def fields(self) -> dict[str, Any]:
        """Return the equivalent model settings, except for sizes."""
        architecture = FAMILIES[self.model_type].architecture
        eps = self.norm_eps if architecture == "modernbert" else self.layer_norm_eps
        return {"architecture": architecture, "max_positions": self.positions, "layer_norm_eps": eps}

    def check(self, config: ModelConfig, *, source: str) -> None:
        """Raise ConfigError, which lists the flags to set, if the settings don't match this file."""
        expected = {**self.fields(), **self.size.model_dump()}
        settings = {**config.model_dump(include=set(expected)), **config.encoder.model_dump()}
        # Fewer positions are allowed, since excess rows are dropped.
        expected["max_positions"] = min(expected["max_positions"], settings["max_positions"])
        different = [name for name, value in expected.items() if settings[name] != value]
        if different:
            raise ConfigError(
                f"model.{different[0]} is {settings[different[0]]}, but {source} has {expected[different[0]]}",
                expected="settings that match the weights in --model.init-from",
                next_command=" ".join(f"--model.{name.replace('_', '-')} {expected[name]}" for name in different),
            )


def read_config(data: bytes, where: str) -> EncoderJson:
    """Parse a config.json. Raises ConfigError if the architecture or the value of a field is not supported."""
    return parse_json(data, EncoderJson, where)


def hf_config(config: ModelConfig, spec: InputSpec) -> str:
    """Return the content of config.json, which allows transformers to load a checkpoint folder or an export.

    If the encoder is built by a factory, transformers can't load it, so the file only documents the factory and its
    options.
    """
    if config.factory is not None:
        return json.dumps({"model_type": "trnpipe-factory", **config.shape()}, indent=1)
    size, offset = config.encoder, FAMILIES[config.architecture].offset(spec.pad_id)
    content: dict[str, Any] = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "intermediate_size": size.intermediate_size,
        "max_position_embeddings": config.max_positions + offset,
        "vocab_size": spec.vocab_size,
        "pad_token_id": spec.pad_id,
    }
    if config.architecture == "modernbert":
        content |= {
            "hidden_activation": "gelu",
            "norm_eps": config.layer_norm_eps,
            "local_attention": LOCAL_ATTENTION,
            "global_attn_every_n_layers": GLOBAL_EVERY,
            "global_rope_theta": ROPE_THETA[True],
            "local_rope_theta": ROPE_THETA[False],
            **{f"{part}_dropout": config.dropout for part in ("embedding", "mlp")},
            # Override the defaults of transformers, which are the ids in the published vocabulary.
            **{f"{token}_token_id": None for token in ("bos", "eos", "cls", "sep")},
        }
    else:
        content |= {
            "hidden_act": "gelu",
            "layer_norm_eps": config.layer_norm_eps,
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": 0.0,
        }
    if config.architecture == "bert":
        content["type_vocab_size"] = 2
    return json.dumps(content, indent=1)


# Weight names.

_EMBEDDINGS = {
    "word_embeddings.weight": "embeddings.word_embeddings.weight",
    "position_embeddings.weight": "embeddings.position_embeddings.weight",
    "embedding_norm.weight": "embeddings.LayerNorm.weight",
    "embedding_norm.bias": "embeddings.LayerNorm.bias",
}
_FEED_FORWARD = {"intermediate": "intermediate.dense", "output": "output.dense", "output_norm": "output.LayerNorm"}


@dataclass(frozen=True)
class _Names:
    """The weight names of an architecture in Hugging Face transformers."""

    prefix: str
    layers: str  # prefix of the layer index
    single: Mapping[str, str]  # tensors that are not part of a layer
    parts: Mapping[str, str]  # modules in a layer
    qkv: tuple[str, ...]  # names of query, key and value, or a single name if they are fused
    ignored: tuple[str, ...]  # prefixes of tensors that are not part of the encoder, such as the pooler and task heads
    offset: int = 0  # number of reserved rows at the beginning of the position table


_NAMES: Mapping[str, _Names] = {
    "bert": _Names(
        FAMILIES["bert"].prefix,
        "encoder.layer.",
        _EMBEDDINGS | {"type_embeddings.weight": "embeddings.token_type_embeddings.weight"},
        _FEED_FORWARD | {"attention_output": "attention.output.dense", "attention_norm": "attention.output.LayerNorm"},
        ("attention.self.query", "attention.self.key", "attention.self.value"),
        _IGNORED,
    ),
    "mpnet": _Names(
        FAMILIES["mpnet"].prefix,
        "encoder.layer.",
        _EMBEDDINGS | {"relative_bias.weight": "encoder.relative_attention_bias.weight"},
        _FEED_FORWARD | {"attention_output": "attention.attn.o", "attention_norm": "attention.LayerNorm"},
        ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        _IGNORED,
        offset=MPNET_PAD + 1,
    ),
    "modernbert": _Names(
        FAMILIES["modernbert"].prefix,
        "layers.",
        {
            "word_embeddings.weight": "embeddings.tok_embeddings.weight",
            "embedding_norm.weight": "embeddings.norm.weight",
            "final_norm.weight": "final_norm.weight",
        },
        {
            "attention_norm": "attn_norm",
            "attention_output": "attn.Wo",
            "feed_forward_norm": "mlp_norm",
            "gated": "mlp.Wi",
            "output": "mlp.Wo",
        },
        ("attn.Wqkv",),
        ("head.", "decoder.", "classifier."),
    ),
}


def _names_of(state: Iterable[str]) -> _Names:
    """Determine the architecture from the tensor names in a state dict and return its Hugging Face names."""
    own = set(state)
    if "encoder.final_norm.weight" in own:
        return _NAMES["modernbert"]
    return _NAMES["mpnet" if "encoder.relative_bias.weight" in own else "bert"]


def to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict to Hugging Face names.

    The fused query, key and value matrix is split, unless transformers also fuses it for this architecture.
    """
    names = _names_of(state)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == _POSITIONS and names.offset:
            tensor = torch.cat([tensor.new_zeros(names.offset, tensor.shape[1]), tensor])
        hf_names = _hf_names(name, names)
        result |= zip(hf_names, tensor.chunk(len(hf_names), dim=0), strict=True)
    return result


def _hf_names(name: str, names: _Names) -> tuple[str, ...]:
    """Return the Hugging Face names of the tensors that are concatenated to the tensor `name`."""
    if not name.startswith("encoder.") or name.startswith(FACTORY_PREFIX):
        return (name,)
    own = name.removeprefix("encoder.")
    if own in names.single:
        return (names.prefix + names.single[own],)
    _, layer, part, kind = own.split(".")
    modules = names.qkv if part == "qkv" else (names.parts[part],)
    return tuple(f"{names.prefix}{names.layers}{layer}.{module}.{kind}" for module in modules)


def from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Convert a state dict from Hugging Face names to the names in `template`.

    Raises CheckpointError for the first tensor that is missing or doesn't have the same shape as in the template.
    """
    # Older checkpoints don't contain the scale and shift of features.
    fills = {"interactions.features.scale": torch.ones, "interactions.features.shift": torch.zeros}
    weights = {name: fill(template[name].shape) for name, fill in fills.items() if name in template} | dict(weights)
    for name, tensor in _expected(template).items():
        actual = weights.get(name)
        if actual is None or actual.shape != tensor.shape:
            problem = "no such tensor" if actual is None else f"shape {list(actual.shape)}"
            raise CheckpointError(
                f"{source}: {name}: {problem}",
                expected=f"shape {list(tensor.shape)}, from the model settings",
                next_command="use the model settings in the checkpoint's state.json, or --train.start scratch",
            )
    names, result = _names_of(template), dict[str, Tensor]()
    for name in template:
        parts = [weights[hf_name] for hf_name in _hf_names(name, names)]
        tensor = torch.cat(parts, dim=0) if len(parts) > 1 else parts[0]
        result[name] = tensor[names.offset :] if name == _POSITIONS else tensor
    return result


def encoder_from_hf(
    weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str, same_vocabulary: bool = False
) -> dict[str, Tensor]:
    """Convert the encoder of an external checkpoint, with or without a prefix, to the names in `template`.

    Excess rows of the position table, the pooler and task heads are dropped.
    `same_vocabulary`: also drop excess rows of the word table, which is often padded to a round number of rows.
    Raises CheckpointError if there is any other tensor, or if a tensor is missing or has the wrong shape.
    """
    names = _names_of(template)

    def rename(name: str) -> str:
        for old, new in _OLD_NORM.items():  # used by checkpoints that were converted from TensorFlow
            name = name.replace(old, new)
        return names.prefix + name.removeprefix(names.prefix)

    def is_ignored(name: str) -> bool:
        return name.removeprefix(names.prefix).startswith((*names.ignored, *TRAINING_ONLY))

    encoder = {name: tensor for name, tensor in template.items() if name.startswith("encoder.")}
    renamed = _rename(weights, rename, encoder, is_ignored, source)
    expected = _expected(encoder)
    (table,) = _hf_names(_WORDS, names)
    if table in renamed and (rows := renamed[table].shape[0]) != (tokens := expected[table].shape[0]):
        if rows < tokens or not same_vocabulary:
            raise CheckpointError(
                f"{source}: {table} has shape {list(renamed[table].shape)}, but the tokenizer has {tokens} tokens",
                expected="the tokenizer that belongs to the weights",
                next_command="trnpipe prepare --data.tokenizer.path FILE, with the tokenizer.json of the model",
            )
        renamed[table] = renamed[table][:tokens]
    positions = next(iter(_hf_names(_POSITIONS, names)), "") if _POSITIONS in encoder else ""
    if positions in renamed:
        renamed[positions] = renamed[positions][: expected[positions].shape[0]]
    return from_hf(renamed, encoder, source=source)


def model_from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Convert a full model to the names in `template`. The prefix of encoder tensors is optional.

    Raises CheckpointError for the first tensor that is unknown, missing or has the wrong shape.
    """
    expected = _expected(template)
    has_factory = any(name.startswith(FACTORY_PREFIX) for name in template)
    prefix = FACTORY_PREFIX if has_factory else _names_of(template).prefix

    def add_prefix(name: str) -> str:
        return prefix + name if name not in expected and prefix + name in expected else name

    renamed = _rename(weights, add_prefix, template, lambda name: name.startswith(TRAINING_ONLY), source)
    return from_hf(renamed, template, source=source)


def _expected(template: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of `template` under Hugging Face names, on the meta device."""
    # Don't use empty_like, which imports sympy (0.5 s) if the tensor is already on the meta device.
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in template.items()}
    return to_hf(empty)


def _rename(
    weights: Mapping[str, Tensor],
    rename: Callable[[str], str],
    template: Mapping[str, Tensor],
    is_ignored: Callable[[str], bool],
    source: str,
) -> dict[str, Tensor]:
    """Rename tensors. Raises CheckpointError for the first one that is neither in `template` nor ignored."""
    result = {rename(name): tensor for name, tensor in weights.items()}
    expected = _expected(template)
    if unknown := sorted(name for name in result if name not in expected and not is_ignored(name)):
        raise CheckpointError(
            f"{source}: {unknown[0]} is not part of this model",
            expected="the same architecture, layers and head as in the model settings",
            next_command="set --model.architecture, --model.preset or --model.num-layers as in its config.json, or use"
            " the settings that it was trained with",
        )
    return result
