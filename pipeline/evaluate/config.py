"""Settings of the evaluate stage: what is scored and reported, the gate, and the comparison of two sides."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from pipeline.core.record import Record

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
    """The name of a metric: its word, and the rank or label after it."""

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
        """Parse a name. Raises ValueError if no metric has it."""
        head, colon, label = text.partition(":")  # a label may have an @
        word, at, rank = head.partition("@")
        needs, bare = KINDS.get(word), not at and not colon
        if bare and needs is not None and (not needs or word in _BARE_TOO):
            return cls(text, word)
        if at and not colon and needs == "rank" and rank.isdecimal() and rank.isascii() and rank[0] != "0":
            return cls(text, word, rank=int(rank))
        if colon and not at and needs == "label" and label:
            return cls(text, word, label=label)
        forms = {"": "", "rank": "@K", "label": ":LABEL"}
        names = [f"{known}{forms[needs]}" for known, needs in KINDS.items()]
        raise ValueError(f"no metric is called {text!r}; expected one of {', '.join([*names, *_BARE_TOO])}")


QUERY_TOKENS = (4, 8, 16)
"""Slices by query length: the most tokens of each but the last."""
MAX_LEAK_SHARE = 0.05
"""Share of holdout queries that were trained on, above which evaluate.leak refuses."""
Cutoff = Annotated[int, Field(ge=1, le=100_000)]
RECALL_AT, PRECISION_AT = (1, 10), (1,)
"""Ranks that are reported; the gate may name others."""


class MetricsConfig(Record):
    """What a model is measured by on a holdout."""

    retired: ClassVar[Mapping[str, Any]] = {"recall_at": [1, 10], "precision_at": [1], "ece_bins": 15}

    ndcg_at: tuple[Cutoff, ...] = Field((5, 10), description="Ranks k of nDCG@k over the rows of a query")
    retrieval_at: tuple[Cutoff, ...] = Field(
        (1, 10, 100),
        min_length=1,
        description="Ranks k of recall, nDCG and success in retrieval, in addition to those that the gate names",
    )
    relevant_gain: float | None = Field(
        None, gt=0, description="Gain from which a row is relevant to MRR, recall@k and precision@k (null: best label)"
    )


def _of_rows(text: str) -> str:
    if MetricName.parse(text).of_retrieval:
        raise ValueError(f"{text} is not known by slice; expected a metric of rows, such as ndcg@10")
    return text


Metric = Annotated[str, AfterValidator(lambda text: MetricName.parse(text).text)]
RowMetric = Annotated[Metric, AfterValidator(_of_rows)]
Allowed = Annotated[float, Field(ge=0, allow_inf_nan=False)]
OnBetter = Literal["refuse", "warn", "off"]
OnGolden = Literal["fail", "warn", "off"]
Bound = Annotated[float, Field(allow_inf_nan=False)]

DROPS: dict[Metric, Allowed] = {"ndcg@10": 0.01, "macro_f1": 0.01, "retrieval_ndcg@10": 0.01}


class GateConfig(Record):
    """When a candidate may replace the model in production."""

    retired: ClassVar[Mapping[str, Any]] = {"without_incumbent": "floors"}

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
    first_without_comparison: bool = Field(
        False, description="Promote a first model that no floor and no baseline could judge, and say so on record"
    )
    golden: OnGolden = Field(
        "warn", description="A golden query is lost that production gets right: fail, warn, or off"
    )

    def drops_for(self, *, searched: bool) -> dict[Metric, Allowed]:
        """Return `drops`; if retrieval is not evaluated, the default ones without those of retrieval.

        Drops that a user set stand as they are: one of retrieval then refuses.
        """
        if searched or self.drops != DROPS:
            return self.drops
        return {text: allowed for text, allowed in self.drops.items() if not MetricName.parse(text).of_retrieval}

    def with_ranks(self, metrics: MetricsConfig) -> MetricsConfig:
        """Return `metrics` with the ranks of retrieval that are judged."""
        names = [*self.floors, *self.drops]
        names += [] if self.baselines == self.first_baselines == "off" else self.baseline_drops
        parsed = [MetricName.parse(text) for text in names]
        judged = {name.rank for name in parsed if name.of_retrieval and name.rank is not None}
        if judged <= set(metrics.retrieval_at):
            return metrics
        return metrics.model_copy(update={"retrieval_at": tuple(sorted(judged.union(metrics.retrieval_at)))})


class ParityConfig(Record):
    """What `trnpipe parity` computes on each side, and how far apart the sides may be."""

    retired: ClassVar[Mapping[str, Any]] = {
        "evaluate_every": ...,
        "vector_rows": ...,
        "first_steps": 10,
        "fp32": ...,
        "reduced": ...,
    }

    checkpoint: str = Field(
        "", description="What both sides start from: a checkpoint's URI, or incumbent; empty: this cycle's candidate"
    )
    steps: int = Field(300, ge=1, description="Optimizer steps trained from it on each side, with six evaluations")
    rows: int = Field(20_000, ge=1, description="Most holdout rows that are scored, the same on each side")
    max_difference: float = Field(
        0.001, ge=0, description="Largest difference of the metric at any evaluation, relative to the first side"
    )


class RetrievalConfig(Record):
    """Search with the embeddings against a whole catalogue, exactly."""

    retired: ClassVar[Mapping[str, Any]] = {"format": "auto", "window_rows": ...}

    enabled: bool = Field(True, description="Evaluate retrieval at all")
    catalogue: str | None = Field(
        None,
        description="File or folder (file:// or s3://) of items, each row with a query it is relevant to; none: the"
        " distinct products of the prepared data, judged by the gains of the holdout",
    )
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
    dimensions: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Also search with vectors cut to so many leading dimensions, to see what narrower ones would cost;"
        " the gate judges those of embed.output.dimensions",
    )


class BaselinesConfig(Record):
    """Simple tools on the same holdout, scored once for the same data and known to the gate."""

    retired: ClassVar[Mapping[str, Any]] = {"boosting_rows": 200_000, "hybrid": True, "valid_queries": 1000}

    bm25: bool = Field(
        True, description="BM25 for the queries of retrieval in the same items, alone and fused with each model"
    )
    boosting: bool = Field(
        True, description="Gradient boosting on the numeric features, for the same rows (extra: baselines)"
    )


class EvaluateConfig(Record):
    """The candidate against the model in production, on one holdout."""

    retired: ClassVar[Mapping[str, Any]] = {
        "vector_rows": ...,
        "save_every_s": ...,
        "seed": 1,
        "max_leak_share": MAX_LEAK_SHARE,
        "query_tokens": [*QUERY_TOKENS],
    }

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
    leak: Literal["refuse", "warn", "off"] = Field(
        "refuse",
        description="Holdout queries that were trained on, by id or text: refuse if they are more than 5 %, or warn",
    )
    golden: str | None = Field(
        None, description="TOML file of queries with products that search must, or must not, find first"
    )
    promote: bool = Field(True, description="Put a candidate that passes the gate into production")
    force_reason: str = Field("", description="Promote although the gate refuses; why (goes on record)")
    metrics: MetricsConfig = MetricsConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    baselines: BaselinesConfig = BaselinesConfig()
