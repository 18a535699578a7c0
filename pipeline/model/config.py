"""Shape of the model. Presets give the encoder sizes; any single field may be set over them."""

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from pipeline.core.errors import ConfigError
from pipeline.core.record import Record, with_retired

Architecture = Literal["bert", "mpnet", "modernbert"]
Pooling = Literal["mean", "cls", "last"]
_OF_MODERNBERT = frozenset({"global_attention_every", "local_attention", "global_rope_theta", "local_rope_theta"})
"""Retired: every published ModernBERT has these values (model/encoder.py)."""
_OF_FACTORY = frozenset({"factory", "factory_options"})
_OF_OURS = frozenset(
    {"preset", "architecture", "num_layers", "num_heads", "intermediate_size", "layer_norm_eps", "dropout"}
)
"""What says nothing about an encoder that a factory builds."""
ENCODER_FIELDS = (
    frozenset({"architecture", "max_positions", "layer_norm_eps", "pooling"}) | _OF_MODERNBERT | _OF_FACTORY
)
"""What decides the encoder, beside its sizes."""
MOST_POSITIONS = 8192
MPNET_PAD = 1
"""Padding of every MPNet: its code counts positions from this token, whatever its settings say."""


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
    """A text encoder shared by query and product, interactions over both embeddings, and a relevance head."""

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
        description="package.module:function of yours that returns the encoder, in place of those here;"
        " docs/encoders.md",
    )
    factory_options: dict[str, JsonValue] = Field(
        {}, description="Arguments of that function by name, beside vocab_size, pad_id and max_positions"
    )
    hidden_size: int | None = Field(
        None, ge=8, description="Encoder width D (default: preset); with a factory: of its states or vectors"
    )
    num_layers: int | None = Field(None, ge=1, description="Encoder layers (default: preset)")
    num_heads: int | None = Field(None, ge=1, description="Attention heads (default: preset)")
    intermediate_size: int | None = Field(None, ge=8, description="Encoder feed-forward width (default: preset)")
    max_positions: int = Field(
        512, ge=8, le=MOST_POSITIONS, description="Position embeddings; the longest bucket must fit"
    )
    layer_norm_eps: float = Field(1e-12, gt=0, description="Layer-norm epsilon of the encoder (BERT: 1e-12)")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in the encoder (0: off; very slow on XLA:CPU)")
    pooling: Pooling = Field("mean", description="Text embedding from token states: their mean, the first or the last")
    interaction_size: int = Field(
        128, ge=4, description="Width each text embedding is projected to for the interactions"
    )
    cross_layers: int = Field(2, ge=0, le=8, description="DCN-v2 cross layers")
    token_match: bool = Field(
        False,
        description="The relevance head also sees how well the tokens of both texts find each other (late interaction);"
        " embeddings are as without",
    )
    mlp_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field((256, 128), description="Widths of the implicit MLP")
    feature_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (64, 64), description="Widths of the MLP over numeric and categorical features"
    )
    init_from: str | None = Field(
        None,
        description="URI of a Hugging Face folder to start the encoder from, of the architecture above or of the"
        " factory's module",
    )

    @model_validator(mode="after")
    def _factory_fits(self) -> Self:
        if self.factory is None:
            if self.factory_options:
                raise ValueError("factory_options without a factory: expected factory package.module:function")
            return self
        if self.hidden_size is None:
            raise ValueError("factory without hidden_size: expected the width of the states or vectors of its module")
        if self.token_match:
            raise ValueError("token_match with a factory: expected token_match false, its states are not seen here")
        if self.architecture != "bert" or self.dropout:
            name = "dropout" if self.dropout else "architecture"
            raise ValueError(f"{name} with a factory: expected it among factory_options, which its function reads")
        return self

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        """Raises ConfigError as `encoder`, before anything is prepared for it."""
        self.encoder  # noqa: B018 - the heads must divide the width
        return self

    def used_fields(self) -> dict[str, Any]:
        """Return the fields that say something about this architecture, for JSON.

        BERT has none of those that came with others, and retired ones have their neutral values, so that identities of
        runs and names of graphs stay what they were.
        """
        unused = set[str]() if self.architecture == "modernbert" else set(_OF_MODERNBERT)
        if not self.token_match:
            unused.add("token_match")
        if self.factory is not None:
            unused |= _OF_OURS
        else:
            unused |= _OF_FACTORY
            if self.architecture == "bert":
                unused.add("architecture")
        return {name: value for name, value in with_retired(self).items() if name not in unused}

    def shape(self) -> dict[str, Any]:
        """The fields above with the sizes of the encoder; of one that a factory builds its width, options as text."""
        if self.factory is None:
            return {**self.used_fields(), **self.encoder.model_dump()}
        return {**self.used_fields(), "factory_options": json.dumps(self.factory_options, sort_keys=True)}

    @property
    def encoder(self) -> EncoderSize:
        """The preset with single fields set over it.

        Raises ConfigError when the heads do not divide the width; of modernbert into even ones, whose halves are turned
        against each other.
        """
        base = PRESETS[self.preset]
        size = EncoderSize(
            hidden_size=self.hidden_size or base.hidden_size,
            num_layers=self.num_layers or base.num_layers,
            num_heads=self.num_heads or base.num_heads,
            intermediate_size=self.intermediate_size or base.intermediate_size,
        )
        unit = size.num_heads * (2 if self.architecture == "modernbert" else 1)
        if self.factory is None and size.hidden_size % unit:
            raise ConfigError(
                f"model.hidden_size {size.hidden_size} with model.num_heads {size.num_heads}",
                expected="a width that the heads divide" + (", each into an even one" if unit > size.num_heads else ""),
                next_command=f"--model.hidden-size {-(-size.hidden_size // unit) * unit}, or another --model.num-heads",
            )
        return size


class LossConfig(Record):
    """What the model is trained for: grades of pairs, vectors that find products, or both."""

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
        1.0, ge=0, description="Weight of the contrastive loss over the products of the whole global batch; 0: off"
    )
    temperature: float = Field(0.05, ge=0.001, description="Divides the cosine similarities")
    matryoshka_sizes: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Widths below the model's, rising: the contrastive loss is the mean over the first so many"
        " dimensions of the vectors and over all, so that vectors may be cut (embed.output.dimensions)",
    )
    positive_gain: float = Field(
        0.99, ge=0, le=1, description="Pairs with at least this gain are contrastive positives"
    )

    @model_validator(mode="after")
    def _terms_fit(self) -> Self:
        if not self.graded_weight and not self.contrastive_weight:
            raise ValueError("no term of the loss has a weight: expected graded_weight or contrastive_weight above 0")
        if any(narrow >= wide for narrow, wide in pairwise(self.matryoshka_sizes)):
            raise ValueError(f"matryoshka_sizes {self.matryoshka_sizes}: expected rising widths")
        if self.matryoshka_sizes and not self.contrastive_weight:
            raise ValueError("matryoshka_sizes without a contrastive loss: nothing is learnt of vectors")
        return self

    def used_fields(self) -> dict[str, Any]:
        """Return the fields for JSON as hashes have them: those of the first version, its defaults for retired ones."""
        fields = with_retired(self)
        del fields["memory_batches"]  # came later, and was left out where it was off
        return fields

    @property
    def trains_head(self) -> bool:
        """Whether the scores of pairs are learnt."""
        return self.graded_weight > 0

    def check_width(self, width: int) -> None:
        """Raises ConfigError unless every size is below the width of the vectors, which is always one of them."""
        if self.matryoshka_sizes and self.matryoshka_sizes[-1] >= width:
            below = ",".join(str(size) for size in self.matryoshka_sizes if size < width)
            raise ConfigError(
                f"train.loss.matryoshka_sizes has {self.matryoshka_sizes[-1]}, the model's vectors have {width}",
                expected=f"sizes below {width}; all {width} dimensions are always trained",
                next_command=f"--train.loss.matryoshka-sizes {below or '[]'}",
            )


class InputSpec(Record):
    """What the data fixes about the model: vocabulary, classes and features. Stored with every checkpoint."""

    vocab_size: int
    pad_id: int
    labels: tuple[str, ...]
    label_gains: tuple[float, ...]
    numeric: tuple[str, ...] = ()
    categorical_ids: tuple[int, ...] = ()
    query_prefix: str = ""
    """Stands before every query."""
    product_prefix: str = ""

    def used_fields(self) -> dict[str, Any]:
        """Without prefixes where there are none, so that identities stay what they were before there could be any."""
        found = self.model_dump(mode="json")
        return {name: value for name, value in found.items() if value or not name.endswith("_prefix")}

    @property
    def num_classes(self) -> int:
        return len(self.labels)


def difference(ours: Any, theirs: Any) -> str:
    """Return how a field of the data differs from that of a model: for names, those that are missing and new."""
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and {*ours} != {*theirs} and "" not in {*ours, *theirs}:
        sides = (
            ("missing", [one for one in theirs if one not in ours]),
            ("new", [one for one in ours if one not in theirs]),
        )
        return "; ".join(f"{side}: {', '.join(map(str, names))}" for side, names in sides if names)
    return f"{ours!r}, there {theirs!r}"


def check_architecture(found: ModelConfig, ours: ModelConfig, *, where: str) -> None:
    """Raises ConfigError naming the first field in which two models differ in shape."""
    ignored = {"preset", "dropout", "init_from", "hidden_size", "num_layers", "num_heads", "intermediate_size"}
    sizes = None
    if found.factory is not None and ours.factory is not None:
        ignored |= _OF_OURS
        sizes = {"hidden_size"}
    theirs = {**found.model_dump(exclude=ignored), **found.encoder.model_dump(include=sizes)}
    wanted = {**ours.model_dump(exclude=ignored), **ours.encoder.model_dump(include=sizes)}
    for name, value in wanted.items():
        if theirs[name] != value:
            raise ConfigError(
                f"{where} has model.{name} {theirs[name]}",
                expected=f"{value}, from the settings",
                next_command="use the checkpoint's model settings, or --train.start scratch",
            )
