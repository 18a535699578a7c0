"""Settings of the evaluate stage (metrics, retrieval, baselines and the gate) and of `trnpipe parity`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from pipeline.core.record import Record

Suffix = Literal["", "rank", "label"]  # the suffix that a metric name takes: none, `@k`, or `:label`

RETRIEVAL = "retrieval_"

METRICS: dict[str, Suffix] = {
    "accuracy": "",  # fraction of rows for which the most probable label is correct
    "macro_f1": "",  # mean F1 over the labels that occur or are predicted
    "micro_f1": "",  # F1 over all predictions, which equals accuracy because each row has one label
    "f1": "label",  # F1 of one label (f1:LABEL) or, with two labels, F1 of the more relevant one at the threshold
    "precision": "rank",  # precision at the threshold (two labels only), or of the top k rows (@k)
    "recall": "rank",  # recall at the threshold (two labels only), or of the top k rows (@k)
    "ndcg": "rank",  # normalised discounted cumulative gain of the top k rows
    "mrr": "",  # mean reciprocal rank of the first relevant row
    "ece": "",  # expected calibration error of the most probable label
    "loss": "",  # mean negative log-likelihood of the true label, in nats
    "roc_auc": "",  # probability that a matching row scores higher than a non-matching one (two labels only)
    "average_precision": "",  # area under the precision-recall curve, as a step function (two labels only)
    f"{RETRIEVAL}recall": "rank",  # fraction of a query's relevant items that are in its top k search results
    f"{RETRIEVAL}ndcg": "rank",  # nDCG of the top k search results
    f"{RETRIEVAL}success": "rank",  # fraction of queries with a relevant item in the top k search results
    f"{RETRIEVAL}mrr": "",  # mean reciprocal rank of the first relevant item, counted as 0 if none is retrieved
}
"""The metric families, each with the suffix that its names take."""
_LOWER_IS_BETTER = ("ece", "loss")
_SUFFIX_OPTIONAL = ("f1", "precision", "recall")
"""Families that can also be used without a suffix, in which case they apply to two labels and a threshold."""


@dataclass(frozen=True)
class MetricName:
    """A parsed metric name, which consists of a family and optionally a rank or a label."""

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

    def loss(self, change: float) -> float:
        """Return by how much a change makes the metric worse. The result is negative if it gets better."""
        return change if self.lower_is_better else -change

    @classmethod
    def parse(cls, text: str) -> "MetricName":
        """Parse a metric name. Raises ValueError if the metric does not exist."""
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
        raise ValueError(f"unknown metric {text!r}, expected one of {', '.join(names)}")


QUERY_TOKENS = (4, 8, 16)  # Upper bounds of the query length slices, in tokens. The last slice has no upper bound.
MAX_LEAK_SHARE = 0.05  # maximum fraction of test queries that may also be training queries if evaluate.leak is refuse
Cutoff = Annotated[int, Field(ge=1, le=100_000)]
RECALL_AT, PRECISION_AT = (1, 10), (1,)  # The ranks to report. The gate may also use other ranks.


class MetricsConfig(Record):
    """Settings for the metrics that are computed on the test split."""

    retired: ClassVar[Mapping[str, Any]] = {"recall_at": [1, 10], "precision_at": [1], "ece_bins": 15}

    ndcg_at: tuple[Cutoff, ...] = Field((5, 10), description="Ranks k for which to report the nDCG@k of a query's rows")
    retrieval_at: tuple[Cutoff, ...] = Field(
        (1, 10, 100),
        min_length=1,
        description="Ranks k for which to report retrieval recall, nDCG and success, in addition to those that the gate"
        " uses",
    )
    relevant_gain: float | None = Field(
        None,
        gt=0,
        description="Minimum gain for a row to count as relevant in MRR, recall@k and precision@k (null: only rows with"
        " the most relevant label)",
    )


def _check_row_metric(text: str) -> str:
    if MetricName.parse(text).is_retrieval:
        raise ValueError(f"{text} cannot be computed per slice, expected a row metric such as ndcg@10")
    return text


Metric = Annotated[str, AfterValidator(lambda text: MetricName.parse(text).text)]
RowMetric = Annotated[Metric, AfterValidator(_check_row_metric)]
Allowed = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OnBetter = Literal["refuse", "warn", "off"]
OnGolden = Literal["fail", "warn", "off"]
Bound = Annotated[float, Field(allow_inf_nan=False)]

DROPS: dict[Metric, Allowed] = {"ndcg@10": 0.01, "macro_f1": 0.01, "retrieval_ndcg@10": 0.01}


class GateConfig(Record):
    """The conditions that a candidate must meet to replace the production model."""

    retired: ClassVar[Mapping[str, Any]] = {"without_incumbent": "floors"}

    floors: dict[Metric, Bound] = Field(
        {}, description="Minimum value of each metric (for loss and ece the maximum value), as metric=value"
    )
    drops: dict[Metric, Allowed] = Field(
        DROPS,
        description="Metrics to compare with the production model and how much each may drop (for loss and ece: rise),"
        " as metric=value. Setting this replaces all defaults",
    )
    slice_drops: dict[RowMetric, Allowed] = Field(
        {"ndcg@10": 0.02, "macro_f1": 0.02},
        description="Metrics to compare in each slice and how much each may drop. The candidate is refused if the drop"
        " in a slice is significantly larger",
    )
    baseline_drops: dict[Metric, Allowed] = Field(
        {"retrieval_ndcg@10": 0.0, "ndcg@10": 0.0, "macro_f1": 0.0, "f1": 0.0},
        description="Metrics to compare with the baselines and how far the candidate may be below a baseline in each"
        " (f1 only applies to two labels)",
    )
    baselines: OnBetter = Field(
        "warn", description="What to do if a baseline beats a candidate that would replace a production model"
    )
    first_baselines: OnBetter = Field(
        "refuse", description="What to do if a baseline beats the first model, when nothing is in production yet"
    )
    confidence: float = Field(
        0.95,
        ge=0.5,
        lt=1,
        description="One-sided confidence level of each comparison, with a Bonferroni correction for slices and for"
        " baselines",
    )
    resamples: int = Field(2000, ge=200, le=100_000, description="Number of bootstrap resamples")
    min_queries: int = Field(
        50,
        ge=2,
        description="Minimum number of test queries for a floor or a comparison. With fewer queries the candidate is"
        " refused, except that a first model only needs one comparison with enough queries",
    )
    min_slice_queries: int = Field(50, ge=2, description="Minimum number of queries for a slice to be judged")
    first_without_comparison: bool = Field(
        False, description="Promote a first model even if it could not be compared with any floor or baseline"
    )
    golden: OnGolden = Field(
        "warn", description="What to do if the candidate fails a golden query that the production model passes"
    )

    def drops_for(self, *, searched: bool) -> dict[Metric, Allowed]:
        """Return `drops`, without the retrieval metrics if retrieval is not evaluated (`searched` is False).

        Only defaults are removed. If the user configured a retrieval metric but it is not evaluated, the candidate is
        refused.
        """
        if searched or self.drops != DROPS:
            return self.drops
        return {text: allowed for text, allowed in self.drops.items() if not MetricName.parse(text).is_retrieval}

    def with_ranks(self, metrics: MetricsConfig) -> MetricsConfig:
        """Return a copy of `metrics` that also includes the retrieval ranks that the gate needs."""
        names = [*self.floors, *self.drops]
        names += [] if self.baselines == self.first_baselines == "off" else self.baseline_drops
        parsed = [MetricName.parse(text) for text in names]
        judged = {name.rank for name in parsed if name.is_retrieval and name.rank is not None}
        if judged <= set(metrics.retrieval_at):
            return metrics
        return metrics.model_copy(update={"retrieval_at": tuple(sorted(judged.union(metrics.retrieval_at)))})


class ParityConfig(Record):
    """Settings of `trnpipe parity`, which verifies that two backends train equally well."""

    retired: ClassVar[Mapping[str, Any]] = {
        "evaluate_every": ...,
        "vector_rows": ...,
        "first_steps": 10,
        "fp32": ...,
        "reduced": ...,
    }

    checkpoint: str = Field(
        "",
        description="Checkpoint that both backends start from, as a URI or incumbent (default: this cycle's candidate)",
    )
    steps: int = Field(
        300, ge=1, description="Optimizer steps on each backend, during which the model is evaluated six times"
    )
    rows: int = Field(20_000, ge=1, description="Maximum number of rows to score. Both backends score the same rows")
    max_difference: float = Field(
        0.001, ge=0, description="Maximum relative difference between the two backends' metrics at any evaluation"
    )


class RetrievalConfig(Record):
    """Settings for evaluating retrieval, an exact search over the embeddings of a whole catalogue."""

    retired: ClassVar[Mapping[str, Any]] = {"format": "auto", "window_rows": ...}

    enabled: bool = Field(True, description="Whether to evaluate retrieval")
    catalogue: str | None = Field(
        None,
        description="File or folder (file:// or s3://) with the items to search, where each row has a query that its"
        " item is relevant to (default: search the distinct products of the prepared data, using their gains)",
    )
    id: str = Field(
        "product_id",
        description="Column with the item id. If several rows have the same id, the texts are read from the first row"
        " and the queries from all of them",
    )
    title: str = Field("title", description="Column with the item title")
    text: str = Field("text", description="Column with a longer text to append to the title (optional)")
    query: str = Field("query", description="Column with the query that the item is relevant to (may be empty)")
    query_id: str = Field("", description="Column with the query id (default: queries are identified by their text)")
    queries: dict[str, str] = Field(
        {}, description="Only evaluate queries from rows with these column values, as column=value or column=a|b"
    )
    valid_queries: dict[str, str] = Field(
        {},
        description="Queries of the catalogue file on which to tune the weight of hybrid search, as column=value, for"
        " example split=valid (default: no weighted fusion)",
    )
    max_queries: int = Field(
        5000, ge=1, description="Maximum number of queries. If there are more, a fixed sample is used"
    )
    max_items: int = Field(
        1_000_000,
        ge=1,
        description="Maximum number of products to search if no catalogue is set. The relevant products are always"
        " included, and the rest are sampled",
    )
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Also evaluate vectors truncated to each of these dimensions. The gate only judges the vectors that"
        " are truncated to embed.output.dimensions",
    )


class BaselinesConfig(Record):
    """Settings for the baselines, simple methods that a model should beat. They are scored once per dataset."""

    retired: ClassVar[Mapping[str, Any]] = {"boosting_rows": 200_000, "hybrid": True, "valid_queries": 1000}

    bm25: bool = Field(
        True, description="Whether to evaluate BM25 on the retrieval queries, both alone and fused with each model"
    )
    boosting: bool = Field(
        True, description="Whether to evaluate gradient boosting on the numeric features (requires the baselines extra)"
    )


class EvaluateConfig(Record):
    """Settings for comparing the candidate with the production model on the test split."""

    retired: ClassVar[Mapping[str, Any]] = {
        "vector_rows": ...,
        "save_every_s": ...,
        "seed": 1,
        "max_leak_share": MAX_LEAK_SHARE,
        "query_tokens": [*QUERY_TOKENS],
    }

    candidate: str = Field(
        "",
        description="Checkpoint to evaluate, as checkpoints/<cycle>/step-<n> or a URI (default: the one that this cycle"
        " trained)",
    )
    incumbent: str = Field(
        "production",
        description="Model to compare the candidate with: production, none, or a checkpoint. A candidate that was"
        " compared with a checkpoint does not replace the production model",
    )
    split: Literal["test", "valid"] = Field("test", description="Split to evaluate on")
    partitions: Literal["all", "new"] = Field(
        "all",
        description="Partitions to evaluate on: all of them, or only new ones that the production model was not trained"
        " on. Falls back to all if the new partitions have no rows in the split",
    )
    max_rows: int = Field(0, ge=0, description="Maximum number of rows to score. Queries are never split (0: no limit)")
    leak: Literal["refuse", "warn", "off"] = Field(
        "refuse",
        description="What to do if test queries also occur in the training data, by id or by text: refuse (if more than"
        " 5 % do), warn, or off (do not check)",
    )
    golden: str | None = Field(
        None,
        description="TOML file of golden queries, each with products that search must or must not return at the top",
    )
    promote: bool = Field(True, description="Whether to promote a candidate that passes the gate")
    force_reason: str = Field(
        "", description="Promote the candidate even if the gate refuses it, and record this reason"
    )
    metrics: MetricsConfig = MetricsConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    baselines: BaselinesConfig = BaselinesConfig()
