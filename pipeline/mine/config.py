"""Settings of hard-negative mining."""

from typing import Literal, Self

from pydantic import Field, model_validator

from pipeline.core.record import Record

BM25, PARENT = "bm25", "parent"


class MineConfig(Record):
    """Which products become hard negatives of a training query."""

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
    skip_top: int = Field(0, ge=0, description="Best unjudged products of a query that are passed over")
    relative_margin: float | None = Field(
        0.05,
        ge=0,
        le=1,
        description="Leave out products, likely positives, that score above the query's best positive less this share"
        " of its score; null: none for it",
    )
    absolute_margin: float | None = Field(
        None, ge=0, description="The same with a difference of scores (cosines, or those of BM25); null: none for it"
    )
    max_items: int = Field(
        1_000_000, ge=1, description="Most products that are searched: all positives and an even sample of the rest"
    )
    items_per_part: int = Field(65_536, ge=1, le=1_000_000, description="Products whose vectors are made at a time")
    queries_per_part: int = Field(
        4096, ge=1, le=1_000_000, description="Queries mined for at a time: what a stop costs at most, and memory"
    )
    workers: int = Field(1, ge=1, le=10_000, description="Jobs that share the queries, such as the size of an array")
    worker: int | None = Field(
        None, ge=0, description="Which of them this is, from 0; none: TRNJOBS_INDEX, or the only one"
    )

    @model_validator(mode="after")
    def _deep_enough(self) -> Self:
        if self.skip_top + self.negatives_per_query > self.depth:
            raise ValueError(
                f"depth {self.depth}: expected at least skip_top {self.skip_top} and negatives_per_query"
                f" {self.negatives_per_query} together"
            )
        return self


DECIDES = frozenset(
    {"negatives_per_query", "depth", "skip_top", "relative_margin", "absolute_margin", "max_items", "partitions"}
)
"""Fields that decide the negatives, beside what ranks the products."""
