"""Settings of hard-negative mining."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.record import Record

BM25, PARENT = "bm25", "parent"
MAX_ITEMS = 1_000_000
"""Products that are searched at most: all positives and an even sample of the rest."""
ITEMS_PER_QUERY = 16
"""Vectors of products in a part, for each query in a part of queries: 65,536 by default."""


class MineConfig(Record):
    """Which products become hard negatives of a training query."""

    retired: ClassVar[Mapping[str, Any]] = {
        "skip_top": 0,
        "absolute_margin": None,
        "max_items": MAX_ITEMS,
        "items_per_part": ...,
        "worker": None,
    }

    enabled: bool = Field(False, description="Mine in every cycle of jobs, before training")
    source: str = Field(
        PARENT,
        description="What ranks the products: parent, the checkpoint that training starts from (bm25 without one);"
        " bm25; or another checkpoint, checkpoints/<cycle>/step-<n> or a URI",
    )
    partitions: Literal["new", "all"] = Field(
        "new", description="Whose queries are mined for: of partitions the parent was not trained on, or of all"
    )
    negatives_per_query: int = Field(8, ge=1, le=256, description="Most negatives kept for a query")
    depth: int = Field(100, ge=1, le=10_000, description="Best products of a query that negatives are taken from")
    relative_margin: float | None = Field(
        0.05,
        ge=0,
        le=1,
        description="Leave out products, likely positives, that score above the query's best positive less this share"
        " of its score; null: leave out none",
    )
    queries_per_part: int = Field(
        4096, ge=1, le=1_000_000, description="Queries mined for at a time: what a stop costs at most, and memory"
    )
    workers: int = Field(1, ge=1, le=10_000, description="Jobs that share the queries, such as the size of an array")

    @model_validator(mode="after")
    def _deep_enough(self) -> Self:
        if self.negatives_per_query > self.depth:
            raise ValueError(f"depth {self.depth}: expected at least negatives_per_query {self.negatives_per_query}")
        return self

    def decides(self) -> dict[str, Any]:
        """Return the settings that decide the negatives, with those of earlier versions at the value they have now."""
        named = {"negatives_per_query", "depth", "relative_margin", "partitions"}
        earlier = {"skip_top": 0, "absolute_margin": None, "max_items": MAX_ITEMS}
        return earlier | self.model_dump(mode="json", include=named)
