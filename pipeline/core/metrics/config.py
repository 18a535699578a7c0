"""Settings of the metrics: what is reported. The gate may compare others; it computes what it needs by name."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Cutoff = Annotated[int, Field(ge=1, le=100_000)]


class MetricsConfig(BaseModel):
    """What a model is measured by on a holdout."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ndcg_at: tuple[Cutoff, ...] = Field((5, 10), description="Ranks k of nDCG@k over the rows of a query")
    recall_at: tuple[Cutoff, ...] = Field((1, 10), description="Ranks k of recall@k over the rows of a query")
    precision_at: tuple[Cutoff, ...] = Field((1,), description="Ranks k of precision@k over the rows of a query")
    retrieval_at: tuple[Cutoff, ...] = Field(
        (1, 10, 100), description="Ranks k of recall, nDCG and success in retrieval against the whole catalogue"
    )
    relevant_gain: float | None = Field(
        None, gt=0, description="Gain from which a row is relevant to MRR, recall@k and precision@k (null: best label)"
    )
    ece_bins: int = Field(15, ge=1, le=1000, description="Equal bins of confidence in the calibration error (ECE)")
