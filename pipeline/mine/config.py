"""Settings for hard-negative mining."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.core.record import Record

BM25, PARENT = "bm25", "parent"
MAX_ITEMS = 1_000_000  # maximum number of products to search. All positives are kept, and other products are sampled
ITEMS_PER_QUERY = 16  # ratio of products to queries in a part, so that a part has 65,536 product vectors by default


class MineConfig(Record):
    """Settings for how hard negatives are selected."""

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
        description="Model that ranks the products: parent (the checkpoint that training starts from, or bm25 if there"
        " is none), bm25, or the name or URI of a checkpoint (checkpoints/<cycle>/step-<n>)",
    )
    partitions: Literal["new", "all"] = Field(
        "new",
        description="Mine for the queries of all partitions, or of new ones, that the parent was not trained on",
    )
    negatives_per_query: int = Field(8, ge=1, le=256, description="Maximum number of negatives per query")
    depth: int = Field(100, ge=1, le=10_000, description="Number of top-ranked products to choose negatives from")
    relative_margin: float | None = Field(
        0.05,
        ge=0,
        le=1,
        description="Skip products that are likely positives, because their score is above that of the query's best"
        " positive reduced by this fraction (0.05: above 95 % of it; null: do not skip any)",
    )
    queries_per_part: int = Field(
        4096,
        ge=1,
        le=1_000_000,
        description="Number of queries to process at a time, which limits memory and the work lost on interruption",
    )
    workers: int = Field(1, ge=1, le=10_000, description="Number of array tasks that mine queries in parallel")

    @model_validator(mode="after")
    def _deep_enough(self) -> Self:
        if self.negatives_per_query > self.depth:
            raise ValueError(f"depth {self.depth}: expected at least negatives_per_query {self.negatives_per_query}")
        return self

    def identity(self) -> dict[str, Any]:
        """Return all settings that affect which negatives are mined, including the fixed values of retired settings."""
        current = {"negatives_per_query", "depth", "relative_margin", "partitions"}
        retired = {"skip_top": 0, "absolute_margin": None, "max_items": MAX_ITEMS}
        return retired | self.model_dump(mode="json", include=current)
