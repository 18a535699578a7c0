"""config.json of a Hugging Face encoder: which of them are computed here exactly, as which model settings, and back."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from pipeline.core.errors import ConfigError
from pipeline.io.downloads import HEAD_BYTES, check_downloaded
from pipeline.model.config import MOST_POSITIONS, EncoderSize, InputSpec, ModelConfig
from pipeline.model.families import FAMILIES

CONFIG = "config.json"
MPNET_PAD = 1
"""Of every MPNet: its code counts positions from this token, whatever its settings say."""


class Foreign(BaseModel):
    """A file of others: what is not asked for is left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


Json = TypeVar("Json", bound=BaseModel)


def parse_json(data: bytes, model: type[Json], where: str) -> Json:
    """Raises ConfigError naming the field that does not fit."""
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


def _nothing(value: JsonValue) -> JsonValue:
    if value:
        raise ValueError(f"{value!r}, which trnpipe does not compute: expected null or nothing")
    return None


_Nothing = Annotated[JsonValue, AfterValidator(_nothing)]
"""A key that changes the numbers, unless it is null or empty."""


class _Architecture(Foreign):
    """A Hugging Face config.json with a model_type"""

    model_type: str = "bert"
    architectures: tuple[str, ...] | None = None


class EncoderJson(Foreign):
    """A Hugging Face config.json of a text encoder"""

    model_type: str = "bert"
    pad_token_id: int = Field(0, ge=0)
    vocab_size: int = Field(ge=8, le=4_000_000)
    hidden_size: int = Field(ge=8, le=16_384)
    num_hidden_layers: int = Field(ge=1, le=256)
    num_attention_heads: int = Field(ge=1, le=256)
    intermediate_size: int = Field(ge=8, le=65_536)
    max_position_embeddings: int
    is_encoder_decoder: Literal[False] = False
    pruned_heads: _Nothing = None
    quantization_config: _Nothing = None
    rope_scaling: _Nothing = None
    auto_map: dict[str, JsonValue] | None = None

    @model_validator(mode="after")
    def _no_code_of_its_own(self) -> Self:
        if "AutoModel" in (self.auto_map or {}):
            raise ValueError("auto_map names code of its own for the model, which trnpipe does not run")
        return self

    @model_validator(mode="after")
    def _positions_fit(self) -> Self:
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
        """The model settings that say the same, sizes apart."""
        return {"architecture": FAMILIES[self.model_type].architecture, "max_positions": self.positions}

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


class _PostNormJson(EncoderJson):
    """A Hugging Face config.json of an encoder with layer norms after each part"""

    hidden_act: Literal["gelu"] = "gelu"
    layer_norm_eps: float = Field(1e-12, gt=0, le=0.1)

    def fields(self) -> dict[str, Any]:
        return {**super().fields(), "layer_norm_eps": self.layer_norm_eps}


class BertJson(_PostNormJson):
    """A Hugging Face config.json of an encoder that computes what BERT computes (model/families.py)"""

    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    is_causal: Literal[False] = False
    add_cross_attention: Literal[False] = False


class MPNetJson(_PostNormJson):
    """A Hugging Face config.json of an MPNet"""

    pad_token_id: Literal[1] = 1
    relative_attention_num_buckets: Literal[32] = 32


class _Rope(Foreign):
    rope_type: Literal["default"] = "default"
    rope_theta: float | None = Field(None, gt=1)


class _Ropes(Foreign):
    full_attention: _Rope = _Rope()
    sliding_attention: _Rope = _Rope()


_Layer = Literal["full_attention", "sliding_attention"]


class ModernBertJson(EncoderJson):
    """A Hugging Face config.json of a ModernBERT"""

    norm_eps: float = Field(1e-5, gt=0, le=0.1)
    hidden_activation: Literal["gelu"] = "gelu"
    norm_bias: Literal[False] = False
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    local_attention: int = Field(128, ge=2)
    # The two forms of transformers 4 and 5.
    global_attn_every_n_layers: int = Field(3, ge=1)
    layer_types: Annotated[tuple[_Layer, ...], Field(min_length=1, max_length=256)] | None = None
    global_rope_theta: float = Field(160_000.0, gt=1)
    local_rope_theta: float = Field(10_000.0, gt=1)
    rope_parameters: _Ropes = _Ropes()
    sliding_window: int | None = None

    @model_validator(mode="after")
    def _layers_recur(self) -> "ModernBertJson":
        if self.sliding_window not in (None, self.local_attention // 2):
            raise ValueError(f"sliding_window {self.sliding_window}: expected half of local_attention")
        if self.layer_types is None:
            return self
        wanted = tuple(
            "sliding_attention" if number % self._every else "full_attention"
            for number in range(self.num_hidden_layers)
        )
        if self.layer_types != wanted:
            raise ValueError(
                "layer_types that do not recur: expected full_attention in every so many layers, from 0 on"
            )
        return self

    @property
    def _every(self) -> int:
        if self.layer_types is None:
            return self.global_attn_every_n_layers
        further = (number for number, kind in enumerate(self.layer_types) if number and kind == "full_attention")
        return next(further, len(self.layer_types))

    def fields(self) -> dict[str, Any]:
        ropes = self.rope_parameters
        return {
            **super().fields(),
            "layer_norm_eps": self.norm_eps,
            "global_attention_every": self._every,
            "local_attention": self.local_attention,
            "global_rope_theta": ropes.full_attention.rope_theta or self.global_rope_theta,
            "local_rope_theta": ropes.sliding_attention.rope_theta or self.local_rope_theta,
        }


_OF_ARCHITECTURE: Mapping[str, type[EncoderJson]] = {
    "bert": BertJson,
    "mpnet": MPNetJson,
    "modernbert": ModernBertJson,
}


def read_config(data: bytes, where: str) -> EncoderJson:
    """Raises ConfigError naming the architecture, or the field, that no encoder here computes."""
    found = parse_json(data, _Architecture, where)
    family = FAMILIES.get(found.model_type)
    if family is None:
        classes = f" ({', '.join(found.architectures)})" if found.architectures else ""
        raise ConfigError(
            f"{where}: architecture {found.model_type}{classes}",
            expected=f"model_type {', '.join(FAMILIES)}: docs/encoders.md",
            next_command="name a model of those families, or build its module yourself (--model.factory)",
        )
    return parse_json(data, _OF_ARCHITECTURE[family.architecture], where)


def hf_config(config: ModelConfig, spec: InputSpec, model_type: str = "") -> str:
    """config.json with which transformers opens a checkpoint folder, or an export of another family (`model_type`).

    Of a module that a factory builds it says by which, and nothing that transformers would open.
    """
    if config.factory is not None:
        return json.dumps({"model_type": "trnpipe-factory", **config.shape()}, indent=1)
    family = FAMILIES[model_type or config.architecture]
    size, offset = config.encoder, family.offset(spec.pad_id)
    found: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
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
            "local_attention": config.local_attention,
            "global_attn_every_n_layers": config.global_attention_every,
            "global_rope_theta": config.global_rope_theta,
            "local_rope_theta": config.local_rope_theta,
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
        found["type_vocab_size"] = 1 if family.has_offset else 2
    return json.dumps(found, indent=1)
