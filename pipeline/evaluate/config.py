"""Settings of the evaluate stage."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from pipeline.core.metrics.config import MetricsConfig


class RetrievalConfig(BaseModel):
    """Search with the embeddings against a whole catalogue, exactly."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = Field(True, description="Evaluate retrieval at all")
    catalogue: str | None = Field(
        None,
        description="File or folder (file:// or s3://) of items, each with the query it is relevant to; none: the"
        " distinct products of the prepared data, judged by the gains of the holdout",
    )
    format: Literal["auto", "parquet", "csv", "jsonl"] = Field("auto", description="Its layout; auto: by suffix")
    id: str = Field("product_id", description="Column of the item's id; of several rows with one id the first counts")
    title: str = Field("title", description="Column of the item's title")
    text: str = Field("text", description="Column of longer text, appended to the title (optional)")
    query: str = Field("query", description="Column of the query that the item is relevant to; empty: to none")
    query_id: str = Field("", description="Column that tells queries apart; empty: the query itself does")
    queries: Annotated[
        dict[str, str],
        Field(description="Ask only queries of items whose column equals the value, as column=value or a|b"),
    ] = {}
    valid_queries: Annotated[
        dict[str, str],
        Field(
            description="Of a catalogue file, the queries from which the weight of hybrid search is chosen, written"
            " as queries are, such as split=valid; none: no such weight"
        ),
    ] = {}
    max_queries: int = Field(5000, ge=1, description="Most queries asked, chosen by a hash of their id")
    max_items: int = Field(
        1_000_000, ge=1, description="Without a catalogue file: most products, all relevant ones and an even sample"
    )
    window_rows: int = Field(16_384, ge=1, le=1_000_000, description="Items read and embedded at a time")
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Also search with vectors cut to so many leading dimensions, to see what narrower ones would cost;"
        " the gate judges those of embed.output.dimensions",
    )


class BaselinesConfig(BaseModel):
    """Simple tools on the same holdout, scored once for the same data and known to the gate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bm25: bool = Field(True, description="BM25 for the queries of retrieval in the same items")
    boosting: bool = Field(
        True, description="Gradient boosting on the numeric features, for the same rows (extra: baselines)"
    )
    boosting_rows: int = Field(
        200_000, ge=100, le=5_000_000, description="Most rows of the train split it is fitted on, chosen evenly"
    )
    hybrid: bool = Field(True, description="Search of each model fused with that of BM25")
    valid_queries: int = Field(
        1000, ge=0, description="Most queries of the valid split from which the weight of the fusion is chosen; 0: none"
    )


class EvaluateConfig(BaseModel):
    """The candidate against the model in production, on one holdout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    candidate: str = Field(
        "", description="Checkpoint to judge, checkpoints/<cycle>/step-<n> or a URI; empty: the one this cycle trained"
    )
    incumbent: str = Field(
        "production",
        description="What it is held against: production, none, or a checkpoint (which then is never replaced)",
    )
    split: Literal["test", "valid"] = Field("test", description="Split of the holdout")
    partitions: Literal["all", "new"] = Field(
        "all", description="Partitions of the holdout: all, or those the incumbent was not trained on (all if too few)"
    )
    max_rows: int = Field(0, ge=0, description="Most rows scored, whole queries chosen by a hash of their id; 0: all")
    query_tokens: tuple[int, ...] = Field(
        (4, 8, 16), description="Slices by query length: the most tokens of each but the last; empty: no such slices"
    )
    leak: Literal["refuse", "warn", "off"] = Field(
        "refuse",
        description="Holdout queries that were trained on, by id or text: refuse above max_leak_share, or warn",
    )
    max_leak_share: float = Field(0.05, ge=0, le=1, description="Share of such queries that is only warned of")
    vector_rows: int = Field(512, ge=0, description="Rows whose embeddings are kept beside the scores, for parity")
    save_every_s: float = Field(30.0, gt=0, description="Seconds after which scored rows are saved")
    promote: bool = Field(True, description="Put a candidate that passes the gate into production")
    force_reason: str = Field("", description="Promote although the gate refuses; why (goes on record)")
    seed: int = Field(1, ge=0, description="Seed of the bootstrap")
    metrics: MetricsConfig = MetricsConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    baselines: BaselinesConfig = BaselinesConfig()

    @field_validator("query_tokens")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in zip((0, *value), value, strict=False)):
            raise ValueError("expected rising numbers of tokens, such as 4,8,16")
        return value
