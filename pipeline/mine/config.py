"""Settings of hard-negative mining."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.record import Record

BM25, PARENT = "bm25", "parent"
MAX_ITEMS = 1_000_000  # maximum number of products to search: all positives and an even sample of the others
ITEMS_PER_QUERY = 16  # product vectors per part for each query per part: 65,536 by default


class MineConfig(Record):
    """Settings that select the hard negatives of training queries."""

    retired: ClassVar[Mapping[str, Any]] = {
        "skip_top": 0,
        "absolute_margin": None,
        "max_items": MAX_ITEMS,
        "items_per_part": ...,
        "worker": None,
    }

    enabled: bool = Field(False, description="Mine hard negatives in every cycle, before training")
    source: str = Field(
        PARENT,
        description="Ranking of the products: parent (the checkpoint that training starts from, bm25 if there is none),"
        " bm25, or another checkpoint (checkpoints/<cycle>/step-<n> or a URI)",
    )
    partitions: Literal["new", "all"] = Field(
        "new", description="Mine for the queries of all partitions, or only of those new to the parent"
    )
    negatives_per_query: int = Field(8, ge=1, le=256, description="Maximum number of negatives per query")
    depth: int = Field(100, ge=1, le=10_000, description="Number of best products of a query to choose negatives from")
    relative_margin: float | None = Field(
        0.05,
        ge=0,
        le=1,
        description="Skip likely positives: products that score above the query's best positive minus this fraction of"
        " its score (null: skip none)",
    )
    queries_per_part: int = Field(
        4096, ge=1, le=1_000_000, description="Queries per part: limits memory and the work lost by an interruption"
    )
    workers: int = Field(1, ge=1, le=10_000, description="Number of array tasks that mine queries in parallel")

    @model_validator(mode="after")
    def _deep_enough(self) -> Self:
        if self.negatives_per_query > self.depth:
            raise ValueError(f"depth {self.depth}: expected at least negatives_per_query {self.negatives_per_query}")
        return self

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the negatives, including retired settings at their fixed values."""
        current = {"negatives_per_query", "depth", "relative_margin", "partitions"}
        retired = {"skip_top": 0, "absolute_margin": None, "max_items": MAX_ITEMS}
        return retired | self.model_dump(mode="json", include=current)
