"""Settings of offline embedding."""

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pipeline.embed.catalogue_config import CatalogueConfig, OutputConfig, VerifyConfig

GRAPH_FIELDS = frozenset({"buckets", "tokens_per_batch", "precision"})
"""Fields of EmbedConfig that decide graphs."""
DEFAULT_TOKENS = {"cpu": 1024, "xla": 4096, "cuda": 32_768}
"""Tokens of a batch by backend. cpu, for each core: activations stay in its share of the cache."""


class EmbedConfig(BaseModel):
    """How catalogue texts become vectors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    buckets: tuple[Annotated[int, Field(ge=8)], ...] = Field(
        (128, 512),
        min_length=1,
        max_length=6,
        description="Static lengths of a row, in tokens, rising: texts share rows; longer texts are cut",
    )
    tokens_per_batch: int = Field(
        0, ge=0, description="Tokens of one batch, padding included; 0: 1024 on cpu, 4096 on xla, 32768 on cuda"
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
        None, ge=0, description="Which of them this is, from 0; none: AWS_BATCH_JOB_ARRAY_INDEX, or the only one"
    )
    tokenise_processes: int = Field(0, ge=0, description="Processes that read and tokenise; 0: one per core")
    catalogue: CatalogueConfig = CatalogueConfig()
    output: OutputConfig = OutputConfig()
    verify: VerifyConfig = VerifyConfig()

    @model_validator(mode="after")
    def _rows_fit(self) -> Self:
        if any(short >= long for short, long in pairwise(self.buckets)):
            raise ValueError(f"buckets {self.buckets}: expected rising lengths")
        if 0 < self.tokens_per_batch < self.buckets[-1]:
            raise ValueError(f"tokens_per_batch {self.tokens_per_batch}: expected room for a row of {self.buckets[-1]}")
        return self

    def batch_tokens(self, backend: str) -> int:
        """Tokens of a batch on that kind of backend."""
        return self.tokens_per_batch or max(DEFAULT_TOKENS[backend], self.buckets[-1])

    def text_limit(self, max_tokens: int | None, max_positions: int) -> int:
        """Tokens of a text that are read: as many as the model has learnt to (when that is known) and a row holds."""
        return min(max_tokens or max_positions, max_positions, self.buckets[-1])
