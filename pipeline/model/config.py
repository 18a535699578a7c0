"""Model and loss settings. Presets give the encoder sizes, and any field overrides its preset."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from pipeline.core.errors import ConfigError
from pipeline.core.record import Record, with_retired

Architecture = Literal["bert", "mpnet", "modernbert"]
Pooling = Literal["mean", "cls", "last"]
_MODERNBERT_FIELDS = frozenset({"global_attention_every", "local_attention", "global_rope_theta", "local_rope_theta"})
"""Retired because every published ModernBERT has the same values (model/encoder.py)."""
_FACTORY_FIELDS = frozenset({"factory", "factory_options"})
_BUILT_IN_FIELDS = frozenset(
    {"preset", "architecture", "num_layers", "num_heads", "intermediate_size", "layer_norm_eps", "dropout"}
)
"""Fields that do not apply to an encoder built by a factory."""
ENCODER_FIELDS = (
    frozenset({"architecture", "max_positions", "layer_norm_eps", "pooling"}) | _MODERNBERT_FIELDS | _FACTORY_FIELDS
)
"""Fields that determine the encoder, in addition to its sizes."""
MAX_POSITIONS = 8192
MPNET_PAD = 1
"""Padding token of every MPNet, whose code counts positions from this token regardless of its settings."""


class EncoderSize(Record):
    """Sizes of a BERT-style encoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int


PRESETS: dict[str, EncoderSize] = {
    "tiny": EncoderSize(hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512),
    # MiniLM-L6, BERT base and BERT large as published on Hugging Face.
    "small": EncoderSize(hidden_size=384, num_layers=6, num_heads=12, intermediate_size=1536),
    "base": EncoderSize(hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072),
    "large": EncoderSize(hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096),
}


class ModelConfig(Record):
    """Settings of a text encoder shared by query and product, interactions of both embeddings and a relevance head."""

    retired: ClassVar[Mapping[str, Any]] = {
        "global_attention_every": 3,
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "interactions": "both",
        "categorical_size": 16,
    }
    preset: Literal["tiny", "small", "base", "large"] = Field(
        "tiny", description="Encoder sizes: 128x2, 384x6, 768x12, 1024x24"
    )
    architecture: Architecture = Field(
        "bert", description="Encoder: bert (also RoBERTa, XLM-R, CamemBERT), mpnet or modernbert; docs/encoders.md"
    )
    factory: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="package.module:function that builds your own encoder instead of a built-in one; docs/encoders.md",
    )
    factory_options: dict[str, JsonValue] = Field(
        {}, description="Keyword arguments of the factory, in addition to vocab_size, pad_id and max_positions"
    )
    hidden_size: int | None = Field(
        None, ge=8, description="Encoder width D (default: preset); required with a factory: width of its output"
    )
    num_layers: int | None = Field(None, ge=1, description="Encoder layers (default: preset)")
    num_heads: int | None = Field(None, ge=1, description="Attention heads (default: preset)")
    intermediate_size: int | None = Field(None, ge=8, description="Encoder feed-forward width (default: preset)")
    max_positions: int = Field(
        512,
        ge=8,
        le=MAX_POSITIONS,
        description="Number of position embeddings, at least the length of the longest bucket",
    )
    layer_norm_eps: float = Field(1e-12, gt=0, description="Layer-norm epsilon of the encoder (BERT: 1e-12)")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in the encoder (0: off; very slow on XLA:CPU)")
    pooling: Pooling = Field(
        "mean", description="Pooling of token states to a text embedding: mean, first or last token"
    )
    interaction_size: int = Field(
        128, ge=4, description="Width to which each text embedding is projected for the interactions"
    )
    cross_layers: int = Field(2, ge=0, le=8, description="Number of DCN-v2 cross layers")
    token_match: bool = Field(
        False, description="Add token-level matches of both texts to the relevance head's inputs (late interaction)"
    )
    mlp_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field((256, 128), description="Widths of the implicit MLP")
    feature_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (64, 64), description="Widths of the MLP over numeric and categorical features"
    )
    init_from: str | None = Field(
        None, description="URI of a Hugging Face folder with initial encoder weights for this architecture or factory"
    )

    @model_validator(mode="after")
    def _factory_fits(self) -> Self:
        if self.factory is None:
            if self.factory_options:
                raise ValueError("factory_options is set without factory, expected factory package.module:function")
            return self
        if self.hidden_size is None:
            raise ValueError("factory is set without hidden_size, expected the width of its module's states or vectors")
        if self.token_match:
            raise ValueError("token_match is not supported with a factory, expected token_match false")
        if self.architecture != "bert" or self.dropout:
            name = "dropout" if self.dropout else "architecture"
            raise ValueError(f"{name} has no effect with a factory, expected it in factory_options")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        self.encoder  # noqa: B018 - raises ConfigError early if the heads do not divide the width
        return self

    def used_fields(self) -> dict[str, Any]:
        """Return the fields that apply to this architecture, for JSON.

        Fields of later architectures are omitted for BERT, and retired fields have their neutral values, so that run
        identities and graph names never change.
        """
        unused = set[str]() if self.architecture == "modernbert" else set(_MODERNBERT_FIELDS)
        if not self.token_match:
            unused.add("token_match")
        if self.factory is not None:
            unused |= _BUILT_IN_FIELDS
        else:
            unused |= _FACTORY_FIELDS
            if self.architecture == "bert":
                unused.add("architecture")
        return {name: value for name, value in with_retired(self).items() if name not in unused}

    def shape(self) -> dict[str, Any]:
        """Return `used_fields` with the encoder's sizes or, for a factory, with its options as JSON text."""
        if self.factory is None:
            return {**self.used_fields(), **self.encoder.model_dump()}
        return {**self.used_fields(), "factory_options": json.dumps(self.factory_options, sort_keys=True)}

    @property
    def encoder(self) -> EncoderSize:
        """The encoder's sizes: the preset, overridden by fields that are set.

        Raises ConfigError if the heads do not divide the width, for ModernBERT into even widths (rotary embeddings).
        """
        base = PRESETS[self.preset]
        size = EncoderSize(
            hidden_size=self.hidden_size or base.hidden_size,
            num_layers=self.num_layers or base.num_layers,
            num_heads=self.num_heads or base.num_heads,
            intermediate_size=self.intermediate_size or base.intermediate_size,
        )
        divisor = size.num_heads * (2 if self.architecture == "modernbert" else 1)
        if self.factory is None and size.hidden_size % divisor:
            valid = -(-size.hidden_size // divisor) * divisor
            raise ConfigError(
                f"model.hidden_size {size.hidden_size} is no multiple of {divisor} (model.num_heads {size.num_heads})",
                expected=f"a multiple of {divisor}, such as {valid}",
                next_command=f"--model.hidden-size {valid}, or another --model.num-heads",
            )
        return size


class LossConfig(Record):
    """Settings of the training loss: graded relevance of pairs, contrastive embeddings for retrieval, or both."""

    retired: ClassVar[Mapping[str, Any]] = {
        "purpose": "both",
        "listwise_weight": 0.0,
        "head_gradient": 1.0,
        "learn_temperature": False,
        "memory_batches": 0,
        "symmetric_share": 0.0,
        "false_negative_margin": None,
    }
    graded_weight: float = Field(
        1.0,
        ge=0,
        description="Weight of the cross entropy over relevance classes; 0: the relevance head is not trained",
    )
    contrastive_weight: float = Field(
        1.0, ge=0, description="Weight of the contrastive loss over all products of the global batch; 0: off"
    )
    temperature: float = Field(0.05, ge=0.001, description="Temperature that divides the cosine similarities")
    matryoshka_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Ascending widths below the model's, to which vectors can be truncated (embed.output.dimensions):"
        " the contrastive loss is averaged over these and the full width",
    )
    positive_gain: float = Field(
        0.99, ge=0, le=1, description="Pairs with at least this gain are contrastive positives"
    )

    @model_validator(mode="after")
    def _terms_fit(self) -> Self:
        if not self.graded_weight and not self.contrastive_weight:
            raise ValueError("both loss weights are 0, expected graded_weight or contrastive_weight above 0")
        if any(narrow >= wide for narrow, wide in pairwise(self.matryoshka_sizes)):
            raise ValueError(f"matryoshka_sizes is {self.matryoshka_sizes}, expected ascending widths")
        if self.matryoshka_sizes and not self.contrastive_weight:
            raise ValueError("matryoshka_sizes needs the contrastive loss, expected contrastive_weight above 0")
        return self

    def used_fields(self) -> dict[str, Any]:
        """Return the fields for JSON and hashes, with the fields of the first version and defaults for retired ones."""
        fields = with_retired(self)
        del fields["memory_batches"]  # added later, and omitted when it was off
        return fields

    @property
    def trains_head(self) -> bool:
        """True if the relevance head is trained."""
        return self.graded_weight > 0

    def check_width(self, width: int) -> None:
        """Raise ConfigError unless every Matryoshka size is below the width of the vectors."""
        if self.matryoshka_sizes and self.matryoshka_sizes[-1] >= width:
            below = ",".join(str(size) for size in self.matryoshka_sizes if size < width)
            raise ConfigError(
                f"train.loss.matryoshka_sizes has {self.matryoshka_sizes[-1]}, but the model's vectors have {width}",
                expected=f"sizes below {width} (full vectors are always trained)",
                next_command=f"--train.loss.matryoshka-sizes {below or '[]'}",
            )


class InputSpec(Record):
    """Properties of the data that determine the model: vocabulary, classes and features. Stored in checkpoints."""

    vocab_size: int
    pad_id: int
    labels: tuple[str, ...]
    label_gains: tuple[float, ...]
    numeric: tuple[str, ...] = ()
    categorical_ids: tuple[int, ...] = ()
    query_prefix: str = ""
    """Text prepended to every query."""
    product_prefix: str = ""

    def used_fields(self) -> dict[str, Any]:
        """Return the fields without empty prefixes, so that identities from before prefixes existed do not change."""
        fields = self.model_dump(mode="json")
        return {name: value for name, value in fields.items() if value or not name.endswith("_prefix")}

    @property
    def num_classes(self) -> int:
        return len(self.labels)


def difference(data: Any, model: Any) -> str:
    """Describe how a field of the data differs from that of a model, listing missing and new values of tuples."""
    if isinstance(data, tuple) and isinstance(model, tuple) and {*data} != {*model}:
        changes = (
            ("missing", [value for value in model if value not in data]),
            ("new", [value for value in data if value not in model]),
        )
        return "; ".join(f"{change}: {', '.join(map(str, values))}" for change, values in changes if values)
    return f"{data!r} instead of {model!r}"


def check_architecture(checkpoint: ModelConfig, settings: ModelConfig, *, source: str) -> None:
    """Raise ConfigError naming the first field in which the shapes of two models differ."""
    ignored = {"preset", "dropout", "init_from", "hidden_size", "num_layers", "num_heads", "intermediate_size"}
    sizes = None
    if checkpoint.factory is not None and settings.factory is not None:
        ignored |= _BUILT_IN_FIELDS
        sizes = {"hidden_size"}
    actual = {**checkpoint.model_dump(exclude=ignored), **checkpoint.encoder.model_dump(include=sizes)}
    expected = {**settings.model_dump(exclude=ignored), **settings.encoder.model_dump(include=sizes)}
    for name, value in expected.items():
        if actual[name] != value:
            raise ConfigError(
                f"{source} has model.{name} {actual[name]}",
                expected=f"{value}, from the settings",
                next_command="use the checkpoint's model settings, or --train.start scratch",
            )
