"""Settings of the training loop, and how they have ranks and micro-steps share a global batch."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipeline.core.batch_order import Bucket, RankSlice, row_lengths
from pipeline.core.errors import ConfigError
from pipeline.core.layout import Layout, layout_of
from pipeline.core.record import Record
from pipeline.model.config import LossConfig
from pipeline.parallel.config import Spread

Shape = Literal["cosine", "linear", "constant"]
"""Of the learning rate after the warm-up."""
Metric = Literal["accuracy", "macro_f1", "positive_f1", "ndcg", "retrieval_ndcg", "combined"]


class OptimizerConfig(Record):
    """AdamW with decoupled weight decay; biases and layer norms are not decayed."""

    retired: ClassVar[Mapping[str, Any]] = {"layer_decay": 1.0, "final_fraction": 0.0}
    learning_rate: float = Field(5e-4, gt=0, le=1, description="Peak learning rate")
    head_rate: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="Multiple of learning_rate for what stands behind the encoder",
    )
    schedule: Shape = Field("cosine", description="Shape after the warm-up")
    warmup_fraction: float = Field(0.06, ge=0, lt=1, description="Share of the steps in linear warm-up")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm is clipped to this")

    @property
    def has_one_rate(self) -> bool:
        """Whether encoder and head learn at one rate, and so may share vectors."""
        return self.head_rate == 1.0


class GuardConfig(Record):
    """Skips a step whose loss or gradient is not finite or far off the usual; decided on the device."""

    retired: ClassVar[Mapping[str, Any]] = {"min_ratio": 4.0, "warmup_steps": 50, "decay": 0.98}
    sigma: float = Field(
        6.0,
        gt=0,
        description="Skip above mean + sigma standard deviations of the gradient norm, and above 4 times the mean",
    )
    patience: int = Field(20, ge=1, description="Steps skipped in a row before the run fails with NumericError")


class TrainPlan(Spread):
    """How a run is spread over its ranks; as it comes, each has all of it (data parallel). See docs/parallel.md."""

    retired: ClassVar[Mapping[str, Any]] = {**Spread.retired, "precision": "fp32", "seed": None}

    shard_degree: int = Field(
        1, ge=0, description="Ranks that share one copy of what `shard` names; 0: all data-parallel ranks, 1: none"
    )


class TrainConfig(Record):
    """One training run of one cycle."""

    retired: ClassVar[Mapping[str, Any]] = {
        "row_tokens": [],
        "batches_per_execution": 1,
        "chunk_mib": 32.0,
        "average_decay": 0.0,
    }
    start: str = Field(
        "incumbent",
        description="incumbent, scratch, or a checkpoint: checkpoints/<cycle>/step-<n> or a URI; scratch is used when"
        " nothing is promoted",
    )
    replay_share: float = Field(
        0.1, ge=0, lt=1, description="Share of an incremental run's samples drawn from older partitions"
    )
    epochs: float = Field(2.0, gt=0, description="Passes over the chosen samples (used when max_steps is 0)")
    max_steps: int = Field(0, ge=0, description="Optimizer steps; 0: from epochs")
    global_batch_size: int = Field(64, ge=2, description="Samples of one optimizer step, over all ranks")
    candidates_per_query: int = Field(
        4,
        ge=1,
        le=64,
        description="Products of one query that ride in a batch together, in fixed slots; its text is encoded once",
    )
    mined_per_query: int = Field(
        0,
        ge=0,
        le=64,
        description="Slots for mined negatives behind each query's products in a batch (trnpipe mine); 0: none. They"
        " are no samples of a batch, but take memory and time as its products do",
    )
    queries_per_topic: int = Field(
        1,
        ge=1,
        description="Queries that begin with the same words and ride in a batch together, so that their products are"
        " each other's hard negatives; 1: any queries",
    )
    link_queries: bool = Field(
        False,
        description="A query that is a positive product of another one means the same, and so on from query to query:"
        " the positives of one are no negatives of the other. For data that matches items to items",
    )
    micro_batch_size: int = Field(
        64, ge=2, description="Most samples of one forward/backward on one device; accumulation follows"
    )
    precision: Literal["fp32", "autocast", "bf16"] = Field(
        "fp32", description="bf16: bf16 weights and activations, fp32 master weights"
    )
    step_boundary: Literal["split", "fused"] = Field(
        "fused", description="One graph a step (fastest), or forward+backward and update apart (smaller graphs)"
    )
    seed: int = Field(1, ge=0, lt=2**63, description="Seed of initial weights, order and dropout")
    evaluate_every: int = Field(200, ge=0, description="Steps between holdout evaluations; 0: only at the end")
    evaluate_rows: int = Field(
        5000, ge=1, description="Most holdout rows used during training (the final one uses all)"
    )
    metric: Metric = Field(
        "accuracy",
        description="Holdout metric that names the best checkpoint; retrieval_ndcg: every query searched among the"
        " holdout's products; combined: the mean of macro_f1 and retrieval_ndcg. With loss.graded_weight 0 it is always"
        " retrieval_ndcg",
    )
    patience: int = Field(
        0, ge=0, description="Holdout evaluations without a new best after which training ends; 0: never"
    )
    deadline: datetime | None = Field(None, description="Time (ISO 8601) by which the cycle needs the model")
    on_deadline: Literal["warn", "finish"] = Field(
        "warn", description="At the deadline: go on, or evaluate and finish with what there is"
    )
    collective_timeout_s: float = Field(
        300.0, gt=0, description="Seconds after which a peer that does not answer fails the run (retry)"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    guard: GuardConfig = GuardConfig()
    parallel: TrainPlan = TrainPlan()

    @field_validator("deadline", mode="before")
    @classmethod
    def _deadline_is_no_number(cls, value: Any) -> Any:
        """pydantic takes one for seconds since 1970, and so 20260801 for a day of that year."""
        try:
            float(value)
        except (TypeError, ValueError):
            return value
        raise ValueError("a number is no time: expected a date and a time, such as 2026-08-01T18:00Z")

    @model_validator(mode="after")
    def _mined_are_negatives(self) -> Self:
        if self.mined_per_query and self.loss.positive_gain == 0:
            raise ValueError("mined_per_query with loss.positive_gain 0: a mined negative has gain 0, so no positive")
        if self.mined_per_query and not self.loss.contrastive_weight:
            raise ValueError(
                f"mined_per_query {self.mined_per_query} without a contrastive loss: nothing is learnt of them;"
                " expected mined_per_query 0, or loss.contrastive_weight above 0"
            )
        return self

    @property
    def best_metric(self) -> Metric:
        """The metric that names the best checkpoint; the scores of a head that is not trained mean nothing."""
        return self.metric if self.loss.trains_head else "retrieval_ndcg"


class CheckpointConfig(Record):
    """When checkpoints are made and which stay."""

    every_steps: int = Field(200, ge=1, description="Steps between checkpoints")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept")
    keep_every_steps: int = Field(0, ge=0, description="Checkpoints at multiples of this are kept for good; 0: none")


# How ranks and micro-steps share a global batch.


def groups_of_batch(config: TrainConfig) -> int:
    """Return the groups of one query in a global batch. Raises ConfigError if its samples are not whole groups."""
    groups, rest = divmod(config.global_batch_size, config.candidates_per_query)
    if rest or not groups:
        raise _uneven_error(config, 1)
    return groups


def rows_of_batch(config: TrainConfig, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Return the lengths of the rows of tokens that batches are made of, ascending; one batch has one of them."""
    return row_lengths(buckets, config.candidates_per_query + config.mined_per_query)


def run_layout(config: TrainConfig, world_size: int, rank: int = 0) -> Layout:
    """Return the place of a rank in the plan of a run. Raises ConfigError for degrees that do not divide the ranks."""
    plan = config.parallel
    return layout_of(rank, world_size, shard_degree=plan.shard_degree, tensor_degree=plan.tensor_degree)


def batch_share(config: TrainConfig, world_size: int, rank: int = 0) -> RankSlice:
    """Choose the fewest equal micro-steps that fit `micro_batch_size` and cut no group of one query. Of data ranks.

    Raises ConfigError if the global batch cannot be shared evenly.
    """
    layout = run_layout(config, world_size, rank)
    per_rank, rest = divmod(groups_of_batch(config), layout.data_size)
    most = config.micro_batch_size // config.candidates_per_query
    if rest or not most:
        raise _uneven_error(config, layout.data_size)
    accumulation = next(parts for parts in range(-(-per_rank // most), per_rank + 1) if per_rank % parts == 0)
    return RankSlice(layout.data_rank, layout.data_size, accumulation)


def needs_two_passes(config: TrainConfig, share: RankSlice, *, gathers_in_graph: bool) -> bool:
    """Return whether no one graph of a rank can hold the global batch that the contrastive loss is computed over."""
    if not config.loss.contrastive_weight:
        return False
    return share.accumulation > 1 or (share.world_size > 1 and not gathers_in_graph)


def _uneven_error(config: TrainConfig, ranks: int) -> ConfigError:
    slots, batch = config.candidates_per_query, config.global_batch_size
    unit = slots * ranks
    return ConfigError(
        f"a global batch of {batch} over {ranks} ranks, in micro-batches of up to {config.micro_batch_size}",
        expected=f"equal micro-batches of whole groups (train.candidates_per_query is {slots})",
        next_command=f"--train.global-batch-size {unit * max(1, round(batch / unit))}, or another"
        " --train.micro-batch-size or --train.candidates-per-query",
    )
