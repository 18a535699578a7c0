"""Settings of the evaluate stage: what is scored and reported, the gate, and the comparison of two backends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from pipeline.core.record import Record

# The names of metrics: what a setting, a report and the gate call them.

Needs = Literal["", "rank", "label"]
"""What follows the word: nothing, `@k`, or `:label`."""

RETRIEVAL = "retrieval_"

KINDS: dict[str, Needs] = {
    "accuracy": "",  # share of rows whose most probable label is right
    "macro_f1": "",  # mean F1 over the labels that occur or are predicted
    "micro_f1": "",  # F1 of all decisions together; with one label a row it equals accuracy
    "f1": "label",  # F1 of one label (f1:LABEL); of two labels the more relevant, at the threshold
    "precision": "rank",  # share of right rows among those at or above the threshold; @k: among the first k
    "recall": "rank",  # share found of the relevant rows, at the threshold; @k: among the first k
    "ndcg": "rank",  # normalised discounted cumulative gain of the first k
    "mrr": "",  # mean of 1 / rank of the first relevant row
    "ece": "",  # expected calibration error of the most probable label
    "loss": "",  # mean negative log probability of the true label, nats
    "roc_auc": "",  # probability that a matching row scores above another (two labels)
    "average_precision": "",  # area under precision over recall, in steps (two labels)
    f"{RETRIEVAL}recall": "rank",  # share of a query's relevant items among the first k of the catalogue
    f"{RETRIEVAL}ndcg": "rank",  # nDCG of the first k of the catalogue
    f"{RETRIEVAL}success": "rank",  # share of queries with a relevant item among the first k of the catalogue
    f"{RETRIEVAL}mrr": "",  # mean of 1 / rank of the first relevant item; 0 when the list holds none
}
"""Metrics, and families of them by rank or label."""
_LOWER_IS_BETTER = ("ece", "loss")
_BARE_TOO = ("f1", "precision", "recall")
"""Families that also exist without a rank or label: of two labels, at a threshold."""


@dataclass(frozen=True)
class MetricName:
    """A name taken apart: the word, and the rank or label after it."""

    text: str
    word: str
    rank: int | None = None
    label: str | None = None

    @property
    def lower_is_better(self) -> bool:
        return self.word in _LOWER_IS_BETTER

    @property
    def of_retrieval(self) -> bool:
        return self.word.startswith(RETRIEVAL)

    @classmethod
    def parse(cls, text: str) -> "MetricName":
        """Take a name apart. Raises ValueError for one that no metric has."""
        head, colon, label = text.partition(":")  # a label may have an @
        word, at, rank = head.partition("@")
        needs, bare = KINDS.get(word), not at and not colon
        if bare and needs is not None and (not needs or word in _BARE_TOO):
            return cls(text, word)
        if at and not colon and needs == "rank" and rank.isdecimal() and rank.isascii() and rank[0] != "0":
            return cls(text, word, rank=int(rank))
        if colon and not at and needs == "label" and label:
            return cls(text, word, label=label)
        names: list[str] = []
        for known, needs in KINDS.items():
            names += [known] if not needs or known in _BARE_TOO else []
            names += [f"{known}@K"] if needs == "rank" else [f"{known}:LABEL"] if needs == "label" else []
        raise ValueError(f"no metric is called {text!r}; expected one of {', '.join(names)}")


# Settings of the metrics: what is reported. The gate may compare others; it computes what it needs by name.

Cutoff = Annotated[int, Field(ge=1, le=100_000)]


class MetricsConfig(Record):
    """What a model is measured by on a holdout."""

    ndcg_at: tuple[Cutoff, ...] = Field((5, 10), description="Ranks k of nDCG@k over the rows of a query")
    recall_at: tuple[Cutoff, ...] = Field((1, 10), description="Ranks k of recall@k over the rows of a query")
    precision_at: tuple[Cutoff, ...] = Field((1,), description="Ranks k of precision@k over the rows of a query")
    retrieval_at: tuple[Cutoff, ...] = Field(
        (1, 10, 100),
        min_length=1,
        description="Ranks k of recall, nDCG and success in retrieval against the whole catalogue, beside those that"
        " the gate names",
    )
    relevant_gain: float | None = Field(
        None, gt=0, description="Gain from which a row is relevant to MRR, recall@k and precision@k (null: best label)"
    )
    ece_bins: int = Field(15, ge=1, le=1000, description="Equal bins of confidence in the calibration error (ECE)")


# Settings of the gate: how much worse than the model in production a candidate may be, and how sure one must be.


def _of_rows(text: str) -> str:
    if MetricName.parse(text).of_retrieval:
        raise ValueError(f"{text} is not known by slice; expected a metric of rows, such as ndcg@10")
    return text


Metric = Annotated[str, AfterValidator(lambda text: MetricName.parse(text).text)]
RowMetric = Annotated[Metric, AfterValidator(_of_rows)]
Allowed = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OnBetter = Literal["refuse", "warn", "off"]
Bound = Annotated[float, Field(allow_inf_nan=False)]


DROPS: dict[Metric, Allowed] = {"ndcg@10": 0.01, "macro_f1": 0.01, "retrieval_ndcg@10": 0.01}


class GateConfig(Record):
    """When a candidate may replace the model in production."""

    floors: dict[Metric, Bound] = Field(
        {}, description="Value each metric must reach, as metric=value; of loss and ece the most it may be"
    )
    drops: dict[Metric, Allowed] = Field(
        DROPS,
        description="Metrics compared with the incumbent, as metric=allowed drop; the candidate must be shown not "
        "to be worse by more (loss, ece: rise). Drops of your own replace all of these",
    )
    slice_drops: dict[RowMetric, Allowed] = Field(
        {"ndcg@10": 0.02, "macro_f1": 0.02},
        description="The same in each slice; refused when a slice is shown to be worse by more",
    )
    baseline_drops: dict[Metric, Allowed] = Field(
        {"retrieval_ndcg@10": 0.0, "ndcg@10": 0.0, "macro_f1": 0.0, "f1": 0.0},
        description="Metrics compared with the baselines that have them; one is better when it is shown to be so by"
        " more. f1 is of two labels only",
    )
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
    min_queries: int = Field(
        50,
        ge=2,
        description="Queries that must bear on a metric for a floor or a comparison; with fewer, a later model is"
        " refused, and a first one unless another comparison judges it",
    )
    min_slice_queries: int = Field(50, ge=2, description="Queries below which a slice is shown, but not judged")
    without_incumbent: Literal["floors", "refuse"] = Field(
        "floors",
        description="No model in production yet: judge the first one by floors and baselines, or refuse it",
    )
    first_without_comparison: bool = Field(
        False, description="Promote a first model that no floor and no baseline could judge, and say so on record"
    )

    def drops_for(self, *, searched: bool) -> dict[Metric, Allowed]:
        """`drops`; where retrieval is not evaluated, the default ones without those of retrieval.

        Drops that a user set stand as they are: one of retrieval then refuses.
        """
        if searched or self.drops != DROPS:
            return self.drops
        return {text: allowed for text, allowed in self.drops.items() if not MetricName.parse(text).of_retrieval}

    def with_ranks(self, metrics: MetricsConfig) -> MetricsConfig:
        """`metrics` with the ranks of retrieval that are judged; itself where it has them."""
        names = [*self.floors, *self.drops]
        names += [] if self.baselines == self.first_baselines == "off" else self.baseline_drops
        parsed = [MetricName.parse(text) for text in names]
        judged = {name.rank for name in parsed if name.of_retrieval and name.rank is not None}
        if judged <= set(metrics.retrieval_at):
            return metrics
        return metrics.model_copy(update={"retrieval_at": tuple(sorted(judged.union(metrics.retrieval_at)))})


# Settings of parity: what both sides compute, and how far they may be apart.

Share = Annotated[float, Field(ge=0, le=1)]
LossBar = Annotated[float, Field(ge=0, description="Largest relative difference of the holdout loss at an evaluation")]
FirstLossBar = Annotated[
    float, Field(ge=0, description="Largest relative difference of the training loss in the first steps")
]
FirstGradientBar = Annotated[
    float, Field(ge=0, description="Largest relative difference of the gradient norm in the first steps")
]
ProbabilityBar = Annotated[Share, Field(description="Largest difference of a class probability")]
MeanProbabilityBar = Annotated[Share, Field(description="Mean difference of the class probabilities")]
CorrelationBar = Annotated[
    float, Field(ge=-1, le=1, description="Least correlation of the scores, by value (Pearson) and rank (Spearman)")
]
CosineBar = Annotated[float, Field(ge=-1, le=1, description="Least cosine of a text's embeddings on both sides")]
OverlapBar = Annotated[Share, Field(description="Least share in common of the first ten, in the mean")]


class ParityBars(Record):
    """Bars between two sides in fp32.

    XLA:CPU and PyTorch's own CPU kernels stay 50 times and more below them (bench/results/parity.json).
    """

    max_loss_difference: LossBar = 1e-3
    max_first_loss_difference: FirstLossBar = 1e-4
    max_first_gradient_difference: FirstGradientBar = 1e-3
    max_probability_difference: ProbabilityBar = 1e-4
    mean_probability_difference: MeanProbabilityBar = 1e-5
    min_correlation: CorrelationBar = 0.99999
    min_cosine: CosineBar = 0.99999
    min_overlap: OverlapBar = 0.999


class ReducedBars(ParityBars):
    """Bars when a side computes in bf16 or autocast.

    There is none for the metric: `max_difference` holds for every precision, though training magnifies rounding. In
    300 steps on PriceRunner, bf16 led to accuracies 0.08 to 0.2 % apart at most; so did fp32 (0.13 %) from weights that
    were moved once by 0.2 %, the rounding of bf16.
    """

    max_loss_difference: LossBar = 2e-2
    max_first_loss_difference: FirstLossBar = 0.1
    max_first_gradient_difference: FirstGradientBar = 0.2
    max_probability_difference: ProbabilityBar = 0.3
    mean_probability_difference: MeanProbabilityBar = 5e-3
    min_correlation: CorrelationBar = 0.999
    min_cosine: CosineBar = 0.999
    min_overlap: OverlapBar = 0.98


class ParityConfig(Record):
    """What `trnpipe parity` computes on each side, and how far sides may be apart."""

    checkpoint: str = Field(
        "", description="What both sides start from: a checkpoint's URI, or incumbent; empty: this cycle's candidate"
    )
    steps: int = Field(300, ge=1, description="Optimizer steps trained from it on each side")
    evaluate_every: int = Field(50, ge=1, description="Steps between evaluations of the holdout")
    rows: int = Field(20_000, ge=1, description="Most holdout rows that are scored, the same on each side")
    vector_rows: int = Field(1_000, ge=1, description="Rows of which embeddings are compared")
    max_difference: float = Field(
        0.001, ge=0, description="Largest difference of the metric at any evaluation, relative to the first side"
    )
    first_steps: int = Field(
        10, ge=1, description="First steps whose losses and gradients have bars; later ones magnify rounding"
    )
    fp32: ParityBars = ParityBars()
    reduced: ReducedBars = ReducedBars()


class RetrievalConfig(Record):
    """Search with the embeddings against a whole catalogue, exactly."""

    enabled: bool = Field(True, description="Evaluate retrieval at all")
    catalogue: str | None = Field(
        None,
        description="File or folder (file:// or s3://) of items, each row with a query it is relevant to; none: the"
        " distinct products of the prepared data, judged by the gains of the holdout",
    )
    format: Literal["auto", "parquet", "csv", "jsonl"] = Field("auto", description="Its layout; auto: by suffix")
    id: str = Field(
        "product_id",
        description="Column of the item's id; of rows with one id the first gives the texts, each its query",
    )
    title: str = Field("title", description="Column of the item's title")
    text: str = Field("text", description="Column of longer text, appended to the title (optional)")
    query: str = Field("query", description="Column of the query that the item is relevant to; empty: to none")
    query_id: str = Field("", description="Column that tells queries apart; empty: the query itself does")
    queries: dict[str, str] = Field(
        {}, description="Ask only queries of items whose column equals the value, as column=value or a|b"
    )
    valid_queries: dict[str, str] = Field(
        {},
        description="Of a catalogue file, the queries from which the weight of hybrid search is chosen, written"
        " as queries are, such as split=valid; none: no such weight",
    )
    max_queries: int = Field(5000, ge=1, description="Most queries asked, chosen by a hash of their id")
    max_items: int = Field(
        1_000_000, ge=1, description="Without a catalogue file: most products, all relevant ones and an even sample"
    )
    window_rows: int = Field(16_384, ge=1, le=1_000_000, description="Items read and embedded at a time")
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Also search with vectors cut to so many leading dimensions, to see what narrower ones would cost;"
        " the gate judges those of embed.output.dimensions",
    )


class BaselinesConfig(Record):
    """Simple tools on the same holdout, scored once for the same data and known to the gate."""

    bm25: bool = Field(True, description="BM25 for the queries of retrieval in the same items")
    boosting: bool = Field(
        True, description="Gradient boosting on the numeric features, for the same rows (extra: baselines)"
    )
    boosting_rows: int = Field(
        200_000, ge=100, le=5_000_000, description="Most rows of the train split it is fitted on, chosen evenly"
    )
    hybrid: bool = Field(True, description="Search of each model fused with that of BM25")
    valid_queries: int = Field(
        1000, ge=0, description="Most queries of the valid split from which the weight of the fusion is chosen; 0: none"
    )


class EvaluateConfig(Record):
    """The candidate against the model in production, on one holdout."""

    retired: ClassVar[Mapping[str, Any]] = {"vector_rows": ...}

    candidate: str = Field(
        "", description="Checkpoint to judge, checkpoints/<cycle>/step-<n> or a URI; empty: the one this cycle trained"
    )
    incumbent: str = Field(
        "production",
        description="What it is held against: production, none, or a checkpoint (which then is never replaced)",
    )
    split: Literal["test", "valid"] = Field("test", description="Split of the holdout")
    partitions: Literal["all", "new"] = Field(
        "all",
        description="Partitions of the holdout: all, or those the incumbent was not trained on (all if these hold no"
        " row of the split)",
    )
    max_rows: int = Field(0, ge=0, description="Most rows scored, whole queries chosen by a hash of their id; 0: all")
    query_tokens: tuple[int, ...] = Field(
        (4, 8, 16), description="Slices by query length: the most tokens of each but the last; empty: no such slices"
    )
    leak: Literal["refuse", "warn", "off"] = Field(
        "refuse",
        description="Holdout queries that were trained on, by id or text: refuse above max_leak_share, or warn",
    )
    max_leak_share: float = Field(0.05, ge=0, le=1, description="Share of such queries that is only warned of")
    save_every_s: float = Field(30.0, gt=0, description="Seconds after which scored rows are saved")
    promote: bool = Field(True, description="Put a candidate that passes the gate into production")
    force_reason: str = Field("", description="Promote although the gate refuses; why (goes on record)")
    seed: int = Field(1, ge=0, description="Seed of the bootstrap")
    metrics: MetricsConfig = MetricsConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    baselines: BaselinesConfig = BaselinesConfig()

    @field_validator("query_tokens")
    @classmethod
    def _rising(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(a >= b for a, b in zip((0, *value), value, strict=False)):
            raise ValueError("expected rising numbers of tokens, such as 4,8,16")
        return value
