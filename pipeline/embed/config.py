"""Settings of offline embedding."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.record import Record


class CatalogueConfig(Record):
    """Settings for the catalogue to embed, which is a table with one row per text."""

    retired: ClassVar[Mapping[str, Any]] = {"quarantine_rows": 1000, "window_rows": 16_384}

    path: str | None = Field(
        None,
        description="File or folder to embed (file:// or s3://). By default, the distinct products of the data input"
        " are embedded",
    )
    format: Literal["auto", "parquet", "csv", "jsonl"] = Field(
        "auto", description="Input format (auto: determined by the file name suffix)"
    )
    id: str = Field("product_id", min_length=1, description="Column with the unique id (text or integers)")
    title: str = Field("title", min_length=1, description="Column with the title")
    text: str = Field("text", min_length=1, description="Optional column with a longer text to append to the title")
    filter: dict[str, str] = Field(
        {}, description="Only embed rows that match these column values: column=value or column=value|value"
    )
    max_bad_fraction: float = Field(
        0.05, ge=0, le=1, description="Fail if more than this fraction of the rows has no usable id or text"
    )


class OutputConfig(Record):
    """Settings for the output files."""

    format: Literal["parquet", "npy"] = Field(
        "parquet", description="parquet: ids and vectors in one file. npy: vectors as .npy, ids in a Parquet file"
    )
    dtype: Literal["fp16", "fp32", "int8"] = Field(
        "fp16", description="Data type of the stored vectors (int8 adds a column with a scale for each vector)"
    )
    dimensions: int = Field(
        0, ge=0, description="Number of leading dimensions to keep, after which vectors are normalised again (0: all)"
    )
    rows_per_part: int = Field(
        65_536,
        ge=1,
        le=10_000_000,
        description="Rows per output part. Interrupted jobs resume after the last complete part",
    )
    carry_over: Literal["auto", "none"] = Field(
        "auto",
        description="auto: reuse the vectors of unchanged rows from the newest cycle with the same model and settings",
    )


FRAME = 2
"""Number of special tokens in every text, which are [CLS] and [SEP]."""
GRAPH_FIELDS = frozenset({"buckets", "tokens_per_batch", "precision"})
"""Names of the EmbedConfig fields that affect the graphs."""


class EmbedConfig(Record):
    """Settings of offline embedding."""

    retired: ClassVar[Mapping[str, Any]] = {"tokenise_processes": 0, "verify": ..., "verify.serve": "serving"}

    buckets: tuple[Annotated[int, Field(ge=8)], ...] = Field(
        (128, 512),
        min_length=1,
        max_length=6,
        description="Static row lengths in tokens, in ascending order. Several short texts share a row, and texts that"
        " do not fit the longest row are truncated or split into chunks",
    )
    tokens_per_batch: int = Field(
        0,
        ge=0,
        description="Tokens per batch, including padding. 0: 1024 on cpu, 4096 on xla, 4096 on neuron, 32768 on cuda",
    )
    chunks: int = Field(
        1,
        ge=1,
        le=64,
        description="Maximum number of chunks for a text that is too long for the model. The vector of the text is the"
        " token-weighted mean of the chunk vectors, and any remaining text is ignored",
    )
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Precision of the encoder")
    compiled: bool = Field(True, description="Use torch.compile on cuda, which requires a C compiler")
    checkpoint: str = Field(
        "", description="Checkpoint to embed with: checkpoints/<cycle>/step-<n> or a URI (empty: the production model)"
    )
    workers: int = Field(1, ge=1, le=10_000, description="Number of workers, for example the size of the array job")
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
        """Return the number of tokens per batch. `default` is the Backend.default_tokens of the device."""
        return self.tokens_per_batch or max(default, self.buckets[-1])

    def chunk_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the maximum number of tokens that the encoder reads at a time.

        This is the length that the model was trained on, if known, unless the longest row is shorter.
        """
        return min(max_tokens or max_positions, max_positions, self.buckets[-1])

    def row_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the length of the longest row if the model could read longer texts, or 0 otherwise."""
        limit = self.chunk_limit(max_tokens, max_positions)
        return limit if limit < min(max_tokens or max_positions, max_positions) else 0

    def text_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the maximum number of tokens of a text that are read, in one or several chunks."""
        return max_text_tokens(self.chunk_limit(max_tokens, max_positions), self.chunks)


def max_text_tokens(chunk_tokens: int, chunks: int) -> int:
    """Return the length of a text that fills `chunks` chunks. Every chunk also has a [CLS] and a [SEP] token."""
    return chunks * (chunk_tokens - FRAME) + FRAME


def max_chunk_tokens(max_tokens: int, chunks: int) -> int:
    """Return the chunk length for texts of `max_tokens`. This is the inverse of `max_text_tokens`."""
    return (max_tokens - FRAME) // chunks + FRAME
