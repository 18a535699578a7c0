"""Model and loss settings. A preset defines the sizes of the encoder, each of which can be overridden by a field."""

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
"""Retired fields, since all published ModernBERT models use the same values (see model/encoder.py)."""
_FACTORY_FIELDS = frozenset({"factory", "factory_options"})
_BUILT_IN_FIELDS = frozenset(
    {"preset", "architecture", "num_layers", "num_heads", "intermediate_size", "layer_norm_eps", "dropout"}
)
"""Fields that are not used if the encoder is built by a factory."""
ENCODER_FIELDS = (
    frozenset({"architecture", "max_positions", "layer_norm_eps", "pooling"}) | _MODERNBERT_FIELDS | _FACTORY_FIELDS
)
"""Fields that determine the encoder, in addition to its sizes."""
MAX_POSITIONS = 8192
LEXICAL = "lex_"
"""Prefix of the names of lexical features."""
MPNET_PAD = 1
"""Padding token id of MPNet models, which is hardcoded in transformers as the offset of positions."""


class EncoderSize(Record):
    """The sizes of a BERT-style encoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int


PRESETS: dict[str, EncoderSize] = {
    "tiny": EncoderSize(hidden_size=128, num_layers=2, num_heads=2, intermediate_size=512),
    # These are the sizes of MiniLM-L6, BERT base and BERT large on Hugging Face.
    "small": EncoderSize(hidden_size=384, num_layers=6, num_heads=12, intermediate_size=1536),
    "base": EncoderSize(hidden_size=768, num_layers=12, num_heads=12, intermediate_size=3072),
    "large": EncoderSize(hidden_size=1024, num_layers=24, num_heads=16, intermediate_size=4096),
}


class ModelConfig(Record):
    """Settings for the model, which consists of a text encoder, interactions and a relevance head."""

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
        "bert",
        description="Encoder architecture: bert (also for RoBERTa, XLM-R and CamemBERT), mpnet or modernbert; see"
        " docs/encoders.md",
    )
    factory: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$",
        description="Function that builds a custom encoder, as package.module:function; see docs/encoders.md",
    )
    factory_options: dict[str, JsonValue] = Field({}, description="Additional keyword arguments to pass to the factory")
    hidden_size: int | None = Field(
        None, ge=8, description="Hidden size of the encoder (default: from the preset); required if factory is set"
    )
    num_layers: int | None = Field(None, ge=1, description="Number of encoder layers (default: from the preset)")
    num_heads: int | None = Field(None, ge=1, description="Number of attention heads (default: from the preset)")
    intermediate_size: int | None = Field(
        None, ge=8, description="Size of the encoder's feed-forward layers (default: from the preset)"
    )
    max_positions: int = Field(
        512,
        ge=8,
        le=MAX_POSITIONS,
        description="Number of position embeddings, which must be at least the length of the longest bucket",
    )
    layer_norm_eps: float = Field(1e-12, gt=0, description="Epsilon of the encoder's layer norms (BERT uses 1e-12)")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Dropout probability in the encoder (very slow on XLA:CPU if above 0)"
    )
    pooling: Pooling = Field(
        "mean", description="How to pool token states to a text embedding: mean, cls (first token) or last token"
    )
    interaction_size: int = Field(
        128, ge=4, description="Size that each text embedding is projected to for the interactions"
    )
    cross_layers: int = Field(2, ge=0, le=8, description="Number of DCN-v2 cross layers")
    token_match: bool = Field(
        False, description="Also match the texts token by token for the relevance head (late interaction)"
    )
    mlp_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (256, 128), description="Layer sizes of the MLP over both texts and the features"
    )
    feature_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (64, 64), description="Layer sizes of the MLP over numeric and categorical features"
    )
    init_from: str | None = Field(
        None, description="URI of a Hugging Face folder to load the initial encoder weights from"
    )

    @model_validator(mode="after")
    def _factory_fits(self) -> Self:
        if self.factory is None:
            if self.factory_options:
                raise ValueError("factory_options is set without factory, expected factory package.module:function")
            return self
        if self.hidden_size is None:
            raise ValueError("factory is set without hidden_size, expected the size of the vectors that it returns")
        if self.token_match:
            raise ValueError("token_match is not supported with a factory, expected token_match false")
        if self.architecture != "bert" or self.dropout:
            name = "dropout" if self.dropout else "architecture"
            raise ValueError(f"{name} has no effect with a factory, expected it in factory_options")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        self.encoder  # noqa: B018 - raises ConfigError if the hidden size is not divisible by the heads
        return self

    def used_fields(self) -> dict[str, Any]:
        """Return the fields that are used by this architecture as JSON values.

        Retired fields are included with their neutral values, and BERT omits fields that were added for other
        architectures. This ensures that run identities and graph names don't change between versions.
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
        """Return `used_fields` with the resolved encoder sizes or, for a factory, with its options as a JSON string."""
        if self.factory is None:
            return {**self.used_fields(), **self.encoder.model_dump()}
        return {**self.used_fields(), "factory_options": json.dumps(self.factory_options, sort_keys=True)}

    @property
    def encoder(self) -> EncoderSize:
        """The sizes of the encoder, which are those of the preset unless a field overrides them.

        Raises ConfigError if the hidden size is not divisible by the number of heads. For ModernBERT, the size of each
        head must also be even, because of rotary embeddings.
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
                f"model.hidden_size {size.hidden_size} is not a multiple of {divisor}"
                f" (model.num_heads {size.num_heads})",
                expected=f"a multiple of {divisor}, such as {valid}",
                next_command=f"--model.hidden-size {valid}, or a different --model.num-heads",
            )
        return size


class LossConfig(Record):
    """Settings for the training loss, which combines a graded relevance loss and a contrastive loss."""

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
        description="Weight of the cross entropy over relevance classes; if 0, the relevance head is not trained",
    )
    contrastive_weight: float = Field(
        1.0, ge=0, description="Weight of the contrastive loss over all products in the global batch; 0 disables it"
    )
    temperature: float = Field(
        0.05, ge=0.001, description="Temperature of the contrastive loss, which divides cosine similarities"
    )
    matryoshka_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Ascending sizes that vectors can be truncated to (embed.output.dimensions); the contrastive loss"
        " is averaged over these sizes and the full vectors",
    )
    positive_gain: float = Field(
        0.99, ge=0, le=1, description="Minimum gain of a pair to be used as a positive in the contrastive loss"
    )
    teacher_weight: float = Field(
        1.0, gt=0, description="Weight of the term that compares vectors or scores with those of train.teacher"
    )

    @model_validator(mode="after")
    def _terms_fit(self) -> Self:
        if not self.graded_weight and not self.contrastive_weight:
            raise ValueError("both loss weights are 0, expected graded_weight or contrastive_weight above 0")
        if any(narrow >= wide for narrow, wide in pairwise(self.matryoshka_sizes)):
            raise ValueError(f"matryoshka_sizes is {self.matryoshka_sizes}, expected ascending widths")
        if self.matryoshka_sizes and not self.contrastive_weight:
            raise ValueError("matryoshka_sizes requires the contrastive loss, expected contrastive_weight above 0")
        return self

    def used_fields(self) -> dict[str, Any]:
        """Return the fields for JSON and hashes, including the defaults of retired fields."""
        fields = with_retired(self)
        del fields["memory_batches"]  # was not part of the first version, and was omitted if it was disabled
        if fields["teacher_weight"] == LossConfig.model_fields["teacher_weight"].default:  # added later
            del fields["teacher_weight"]
        return fields

    @property
    def trains_head(self) -> bool:
        """True if the relevance head is trained."""
        return self.graded_weight > 0

    def check_width(self, width: int) -> None:
        """Raise ConfigError if a Matryoshka size is not below the size of the full vectors."""
        if self.matryoshka_sizes and self.matryoshka_sizes[-1] >= width:
            below = ",".join(str(size) for size in self.matryoshka_sizes if size < width)
            raise ConfigError(
                f"train.loss.matryoshka_sizes has {self.matryoshka_sizes[-1]}, but the model's vectors have {width}",
                expected=f"sizes below {width} (full vectors are always included)",
                next_command=f"--train.loss.matryoshka-sizes {below or '[]'}",
            )


class Attribute(Record):
    """A property that queries, products or both have, such as a brand or a price."""

    short: ClassVar[tuple[str, ...]] = ("name", "kind")
    name: str = Field(min_length=1, description="Name of the attribute")
    query: str | None = Field(None, description="Column for queries (default: found by name, empty: none)")
    product: str | None = Field(None, description="Column for products (default: found by name, empty: none)")
    kind: Literal["text", "number"] | None = Field(None, description="Kind of its values (default: read from the data)")

    @property
    def features(self) -> tuple[str, ...]:
        """Names of its numeric features. If its columns or its kind are not known yet, it is a text on both sides."""
        if "" not in (self.query, self.product):
            names = ("difference", "log_ratio") if self.kind == "number" else ("equal", "near")
            return tuple(f"{self.name}_{name}" for name in names)
        return (self.name,) if self.kind == "number" else ()


NUMBER_BINS = 12
"""Number of bins of each numeric feature in new models."""


class InputSpec(Record):
    """The properties of the data that the model depends on, which are stored in checkpoints."""

    vocab_size: int
    pad_id: int
    labels: tuple[str, ...]
    label_gains: tuple[float, ...]
    numeric: tuple[str, ...] = ()
    categorical_ids: tuple[int, ...] = ()
    query_prefix: str = ""
    """Text that is prepended to every query."""
    product_prefix: str = ""
    attributes: tuple[Attribute, ...] = ()
    """The attributes, whose texts are appended to queries and titles, with their columns and kinds."""
    missing: tuple[str, ...] = ()
    """The first of the numeric features, which have an indicator that is 1 if the number is missing. Empty in models of
    earlier versions, in which a missing number is the same as the mean."""
    bins: int = 0
    """Number of bins of each of these features (see FeatureEncoder). 0 in models of earlier versions."""

    def used_fields(self) -> dict[str, Any]:
        """Return the fields except for later ones that are empty, so that the identities of older runs don't change."""
        fields = self.model_dump(mode="json")
        later = ("query_prefix", "product_prefix", "attributes", "missing", "bins")
        return {name: value for name, value in fields.items() if value or name not in later}

    def with_numbers(self, names: tuple[str, ...]) -> "InputSpec":
        """Return a copy for a new model, in which the numeric features with these names may be missing."""
        return self.model_copy(update={"missing": names, "bins": NUMBER_BINS if names else 0})

    def with_numbers_of(self, parent: "InputSpec") -> "InputSpec":
        """Return a copy whose numbers have the same form as in the model of a parent."""
        return self.model_copy(update={"missing": parent.missing, "bins": parent.bins})

    def continuing(self, parent: "InputSpec") -> "InputSpec":
        """Return a copy for a run that continues a parent, with its gains and its form of numbers."""
        return self.with_numbers_of(parent).model_copy(update={"label_gains": parent.label_gains})

    @property
    def may_miss(self) -> bool:
        """True if any numeric feature may be missing, which is not the case for lexical features."""
        return any(not name.startswith(LEXICAL) for name in self.numeric)

    @property
    def num_classes(self) -> int:
        return len(self.labels)


def difference(data: Any, model: Any) -> str:
    """Describe the difference between a field of the data and of a model. For tuples, lists missing and new values."""
    if isinstance(data, tuple) and isinstance(model, tuple) and {*map(str, data)} != {*map(str, model)}:
        changes = (
            ("missing", [value for value in model if value not in data]),
            ("new", [value for value in data if value not in model]),
        )
        return "; ".join(f"{change}: {', '.join(map(str, values))}" for change, values in changes if values)
    return f"{data!r} instead of {model!r}"


def check_architecture(checkpoint: ModelConfig, settings: ModelConfig, *, source: str) -> None:
    """Raise ConfigError for the first model setting that differs between a checkpoint and the settings.

    Settings that don't affect the shapes of weights are ignored.
    """
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
                expected=f"{value}, as in the settings",
                next_command="use the model settings of the checkpoint, or --train.start scratch",
            )
