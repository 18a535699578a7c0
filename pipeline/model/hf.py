"""Encoders of Hugging Face: their families, config.json and names of weights, so that `transformers` reads our files.

RoBERTa, XLM-R and CamemBERT differ from BERT in three tables. Positions begin at `pad_token_id + 1` (rows before that
belong to padding), there is one token type, and tensors may begin with another word. So such a model is BERT with its
first rows of positions cut off, to the last bit, and everything here knows one encoder. Checkpoints and exports have
the names of BERT. MPNet and ModernBERT are encoders of their own. Encoder tensors carry the prefix of their
architecture (`bert.`, `mpnet.`, `model.`); interactions and head keep their own names, and a module of a factory has
its names behind `encoder.module.`.

Source: modeling_roberta.py and modeling_xlm_roberta.py of transformers (create_position_ids_from_input_ids).
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
from pipeline.model.config import MOST_POSITIONS, MPNET_PAD, Architecture, EncoderSize, InputSpec, ModelConfig
from pipeline.model.encoder import GLOBAL_EVERY, LOCAL_ATTENTION, ROPE_THETA
from pipeline.model.factory import PREFIX as FACTORY_PREFIX

CONFIG = "config.json"
_POSITION_TABLE = "embeddings.position_embeddings.weight"
_TYPE_TABLE = "embeddings.token_type_embeddings.weight"
_IGNORED = ("pooler.", "cls.", "lm_head.", "classifier.", "qa_outputs.", "embeddings.position_ids")
"""How names begin of what is no part of an encoder in the manner of BERT: heads of tasks above all."""
_WORDS = "encoder.word_embeddings.weight"
_POSITIONS = "encoder.position_embeddings.weight"
HEAD_PARTS = ("interactions.", "head.")
"""How the names of everything but the encoder begin."""
_OF_TRAINING = ("temperature.",)
"""How names begin of what earlier versions learnt in training and nothing else reads."""
_OLD_NORM = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}  # as in bert-base-uncased


# Families, and those that compute what BERT computes.


@dataclass(frozen=True)
class Family:
    """How a family's files differ from those of BERT."""

    prefix: str
    """What names of the encoder may begin with."""
    architecture: Architecture
    """Which encoder here computes it."""
    has_offset: bool = False
    """Positions begin behind the number of the padding token."""

    @property
    def is_bert_with_offset(self) -> bool:
        """Its tables are cut or filled up on the way to the names of BERT."""
        return self.has_offset and self.architecture == "bert"

    def offset(self, pad_id: int) -> int:
        """Rows of positions before that of a text's first token."""
        return pad_id + 1 if self.has_offset else 0


FAMILIES: Mapping[str, Family] = {
    "bert": Family("bert.", "bert"),
    "roberta": Family("roberta.", "bert", has_offset=True),
    "xlm-roberta": Family("roberta.", "bert", has_offset=True),
    "camembert": Family("roberta.", "bert", has_offset=True),
    "mpnet": Family("mpnet.", "mpnet", has_offset=True),
    "modernbert": Family("model.", "modernbert"),
}
"""By model_type in config.json."""
_CLASSES = {"bert": "BertModel", "mpnet": "MPNetModel", "modernbert": "ModernBertModel"}
"""In transformers, of what is written here."""


def as_bert(weights: Mapping[str, Tensor], model_type: str, pad_id: int, *, source: str) -> dict[str, Tensor]:
    """Return the weights of a family of BERT as those of the BERT that computes the same, without prefix.

    Weights of other architectures are returned as they are. Raises CheckpointError for tables that do not fit.
    """
    family = FAMILIES[model_type]
    if not family.is_bert_with_offset:
        return dict(weights)
    found = {name.removeprefix(family.prefix): tensor for name, tensor in weights.items()}
    offset = family.offset(pad_id)
    for name, rows in ((_POSITION_TABLE, offset + 1), (_TYPE_TABLE, 1)):
        table = found.get(name)
        if table is None or table.dim() != 2 or table.shape[0] < rows:
            seen = "no such tensor" if table is None else f"shape {list(table.shape)}"
            raise CheckpointError(
                f"{source}: {name}: {seen}",
                expected=f"{rows} rows or more, as in a {model_type}",
                next_command="look at its config.json: model_type and pad_token_id",
            )
    found[_POSITION_TABLE] = found[_POSITION_TABLE][offset:].contiguous()
    types = found[_TYPE_TABLE]
    found[_TYPE_TABLE] = torch.cat([types, torch.zeros_like(types[:1])])[:2]  # the second is not asked for
    return found


# config.json: which encoders are computed here exactly, as which model settings, and back.


class Foreign(BaseModel):
    """A file of others: what is not asked for is left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


Json = TypeVar("Json", bound=BaseModel)


def parse_json(data: bytes, model: type[Json], where: str) -> Json:
    """Parse a file of others. Raises ConfigError naming the field that does not fit."""
    check_downloaded(data[:HEAD_BYTES], where, ConfigError)
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{where}: {place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}",
            expected=(model.__doc__ or "").splitlines()[0],
            next_command="correct that file, or name another model",
        ) from error


_COMPUTED: Mapping[str, Mapping[str, Any]] = {
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
        # The two forms of transformers 4 and 5.
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
"""By architecture, the values of keys that change the numbers, if they are there. Dots lead into tables."""
_NOTHING = ("is_encoder_decoder", "pruned_heads", "quantization_config", "rope_scaling", "auto_map.AutoModel")
"""Keys that change the numbers, or name code to run, unless they are null, false or empty."""
_MAY_BE_NULL = ("layer_types", "sliding_window")


class EncoderJson(Foreign):
    """A Hugging Face config.json of a text encoder that is computed here exactly"""

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
    norm_eps: float = Field(1e-5, gt=0, le=0.1)  # of modernbert

    @field_validator("model_type")
    @classmethod
    def _has_a_family(cls, value: str) -> str:
        if value not in FAMILIES:
            raise ValueError(
                f"architecture {value}: expected {', '.join(FAMILIES)} (docs/encoders.md), or a module that you build"
                " yourself (--model.factory)"
            )
        return value

    @model_validator(mode="after")
    def _is_computed_here(self) -> Self:
        given, architecture = self.model_dump(), FAMILIES[self.model_type].architecture
        kinds = ("full_attention", "sliding_attention")
        layers = [kinds[number % GLOBAL_EVERY > 0] for number in range(self.num_hidden_layers)]
        wanted = {**_COMPUTED[architecture], **dict.fromkeys(_NOTHING)}
        wanted |= {"layer_types": layers} if architecture == "modernbert" else {}
        for name, value in wanted.items():
            found: Any = given
            for key in name.split("."):
                found = found.get(key, value) if isinstance(found, dict) else value
            if found != value and not (value is None and not found) and not (found is None and name in _MAY_BE_NULL):
                raise ValueError(f"{name}: {found!r}, and trnpipe computes {value!r} alone")
        if not 8 <= self.positions <= MOST_POSITIONS:
            raise ValueError(
                f"max_position_embeddings {self.max_position_embeddings} are {self.positions} positions in this family:"
                f" expected 8 to {MOST_POSITIONS}"
            )
        return self

    @property
    def positions(self) -> int:
        """Without the rows before that of a text's first token."""
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
        """Return the model settings that say the same, sizes apart."""
        architecture = FAMILIES[self.model_type].architecture
        eps = self.norm_eps if architecture == "modernbert" else self.layer_norm_eps
        return {"architecture": architecture, "max_positions": self.positions, "layer_norm_eps": eps}

    def check(self, config: ModelConfig, *, source: str) -> None:
        """Raises ConfigError where settings would compute something else from these weights, with what to set."""
        theirs = {**self.fields(), **self.size.model_dump()}
        ours = {**config.model_dump(include=set(theirs)), **config.encoder.model_dump()}
        theirs["max_positions"] = min(theirs["max_positions"], ours["max_positions"])  # further rows are left out
        different = [name for name, value in theirs.items() if ours[name] != value]
        if different:
            flags = " ".join(f"--model.{name.replace('_', '-')} {theirs[name]}" for name in different)
            raise ConfigError(
                f"model.{different[0]} is {ours[different[0]]}, and {source} is of a model with {theirs[different[0]]}",
                expected="the settings of the weights that --model.init-from names",
                next_command=flags,
            )


def read_config(data: bytes, where: str) -> EncoderJson:
    """Read a config.json. Raises ConfigError naming the architecture, or the field, that no encoder here computes."""
    return parse_json(data, EncoderJson, where)


def hf_config(config: ModelConfig, spec: InputSpec) -> str:
    """config.json with which transformers opens a checkpoint folder or an export.

    Of a module that a factory builds it says by which, and nothing that transformers would open.
    """
    if config.factory is not None:
        return json.dumps({"model_type": "trnpipe-factory", **config.shape()}, indent=1)
    size, offset = config.encoder, FAMILIES[config.architecture].offset(spec.pad_id)
    found: dict[str, Any] = {
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
        found |= {
            "hidden_activation": "gelu",
            "norm_eps": config.layer_norm_eps,
            "local_attention": LOCAL_ATTENTION,
            "global_attn_every_n_layers": GLOBAL_EVERY,
            "global_rope_theta": ROPE_THETA[True],
            "local_rope_theta": ROPE_THETA[False],
            **{f"{place}_dropout": config.dropout for place in ("embedding", "mlp")},
            # transformers would take those of the published vocabulary; the tokenizer beside knows its own.
            **{f"{token}_token_id": None for token in ("bos", "eos", "cls", "sep")},
        }
    else:
        found |= {
            "hidden_act": "gelu",
            "layer_norm_eps": config.layer_norm_eps,
            "hidden_dropout_prob": config.dropout,
            "attention_probs_dropout_prob": 0.0,
        }
    if config.architecture == "bert":
        found["type_vocab_size"] = 2
    return json.dumps(found, indent=1)


# Names of weights.

_EMBEDDINGS = {
    "word_embeddings.weight": "embeddings.word_embeddings.weight",
    "position_embeddings.weight": "embeddings.position_embeddings.weight",
    "embedding_norm.weight": "embeddings.LayerNorm.weight",
    "embedding_norm.bias": "embeddings.LayerNorm.bias",
}
_FEED_FORWARD = {
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_norm": "output.LayerNorm",
}


@dataclass(frozen=True)
class _Names:
    """Hugging Face names of an architecture."""

    prefix: str
    layers: str  # stands before the number of a layer
    single: Mapping[str, str]  # tensors that are in no layer
    parts: Mapping[str, str]  # modules of a layer
    qkv: tuple[str, ...]  # query, key and value; one where they are one matrix there too
    ignored: tuple[str, ...]  # how names begin of what is no part of the encoder: pooler, heads of tasks
    offset: int = 0  # rows of the table of positions before that of the first token


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
    """Of the architecture whose encoder has tensors of these names of ours."""
    found = set(state)
    if "encoder.final_norm.weight" in found:
        return _NAMES["modernbert"]
    return _NAMES["mpnet" if "encoder.relative_bias.weight" in found else "bert"]


def to_hf(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our state dict to Hugging Face names; the joint query-key-value matrix is cut where they are three."""
    names = _names_of(state)
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name == _POSITIONS and names.offset:
            tensor = torch.cat([tensor.new_zeros(names.offset, tensor.shape[1]), tensor])
        theirs = _hf_names(name, names)
        result |= zip(theirs, tensor.chunk(len(theirs), dim=0), strict=True)
    return result


def _hf_names(name: str, names: _Names) -> tuple[str, ...]:
    """Those that hold a tensor of ours, one after the other."""
    if not name.startswith("encoder.") or name.startswith(FACTORY_PREFIX):
        return (name,)
    own = name.removeprefix("encoder.")
    if own in names.single:
        return (names.prefix + names.single[own],)
    _, layer, part, kind = own.split(".")
    modules = names.qkv if part == "qkv" else (names.parts[part],)
    return tuple(f"{names.prefix}{names.layers}{layer}.{module}.{kind}" for module in modules)


def from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Rename Hugging Face names to ours, complete and in the shapes of `template`.

    Raises CheckpointError naming the first tensor that is missing or of another shape: another architecture.
    """
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
    names, result = _names_of(template), dict[str, Tensor]()
    for name in template:
        parts = [weights[theirs] for theirs in _hf_names(name, names)]
        found = torch.cat(parts, dim=0) if len(parts) > 1 else parts[0]
        result[name] = found[names.offset :] if name == _POSITIONS else found
    return result


def encoder_from_hf(
    weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str, same_vocabulary: bool = False
) -> dict[str, Tensor]:
    """Return the encoder's part of a foreign checkpoint (with or without a prefix), in our names.

    Position rows beyond ours are left out; pooler and task heads are ignored; anything else unknown is an error.
    `same_vocabulary`: further rows of words, with which tables are often filled up to a round number, are left out.
    """
    names = _names_of(template)

    def modern(name: str) -> str:
        for old, new in _OLD_NORM.items():  # layer norms of checkpoints converted from TensorFlow
            name = name.replace(old, new)
        return names.prefix + name.removeprefix(names.prefix)

    def is_ignored(name: str) -> bool:
        return name.removeprefix(names.prefix).startswith((*names.ignored, *_OF_TRAINING))

    encoder = {name: tensor for name, tensor in template.items() if name.startswith("encoder.")}
    found = _renamed(weights, modern, encoder, is_ignored, source)
    known = _expected(encoder)
    (words,) = _hf_names(_WORDS, names)
    if words in found and (rows := found[words].shape[0]) != (tokens := known[words].shape[0]):
        if rows < tokens or not same_vocabulary:
            raise CheckpointError(
                f"{source}: {words}: shape {list(found[words].shape)}, and the tokenizer has {tokens} tokens",
                expected="the tokenizer that belongs to the weights",
                next_command="trnpipe prepare --data.tokenizer.path with the tokenizer.json of the model",
            )
        found[words] = found[words][:tokens]
    positions = next(iter(_hf_names(_POSITIONS, names)), "") if _POSITIONS in encoder else ""
    if positions in found:
        found[positions] = found[positions][: known[positions].shape[0]]
    return from_hf(found, encoder, source=source)


def model_from_hf(weights: Mapping[str, Tensor], template: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Return a whole model in our names: every tensor of `template` and no other. The encoder may lack its prefix.

    Raises CheckpointError naming the first tensor that is too many, missing or of another shape.
    """
    known = _expected(template)
    is_of_factory = any(name.startswith(FACTORY_PREFIX) for name in template)
    prefix = FACTORY_PREFIX if is_of_factory else _names_of(template).prefix

    def named_whole(name: str) -> str:
        return prefix + name if name not in known and prefix + name in known else name

    found = _renamed(weights, named_whole, template, lambda name: name.startswith(_OF_TRAINING), source)
    return from_hf(found, template, source=source)


def _expected(template: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return names and shapes that `template` has under Hugging Face names, without content."""
    # Not empty_like: of a tensor that is on `meta` already it imports sympy, half a second.
    empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in template.items()}
    return to_hf(empty)


def _renamed(
    weights: Mapping[str, Tensor],
    rename: Callable[[str], str],
    template: Mapping[str, Tensor],
    is_ignored: Callable[[str], bool],
    source: str,
) -> dict[str, Tensor]:
    """Rename tensors. Raises CheckpointError for one that `template` has no place for."""
    result = {rename(name): tensor for name, tensor in weights.items()}
    known = _expected(template)
    if unknown := sorted(name for name in result if name not in known and not is_ignored(name)):
        raise CheckpointError(
            f"{source}: {unknown[0]} has no place in this model",
            expected="the architecture, layers and head of the model settings",
            next_command="--model.architecture, --model.preset or --model.num-layers as in its config.json, or the"
            " settings it was trained with",
        )
    return result
