"""Settings of offline embedding."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.record import Record


class CatalogueConfig(Record):
    """The catalogue to embed: a table with one row per text."""

    retired: ClassVar[Mapping[str, Any]] = {"quarantine_rows": 1000, "window_rows": 16_384}

    path: str | None = Field(
        None, description="File or folder (file:// or s3://), or none to embed the distinct products of the data input"
    )
    format: Literal["auto", "parquet", "csv", "jsonl"] = Field("auto", description="Input format (auto: by suffix)")
    id: str = Field("product_id", min_length=1, description="Column of the unique id (text or integers)")
    title: str = Field("title", min_length=1, description="Column of the title")
    text: str = Field("text", min_length=1, description="Column of longer text, appended to the title (optional)")
    filter: dict[str, str] = Field(
        {}, description="Keep rows whose column equals the value, as column=value or column=value|value"
    )
    max_bad_fraction: float = Field(
        0.05, ge=0, le=1, description="Maximum fraction of rows without a usable id or text before the stage fails"
    )


class OutputConfig(Record):
    """How vectors are stored."""

    format: Literal["parquet", "npy"] = Field(
        "parquet", description="parquet: ids and vectors in one file. npy: vectors as .npy, ids in a Parquet file"
    )
    dtype: Literal["fp16", "fp32", "int8"] = Field(
        "fp16", description="Data type of stored vectors (int8 adds a column with one scale per vector)"
    )
    dimensions: int = Field(0, ge=0, description="Leading dimensions to keep, normalised again (0: all)")
    rows_per_part: int = Field(65_536, ge=1, le=10_000_000, description="Rows per output part, the unit of resume")
    carry_over: Literal["auto", "none"] = Field(
        "auto", description="auto: reuse vectors of unchanged rows from the newest cycle with equal model and settings"
    )


FRAME = 2
"""Tokens of every text: [CLS] and [SEP]."""
GRAPH_FIELDS = frozenset({"buckets", "tokens_per_batch", "precision"})
"""Fields of EmbedConfig that determine the graphs."""


class EmbedConfig(Record):
    """Settings of offline embedding."""

    retired: ClassVar[Mapping[str, Any]] = {"tokenise_processes": 0, "verify": ..., "verify.serve": "serving"}

    buckets: tuple[Annotated[int, Field(ge=8)], ...] = Field(
        (128, 512),
        min_length=1,
        max_length=6,
        description="Static row lengths in tokens, ascending. Texts share rows, longer texts are cut or chunked",
    )
    tokens_per_batch: int = Field(
        0,
        ge=0,
        description="Tokens per batch, padding included. 0: 1024 on cpu, 4096 on xla, 4096 on neuron, 32768 on cuda",
    )
    chunks: int = Field(
        1,
        ge=1,
        le=64,
        description="Maximum chunks of a text that exceeds the model's length. Its vector is the token-weighted mean of"
        " their vectors, and the rest of the text is cut",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Precision of the encoder (bf16 on cpu: only for matrix products)"
    )
    compiled: bool = Field(True, description="On cuda: use torch.compile, which needs a C compiler")
    checkpoint: str = Field(
        "", description="Checkpoint to embed with: checkpoints/<cycle>/step-<n> or a URI (empty: the production model)"
    )
    workers: int = Field(1, ge=1, le=10_000, description="Number of workers, such as the size of an array job")
    worker: int | None = Field(
        None, ge=0, description="0-based index of this worker (default: TRNJOBS_INDEX, or 0 for a single worker)"
    )
    catalogue: CatalogueConfig = CatalogueConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if any(short >= long for short, long in pairwise(self.buckets)):
            raise ValueError(f"buckets {self.buckets}: expected ascending lengths")
        if 0 < self.tokens_per_batch < self.buckets[-1]:
            raise ValueError(f"tokens_per_batch {self.tokens_per_batch}: expected at least {self.buckets[-1]} (a row)")
        return self

    def batch_tokens(self, default: int) -> int:
        """Return the tokens of a batch. `default`: Backend.default_tokens of the device."""
        return self.tokens_per_batch or max(default, self.buckets[-1])

    def chunk_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the tokens the encoder reads at a time: the trained length (if known), limited by the longest row."""
        return min(max_tokens or max_positions, max_positions, self.buckets[-1])

    def row_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the tokens of the longest row if it limits the model, else 0."""
        limit = self.chunk_limit(max_tokens, max_positions)
        return limit if limit < min(max_tokens or max_positions, max_positions) else 0

    def text_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the tokens of a text that are read, in one or several chunks."""
        return max_text_tokens(self.chunk_limit(max_tokens, max_positions), self.chunks)


def max_text_tokens(chunk_tokens: int, chunks: int) -> int:
    """Return the tokens of a text that fills `chunks` chunks, each of which has its [CLS] and [SEP]."""
    return chunks * (chunk_tokens - FRAME) + FRAME


def max_chunk_tokens(max_tokens: int, chunks: int) -> int:
    """Return the tokens of one of the `chunks` chunks of a text of `max_tokens`: the inverse of `max_text_tokens`."""
    return (max_tokens - FRAME) // chunks + FRAME
