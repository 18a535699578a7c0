"""Settings of the evaluate stage: metrics, retrieval, baselines and the gate. Also of `trnpipe parity`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from pipeline.core.record import Record

Suffix = Literal["", "rank", "label"]  # suffix of a metric name: none, `@k`, or `:label`

RETRIEVAL = "retrieval_"

METRICS: dict[str, Suffix] = {
    "accuracy": "",  # share of rows with the correct most probable label
    "macro_f1": "",  # mean F1 over the labels that occur or are predicted
    "micro_f1": "",  # F1 over all decisions, equal to accuracy with one label per row
    "f1": "label",  # F1 of one label (f1:LABEL), or of the more relevant of two labels at the threshold
    "precision": "rank",  # precision at the threshold (two labels), or @k over the first k rows
    "recall": "rank",  # recall at the threshold (two labels), or @k over the first k rows
    "ndcg": "rank",  # normalised discounted cumulative gain of the first k
    "mrr": "",  # mean of 1 / rank of the first relevant row
    "ece": "",  # expected calibration error of the most probable label
    "loss": "",  # mean negative log probability of the true label, nats
    "roc_auc": "",  # probability that a matching row scores above another (two labels)
    "average_precision": "",  # step-wise area under the precision-recall curve (two labels)
    f"{RETRIEVAL}recall": "rank",  # share of a query's relevant items among the first k of the catalogue
    f"{RETRIEVAL}ndcg": "rank",  # nDCG of the first k of the catalogue
    f"{RETRIEVAL}success": "rank",  # share of queries with a relevant item among the first k of the catalogue
    f"{RETRIEVAL}mrr": "",  # mean of 1 / rank of the first relevant item, 0 if none is retrieved
}
"""Metric families with the suffix of their names."""
_LOWER_IS_BETTER = ("ece", "loss")
_SUFFIX_OPTIONAL = ("f1", "precision", "recall")
"""Families that also exist without a suffix, for two labels at a threshold."""


@dataclass(frozen=True)
class MetricName:
    """A parsed metric name: the family and its rank or label."""

    text: str
    family: str
    rank: int | None = None
    label: str | None = None

    @property
    def lower_is_better(self) -> bool:
        return self.family in _LOWER_IS_BETTER

    @property
    def is_retrieval(self) -> bool:
        return self.family.startswith(RETRIEVAL)

    @classmethod
    def parse(cls, text: str) -> "MetricName":
        """Parse a name. Raises ValueError if there is no such metric."""
        head, colon, label = text.partition(":")  # a label may contain an @
        family, at, rank = head.partition("@")
        needs, bare = METRICS.get(family), not at and not colon
        if bare and needs is not None and (not needs or family in _SUFFIX_OPTIONAL):
            return cls(text, family)
        if at and not colon and needs == "rank" and rank.isdecimal() and rank.isascii() and rank[0] != "0":
            return cls(text, family, rank=int(rank))
        if colon and not at and needs == "label" and label:
            return cls(text, family, label=label)
        forms = {"": "", "rank": "@K", "label": ":LABEL"}
        names = [*(f"{family}{forms[suffix]}" for family, suffix in METRICS.items()), *_SUFFIX_OPTIONAL]
        raise ValueError(f"no metric is called {text!r}, expected one of {', '.join(names)}")


QUERY_TOKENS = (4, 8, 16)  # Upper bounds of the slices by query length, in tokens. The last slice has no bound.
MAX_LEAK_SHARE = 0.05  # largest share of test queries that may also be training queries with evaluate.leak refuse
Cutoff = Annotated[int, Field(ge=1, le=100_000)]
RECALL_AT, PRECISION_AT = (1, 10), (1,)  # Reported ranks. The gate may use others.


class MetricsConfig(Record):
    """Metrics of a model on the test split."""

    retired: ClassVar[Mapping[str, Any]] = {"recall_at": [1, 10], "precision_at": [1], "ece_bins": 15}

    ndcg_at: tuple[Cutoff, ...] = Field((5, 10), description="Ranks k of the reported nDCG@k over the rows of a query")
    retrieval_at: tuple[Cutoff, ...] = Field(
        (1, 10, 100),
        min_length=1,
        description="Ranks k of retrieval recall, nDCG and success to report, in addition to those of the gate",
    )
    relevant_gain: float | None = Field(
        None, gt=0, description="Minimum gain of a relevant row in MRR, recall@k and precision@k (null: best label)"
    )


def _check_row_metric(text: str) -> str:
    if MetricName.parse(text).is_retrieval:
        raise ValueError(f"{text} does not exist by slice, expected a row metric such as ndcg@10")
    return text


Metric = Annotated[str, AfterValidator(lambda text: MetricName.parse(text).text)]
RowMetric = Annotated[Metric, AfterValidator(_check_row_metric)]
Allowed = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OnBetter = Literal["refuse", "warn", "off"]
OnGolden = Literal["fail", "warn", "off"]
Bound = Annotated[float, Field(allow_inf_nan=False)]

DROPS: dict[Metric, Allowed] = {"ndcg@10": 0.01, "macro_f1": 0.01, "retrieval_ndcg@10": 0.01}


class GateConfig(Record):
    """Conditions under which a candidate replaces the production model."""

    retired: ClassVar[Mapping[str, Any]] = {"without_incumbent": "floors"}

    floors: dict[Metric, Bound] = Field(
        {}, description="Minimum of each metric (maximum for loss and ece), as metric=value"
    )
    drops: dict[Metric, Allowed] = Field(
        DROPS,
        description="Metrics compared with the production model and the allowed drop of each (loss, ece: rise), as"
        " metric=value. Replaces all defaults",
    )
    slice_drops: dict[RowMetric, Allowed] = Field(
        {"ndcg@10": 0.02, "macro_f1": 0.02},
        description="Metrics compared in each slice; a slice refuses if its drop is significantly larger",
    )
    baseline_drops: dict[Metric, Allowed] = Field(
        {"retrieval_ndcg@10": 0.0, "ndcg@10": 0.0, "macro_f1": 0.0, "f1": 0.0},
        description="Metrics compared with the baselines and the allowed drop of each (f1: two labels only)",
    )
    baselines: OnBetter = Field(
        "warn", description="If a baseline is better than a later candidate: refuse, warn, or off"
    )
    first_baselines: OnBetter = Field(
        "refuse", description="If a baseline is better than the first model: refuse, warn, or off"
    )
    confidence: float = Field(
        0.95,
        ge=0.5,
        lt=1,
        description="One-sided confidence of each comparison (Bonferroni-corrected over slices and over baselines)",
    )
    resamples: int = Field(2000, ge=200, le=100_000, description="Bootstrap draws of the queries")
    min_queries: int = Field(
        50,
        ge=2,
        description="Minimum number of test queries for a floor or a comparison. With fewer, a later model is refused,"
        " and a first one unless another comparison judges it",
    )
    min_slice_queries: int = Field(50, ge=2, description="Minimum number of queries to judge a slice")
    first_without_comparison: bool = Field(
        False, description="Promote a first model even if no floor and no baseline could judge it"
    )
    golden: OnGolden = Field(
        "warn", description="If the candidate fails a golden query that production passes: fail, warn, or off"
    )

    def drops_for(self, *, searched: bool) -> dict[Metric, Allowed]:
        """Return `drops`, without the default retrieval metrics if retrieval is not evaluated.

        Configured drops are never removed: a retrieval metric that is not evaluated refuses.
        """
        if searched or self.drops != DROPS:
            return self.drops
        return {text: allowed for text, allowed in self.drops.items() if not MetricName.parse(text).is_retrieval}

    def with_ranks(self, metrics: MetricsConfig) -> MetricsConfig:
        """Return `metrics` with all retrieval ranks that the gate uses."""
        names = [*self.floors, *self.drops]
        names += [] if self.baselines == self.first_baselines == "off" else self.baseline_drops
        parsed = [MetricName.parse(text) for text in names]
        judged = {name.rank for name in parsed if name.is_retrieval and name.rank is not None}
        if judged <= set(metrics.retrieval_at):
            return metrics
        return metrics.model_copy(update={"retrieval_at": tuple(sorted(judged.union(metrics.retrieval_at)))})


class ParityConfig(Record):
    """Settings of `trnpipe parity`, which compares two backends."""

    retired: ClassVar[Mapping[str, Any]] = {
        "evaluate_every": ...,
        "vector_rows": ...,
        "first_steps": 10,
        "fp32": ...,
        "reduced": ...,
    }

    checkpoint: str = Field(
        "", description="Checkpoint that both sides start from: a URI, or incumbent (empty: this cycle's candidate)"
    )
    steps: int = Field(300, ge=1, description="Optimizer steps on each side, with six evaluations")
    rows: int = Field(20_000, ge=1, description="Maximum number of rows scored, the same on both sides")
    max_difference: float = Field(
        0.001, ge=0, description="Allowed difference of the metric at any evaluation, relative to the first side"
    )


class RetrievalConfig(Record):
    """Exact search with the embeddings over a whole catalogue."""

    retired: ClassVar[Mapping[str, Any]] = {"format": "auto", "window_rows": ...}

    enabled: bool = Field(True, description="Evaluate retrieval")
    catalogue: str | None = Field(
        None,
        description="File or folder (file:// or s3://) of items, each row with a query that the item is relevant to"
        " (none: the distinct products of the prepared data, judged by their gains)",
    )
    id: str = Field(
        "product_id",
        description="Column of the item id. Of several rows with one id the first has the texts, all have queries",
    )
    title: str = Field("title", description="Column of the item title")
    text: str = Field("text", description="Column of longer text, appended to the title (optional)")
    query: str = Field("query", description="Column of the query that the item is relevant to (may be empty)")
    query_id: str = Field("", description="Column of the query id (default: the query text)")
    queries: dict[str, str] = Field(
        {}, description="Evaluate only queries of rows with these column values, as column=value or column=a|b"
    )
    valid_queries: dict[str, str] = Field(
        {},
        description="Queries of a catalogue file that choose the weight of hybrid search, as column=value such as"
        " split=valid (none: no weighted fusion)",
    )
    max_queries: int = Field(5000, ge=1, description="Maximum number of queries, sampled by a hash of their id")
    max_items: int = Field(
        1_000_000, ge=1, description="Maximum number of products without a catalogue: the relevant ones and a sample"
    )
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="Also evaluate vectors truncated to these dimensions; the gate judges embed.output.dimensions"
    )


class BaselinesConfig(Record):
    """Simple methods to compare with, scored once for the same data."""

    retired: ClassVar[Mapping[str, Any]] = {"boosting_rows": 200_000, "hybrid": True, "valid_queries": 1000}

    bm25: bool = Field(
        True, description="Evaluate BM25 on the retrieval queries, alone and fused with each model (hybrid search)"
    )
    boosting: bool = Field(
        True, description="Evaluate gradient boosting on the numeric features (install the extra baselines)"
    )


class EvaluateConfig(Record):
    """Comparison of the candidate with the production model on the test split."""

    retired: ClassVar[Mapping[str, Any]] = {
        "vector_rows": ...,
        "save_every_s": ...,
        "seed": 1,
        "max_leak_share": MAX_LEAK_SHARE,
        "query_tokens": [*QUERY_TOKENS],
    }

    candidate: str = Field(
        "", description="Checkpoint to judge, checkpoints/<cycle>/step-<n> or a URI (empty: the one of this cycle)"
    )
    incumbent: str = Field(
        "production", description="Model to compare with: production, none, or a checkpoint (which is never replaced)"
    )
    split: Literal["test", "valid"] = Field("test", description="Split to evaluate on")
    partitions: Literal["all", "new"] = Field(
        "all",
        description="Partitions to evaluate on: all, or those that the production model was not trained on (all if"
        " these have no row of the split)",
    )
    max_rows: int = Field(0, ge=0, description="Maximum number of rows to score, as whole queries (0: all)")
    leak: Literal["refuse", "warn", "off"] = Field(
        "refuse",
        description="If test queries were trained on, by id or text: refuse above 5 %, warn, or off (no check)",
    )
    golden: str | None = Field(
        None, description="TOML file of queries with products that search must or must not return at the top"
    )
    promote: bool = Field(True, description="Promote a candidate that passes the gate")
    force_reason: str = Field("", description="Promote even if the gate refuses, with this reason on record")
    metrics: MetricsConfig = MetricsConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    baselines: BaselinesConfig = BaselinesConfig()
