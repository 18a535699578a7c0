"""config.json of a Hugging Face BERT: which of them this encoder computes exactly, and as which model settings."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.convert.source import Source
from pipeline.core.errors import ConfigError
from pipeline.model.config import PRESETS, EncoderSize, ModelConfig

CONFIG = "config.json"


class BertJson(BaseModel):
    """A Hugging Face config.json of a BERT or MiniLM encoder"""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    vocab_size: int = Field(ge=8, le=4_000_000)
    hidden_size: int = Field(ge=8, le=16_384)
    num_hidden_layers: int = Field(ge=1, le=256)
    num_attention_heads: int = Field(ge=1, le=256)
    intermediate_size: int = Field(ge=8, le=65_536)
    max_position_embeddings: int = Field(ge=8, le=8192)
    hidden_act: Literal["gelu"] = "gelu"
    layer_norm_eps: float = Field(1e-12, gt=0, le=0.1)
    position_embedding_type: Literal["absolute"] = "absolute"
    is_decoder: Literal[False] = False
    add_cross_attention: Literal[False] = False


class _Architecture(BaseModel):
    """A Hugging Face config.json with a model_type"""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: str
    architectures: tuple[str, ...] | None = None


def read_bert(source: Source, folder: str = "") -> BertJson:
    """Raises ConfigError naming the architecture, or the field, that this encoder does not compute."""
    name = folder + CONFIG
    found = source.json(name, _Architecture)
    if found.model_type != "bert":
        classes = f" ({', '.join(found.architectures)})" if found.architectures else ""
        raise ConfigError(
            f"{source.where(name)}: architecture {found.model_type}{classes}",
            expected="model_type bert: BERT, MiniLM and their like",
            next_command="import a model of that family",
        )
    return source.json(name, BertJson)


def settings_of(bert: BertJson, base: ModelConfig, source: str, **changes: Any) -> ModelConfig:
    """The model settings whose encoder is that one; what it does not decide is from `base`. Raises ConfigError."""
    size = EncoderSize(
        hidden_size=bert.hidden_size,
        num_layers=bert.num_hidden_layers,
        num_heads=bert.num_attention_heads,
        intermediate_size=bert.intermediate_size,
    )
    preset = next((name for name, known in PRESETS.items() if known == size), "")
    fields: dict[str, Any] = {
        **base.model_dump(),
        **({"preset": preset, **dict.fromkeys(size.model_dump())} if preset else size.model_dump()),
        "max_positions": bert.max_position_embeddings,
        "layer_norm_eps": bert.layer_norm_eps,
        "init_from": None,
        **changes,
    }
    try:
        config = ModelConfig.model_validate(fields)
        config.encoder  # noqa: B018 - the heads must divide the width
    except (ValidationError, ConfigError) as error:
        raise ConfigError(f"{source}: {str(error).splitlines()[0]}", expected="the sizes of a BERT encoder") from error
    return config
