"""Settings of the gate: how much worse than the model in production a candidate may be, and how sure one must be."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from pipeline.core.metrics.names import MetricName


def _known(text: str) -> str:
    return MetricName.parse(text).text


def _of_rows(text: str) -> str:
    if MetricName.parse(text).of_retrieval:
        raise ValueError(f"{text} is not known by slice; expected a metric of rows, such as ndcg@10")
    return text


Metric = Annotated[str, AfterValidator(_known)]
RowMetric = Annotated[Metric, AfterValidator(_of_rows)]
Allowed = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OnBetter = Literal["refuse", "warn", "off"]
Bound = Annotated[float, Field(allow_inf_nan=False)]


class GateConfig(BaseModel):
    """When a candidate may replace the model in production."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    floors: Annotated[
        dict[Metric, Bound],
        Field(description="Value each metric must reach, as metric=value; of loss and ece the most it may be"),
    ] = {}
    drops: Annotated[
        dict[Metric, Allowed],
        Field(
            description="Metrics compared with the incumbent, as metric=allowed drop; the candidate must be shown not "
            "to be worse by more (loss, ece: rise)"
        ),
    ] = {"ndcg@10": 0.01, "macro_f1": 0.01}
    slice_drops: Annotated[
        dict[RowMetric, Allowed],
        Field(description="The same in each slice; refused when a slice is shown to be worse by more"),
    ] = {"ndcg@10": 0.02, "macro_f1": 0.02}
    baseline_drops: Annotated[
        dict[Metric, Allowed],
        Field(
            description="Metrics compared with the baselines that have them; one is better when it is shown to be so by"
            " more. f1 is of two labels only"
        ),
    ] = {"retrieval_ndcg@10": 0.0, "ndcg@10": 0.0, "macro_f1": 0.0, "f1": 0.0}
    baselines: OnBetter = Field(
        "warn", description="A baseline is better than a candidate that would replace a model: refuse, warn, or off"
    )
    first_baselines: OnBetter = Field(
        "refuse", description="A baseline is better than a candidate that has no incumbent: refuse, warn, or off"
    )
    confidence: float = Field(
        0.95,
        ge=0.5,
        lt=1,
        description="One-sided confidence of 'shown'; over all slices together for slices, and so for baselines",
    )
    resamples: int = Field(2000, ge=200, le=100_000, description="Bootstrap draws of the queries")
    min_queries: int = Field(50, ge=2, description="Queries that must bear on a metric, or nothing is promoted")
    min_slice_queries: int = Field(50, ge=2, description="Queries below which a slice is shown, but not judged")
    without_incumbent: Literal["floors", "refuse"] = Field(
        "floors", description="No model in production yet: promote what reaches the floors, or refuse"
    )
