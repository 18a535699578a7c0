"""Settings of offline embedding."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.record import Record


class CatalogueConfig(Record):
    """What is to be embedded: a table with one row for each text."""

    retired: ClassVar[Mapping[str, Any]] = {"quarantine_rows": 1000, "window_rows": 16_384}

    path: str | None = Field(
        None, description="File or folder (file:// or s3://); none: the distinct products of the data input"
    )
    format: Literal["auto", "parquet", "csv", "jsonl"] = Field("auto", description="Input layout; auto: by suffix")
    id: str = Field("product_id", min_length=1, description="Column of the id: text or whole numbers, each value once")
    title: str = Field("title", min_length=1, description="Column of the title")
    text: str = Field("text", min_length=1, description="Column of longer text, appended to the title (optional)")
    filter: dict[str, str] = Field(
        {}, description="Keep rows whose column equals the value, as column=value or column=value|value"
    )
    max_bad_fraction: float = Field(
        0.05, ge=0, le=1, description="Share of rows without a usable id or text above which the catalogue is refused"
    )


class OutputConfig(Record):
    """How vectors are stored."""

    format: Literal["parquet", "npy"] = Field(
        "parquet", description="parquet: id and vector in one file; npy: the bare matrix, ids in a Parquet file beside"
    )
    dtype: Literal["fp16", "fp32", "int8"] = Field(
        "fp16", description="Of stored vectors; int8: with a scale for each vector, in a column of its own"
    )
    dimensions: int = Field(0, ge=0, description="Leading dimensions kept, normalised again; 0: all")
    rows_per_part: int = Field(65_536, ge=1, le=10_000_000, description="Rows of one file: the unit of work and resume")
    carry_over: Literal["auto", "none"] = Field(
        "auto",
        description="auto: unchanged rows take over the vectors of the newest cycle that was embedded alike; none",
    )


FRAME = 2
"""Tokens of every text: [CLS] and [SEP]."""
GRAPH_FIELDS = frozenset({"buckets", "tokens_per_batch", "precision"})
"""Fields of EmbedConfig that decide graphs."""


class EmbedConfig(Record):
    """How catalogue texts become vectors."""

    retired: ClassVar[Mapping[str, Any]] = {"tokenise_processes": 0, "verify": ..., "verify.serve": "serving"}

    buckets: tuple[Annotated[int, Field(ge=8)], ...] = Field(
        (128, 512),
        min_length=1,
        max_length=6,
        description="Static lengths of a row, in tokens, rising: texts share rows; longer texts are cut or chunked",
    )
    tokens_per_batch: int = Field(
        0,
        ge=0,
        description="Tokens of one batch, padding included; 0: 1024 on cpu, 4096 on xla, 4096 on neuron, 32768 on cuda",
    )
    chunks: int = Field(
        1,
        ge=1,
        le=64,
        description="Most chunks into which a text longer than the model reads is split; its vector is their mean,"
        " weighted by tokens. Text beyond them is cut",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="fp32, or bf16 (cpu: matrix products alone, the sums between them in fp32); vectors are fp32",
    )
    compiled: bool = Field(True, description="cuda: fuse operations with torch.compile, which needs a C compiler")
    checkpoint: str = Field(
        "", description="Checkpoint to embed with, checkpoints/<cycle>/step-<n> or a URI; empty: the promoted one"
    )
    workers: int = Field(1, ge=1, le=10_000, description="Jobs that share the catalogue, such as the size of an array")
    worker: int | None = Field(
        None, ge=0, description="Which of them this is, from 0; none: TRNJOBS_INDEX, or the only one"
    )
    catalogue: CatalogueConfig = CatalogueConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        if any(short >= long for short, long in pairwise(self.buckets)):
            raise ValueError(f"buckets {self.buckets}: expected rising lengths")
        if 0 < self.tokens_per_batch < self.buckets[-1]:
            raise ValueError(f"tokens_per_batch {self.tokens_per_batch}: expected room for a row of {self.buckets[-1]}")
        return self

    def batch_tokens(self, default: int) -> int:
        """Return the tokens of a batch; `default`: those of its device, Backend.default_tokens."""
        return self.tokens_per_batch or max(default, self.buckets[-1])

    def chunk_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the tokens read at a time: as many as the model has learnt to (if known) and a row holds."""
        return min(max_tokens or max_positions, max_positions, self.buckets[-1])

    def row_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the tokens of the longest row if the model would read more at a time, else 0."""
        limit = self.chunk_limit(max_tokens, max_positions)
        return limit if limit < min(max_tokens or max_positions, max_positions) else 0

    def text_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Return the tokens of a text that are read, in one or several chunks."""
        return whole_limit(self.chunk_limit(max_tokens, max_positions), self.chunks)


def whole_limit(chunk_tokens: int, chunks: int) -> int:
    """Return the tokens of a text that fills `chunks` chunks: each has [CLS] and [SEP] of its own."""
    return chunks * (chunk_tokens - FRAME) + FRAME


def chunk_of(max_tokens: int, chunks: int) -> int:
    """Return the tokens of one of the `chunks` chunks that a text of `max_tokens` fills, see whole_limit."""
    return (max_tokens - FRAME) // chunks + FRAME
