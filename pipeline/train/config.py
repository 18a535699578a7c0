"""Settings of the training loop, and the functions that divide a global batch over ranks and micro-steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""Shape of the learning-rate schedule after the warm-up."""
Metric = Literal["accuracy", "macro_f1", "positive_f1", "ndcg", "retrieval_ndcg", "combined"]


class OptimizerConfig(Record):
    """AdamW settings. Decoupled weight decay is applied to all weights except biases and layer norms."""

    retired: ClassVar[Mapping[str, Any]] = {"layer_decay": 1.0, "final_fraction": 0.0}
    learning_rate: float = Field(5e-4, gt=0, le=1, description="Peak learning rate")
    head_rate: float = Field(1.0, gt=0, le=1000, description="Learning-rate multiplier for layers after the encoder")
    schedule: Shape = Field("cosine", description="Learning-rate schedule after the warm-up")
    warmup_fraction: float = Field(0.06, ge=0, lt=1, description="Fraction of all steps used for the linear warm-up")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay coefficient")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1, the decay rate of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="AdamW beta2, the decay rate of the second moment")
    eps: float = Field(1e-8, gt=0, description="Term added to the denominator to improve numerical stability")
    max_grad_norm: float = Field(1.0, gt=0, description="Global gradient norm above which gradients are clipped")

    @property
    def has_one_rate(self) -> bool:
        """True if the encoder and the head use the same learning rate, so that they can share flat vectors."""
        return self.head_rate == 1.0


class GuardConfig(Record):
    """Settings of the guard that skips steps with a non-finite loss or a gradient spike."""

    retired: ClassVar[Mapping[str, Any]] = {"min_ratio": 4.0, "warmup_steps": 50, "decay": 0.98}
    sigma: float = Field(
        6.0,
        gt=0,
        description="Skip a step if its gradient norm is more than this many standard deviations above the running mean"
        " and also exceeds 4 times the mean",
    )
    patience: int = Field(20, ge=1, description="Number of consecutive skipped steps after which the run fails")


class TrainPlan(Spread):
    """Settings for distributing a run over its ranks. The default is plain data parallelism. See docs/parallel.md."""

    retired: ClassVar[Mapping[str, Any]] = {**Spread.retired, "precision": "fp32", "seed": None}

    shard_degree: int = Field(
        1,
        ge=0,
        description="Number of ranks over which to shard the state selected by `shard` (0: all data-parallel ranks,"
        " 1: no sharding)",
    )


class TrainConfig(Record):
    """Settings of the training run of a cycle."""

    retired: ClassVar[Mapping[str, Any]] = {
        "row_tokens": [],
        "batches_per_execution": 1,
        "chunk_mib": 32.0,
        "average_decay": 0.0,
        "average": "off",
    }
    start: str = Field(
        "incumbent",
        description="Initial weights: incumbent (the production model, or scratch if there is none), scratch, or a"
        " checkpoint (checkpoints/<cycle>/step-<n> or a URI)",
    )
    teacher: str = Field(
        "",
        description="Larger model whose vectors or scores the loss also learns from (trnpipe teach): a checkpoint"
        " (checkpoints/<cycle>/step-<n> or a URI), the name of a model in production, or the path or URI of a"
        " sentence-transformers or cross-encoder folder",
    )
    replay_share: float = Field(
        0.5, ge=0, lt=1, description="Fraction of the samples in an incremental run that comes from older partitions"
    )
    epochs: float = Field(2.0, gt=0, description="Number of passes over the judged samples (used if max_steps is 0)")
    max_steps: int = Field(0, ge=0, description="Number of optimizer steps (0: determined by epochs)")
    global_batch_size: int = Field(64, ge=2, description="Number of samples per optimizer step, across all ranks")
    candidates_per_query: int = Field(
        4, ge=1, le=64, description="Product slots per query in a batch. The query is encoded once for all of them"
    )
    mined_per_query: int = Field(
        0,
        ge=0,
        le=64,
        description="Additional slots per query for mined negatives (trnpipe mine). They do not count towards the batch"
        " sizes, but require as much memory and time as any other product",
    )
    queries_per_topic: int = Field(
        1,
        ge=1,
        description="Number of queries with the same first words to group in a batch, so that their products serve as"
        " hard negatives for each other (1: queries are batched at random)",
    )
    link_queries: bool = Field(
        False,
        description="Treat a query that is a positive product of another query as equivalent to it (transitively), so"
        " that the positives of one are never negatives of the other. Intended for item-to-item data",
    )
    repeat_positives: bool = Field(
        False,
        description="Repeat positives, so that each group of a query's products contains one. Repeated samples only"
        " count in the contrastive loss, which would otherwise have few positives if most products are not relevant",
    )
    micro_batch_size: int = Field(
        64,
        ge=2,
        description="Maximum number of samples per device and forward/backward pass. Gradients are accumulated over as"
        " many passes as the global batch requires",
    )
    precision: Literal["fp32", "autocast", "bf16"] = Field(
        "fp32", description="Training precision. bf16 uses bf16 weights and activations with fp32 master weights"
    )
    compiled: bool | None = Field(
        None,
        description="Use torch.compile for the layers of the encoder, which requires a C compiler (default: on cuda, if"
        " there is one)",
    )
    step_boundary: Literal["split", "fused"] = Field(
        "fused", description="fused: one graph per step (fastest). split: a separate, smaller graph for the update"
    )
    seed: int = Field(1, ge=0, lt=2**63, description="Random seed for the initial weights, sample order and dropout")
    evaluate_every: int | None = Field(
        None,
        ge=0,
        description="Number of steps between evaluations on the validation split (default: 8 evaluations in at most a"
        " tenth of the time; 0: only at the end)",
    )
    evaluate_rows: int | None = Field(
        None,
        ge=1,
        description="Maximum number of validation rows to score in each evaluation, except for the final one, which"
        " scores all rows (default: 300 to 5,000, as many as a tenth of the training time allows)",
    )
    metric: Metric = Field(
        "accuracy",
        description="Validation metric used to select the best checkpoint. retrieval_ndcg ranks all validation products"
        " for each query, and combined is the mean of macro_f1 and retrieval_ndcg. If loss.graded_weight is 0,"
        " retrieval_ndcg is always used",
    )
    metric_rows: Literal["all", "unseen"] = Field(
        "all",
        description="Validation rows on which the best checkpoint is selected: all of them, or only those with a query"
        " or a product that is not in the training data",
    )
    patience: int | None = Field(
        None,
        ge=0,
        description="Stop training after this many evaluations without improvement. The best checkpoint is then the"
        " candidate (default: after half of the run without improvement; 0: never stop early)",
    )
    deadline: datetime | None = Field(None, description="Time (ISO 8601) by which training must be finished")
    on_deadline: Literal["warn", "finish"] = Field(
        "warn", description="At the deadline, either keep training and log a warning, or stop training and evaluate"
    )
    collective_timeout_s: float = Field(
        300.0, gt=0, description="Seconds to wait for an unresponsive rank before the run fails and is retried"
    )
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    guard: GuardConfig = GuardConfig()
    parallel: TrainPlan = TrainPlan()

    @field_validator("deadline", mode="before")
    @classmethod
    def _reject_numeric_deadline(cls, value: Any) -> Any:
        """Reject numbers, because pydantic would interpret 20260801 as seconds since 1970."""
        try:
            float(value)
        except (TypeError, ValueError):
            return value
        raise ValueError("a deadline cannot be a number: expected a date and a time, such as 2026-08-01T18:00Z")

    @model_validator(mode="after")
    def _check_mined_negatives(self) -> Self:
        if self.mined_per_query and self.loss.positive_gain == 0:
            raise ValueError("mined_per_query requires loss.positive_gain above 0, because mined negatives have gain 0")
        if self.mined_per_query and not self.loss.contrastive_weight:
            raise ValueError(
                f"mined_per_query {self.mined_per_query} has no effect without a contrastive loss: expected"
                " mined_per_query 0, or loss.contrastive_weight above 0"
            )
        return self

    @model_validator(mode="after")
    def _check_repeats(self) -> Self:
        if self.repeat_positives and self.candidates_per_query == 1:
            raise ValueError("repeat_positives requires candidates_per_query of at least 2")
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> Self:
        if self.teacher and not self.loss.contrastive_weight:
            raise ValueError("teacher requires the contrastive loss, expected loss.contrastive_weight above 0")
        return self

    @model_validator(mode="after")
    def _check_patience(self) -> Self:
        if self.patience and self.evaluate_every == 0:
            raise ValueError("patience requires evaluations during training, expected evaluate_every above 0")
        return self

    @property
    def best_metric(self) -> Metric:
        """The metric used to select the best checkpoint, which cannot depend on the head unless the head is trained."""
        return self.metric if self.loss.trains_head else "retrieval_ndcg"


class CheckpointConfig(Record):
    """Settings that control when checkpoints are saved and which ones are kept."""

    every_steps: int | None = Field(
        None, ge=1, description="Number of steps between checkpoints (default: at every evaluation and every 500 steps)"
    )
    keep_last: int = Field(2, ge=1, description="Number of most recent checkpoints to keep")
    keep_every_steps: int = Field(
        0, ge=0, description="Never delete checkpoints whose step is a multiple of this number (0: no such checkpoints)"
    )


# The cadence of a run depends on its length rather than on measured times, so that a resumed run makes the same choice.

NUM_EVALUATIONS, _MAX_UNSAVED = 8, 500
_MIN_ROWS, _MAX_ROWS = 300, 5000  # to score in an evaluation. Metrics on fewer rows are too noisy
_ROWS_PER_SAMPLE = 0.15
"""Number of rows to score per trained sample. Scoring a row takes about two thirds of the time of training on a sample,
which shares a query with others, so all evaluations together take about a tenth of the time."""


@dataclass(frozen=True)
class Cadence:
    """Number of steps between log lines, evaluations and checkpoints. If `evaluate` is 0, only the end is evaluated.

    An evaluation scores at most `rows` rows. Training stops after `wait` steps without improvement (0: never).
    """

    log: int
    evaluate: int
    save: int
    rows: int = 0
    wait: int = 0


def choose_cadence(config: TrainConfig, save_every: int | None, log_every: int, *, steps: int, rows: int) -> Cadence:
    """Determine the cadence of a run with `steps` steps and `rows` validation rows, unless it is configured."""
    budget, every = int(_ROWS_PER_SAMPLE * steps * config.global_batch_size), config.evaluate_every
    if every is None:
        every = -(-steps // NUM_EVALUATIONS)
        if -(-steps // every) < NUM_EVALUATIONS:  # in a short run, rounding up skips evaluations
            every = max(1, steps // NUM_EVALUATIONS)
    evaluations = -(-steps // every) if every else 1
    scored = config.evaluate_rows or min(max(budget // evaluations, _MIN_ROWS), _MAX_ROWS)
    if config.best_metric == "ndcg" and config.evaluate_rows is None:
        scored = rows  # evenly spaced rows may be one per query, which is always ranked perfectly
    affordable = budget // max(1, min(scored, rows))
    if config.evaluate_every is None and evaluations > affordable:
        every = -(-steps // affordable) if affordable > 1 else 0
    wait = -(-steps // 2) if config.patience is None else config.patience * every
    return Cadence(log_every, every, save_every or min(every or steps, _MAX_UNSAVED), scored, wait)


# Functions that divide a global batch over ranks and micro-steps.


def groups_per_batch(config: TrainConfig) -> int:
    """Return the number of groups in a global batch. Raises ConfigError if it is not a whole number."""
    groups, rest = divmod(config.global_batch_size, config.candidates_per_query)
    if rest or not groups:
        raise _uneven_error(config, 1)
    return groups


def batch_lengths(config: TrainConfig, buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Return the possible row lengths in tokens, in ascending order. All rows of a batch have the same length."""
    return row_lengths(buckets, config.candidates_per_query + config.mined_per_query)


def run_layout(config: TrainConfig, world_size: int, rank: int = 0) -> Layout:
    """Return the parallel layout as seen by `rank`. Raises ConfigError if the degrees do not divide the world size."""
    plan = config.parallel
    return layout_of(rank, world_size, shard_degree=plan.shard_degree, tensor_degree=plan.tensor_degree)


def rank_slice(config: TrainConfig, world_size: int, rank: int = 0) -> RankSlice:
    """Determine which part of each global batch a rank processes, and in how many micro-steps.

    The number of micro-steps is the smallest one for which all micro-batches have the same size, fit
    `micro_batch_size`, and contain only complete groups. Raises ConfigError if there is no such division.
    """
    layout = run_layout(config, world_size, rank)
    per_rank, rest = divmod(groups_per_batch(config), layout.data_size)
    max_groups = config.micro_batch_size // config.candidates_per_query
    if rest or not max_groups:
        raise _uneven_error(config, layout.data_size)
    accumulation = next(steps for steps in range(-(-per_rank // max_groups), per_rank + 1) if per_rank % steps == 0)
    return RankSlice(layout.data_rank, layout.data_size, accumulation)


def needs_two_passes(config: TrainConfig, share: RankSlice, *, gathers_in_graph: bool) -> bool:
    """Return whether the contrastive loss requires two passes, because no single graph sees the whole global batch."""
    if not config.loss.contrastive_weight:
        return False
    return share.accumulation > 1 or (share.world_size > 1 and not gathers_in_graph)


def _uneven_error(config: TrainConfig, ranks: int) -> ConfigError:
    slots, batch = config.candidates_per_query, config.global_batch_size
    unit = slots * ranks
    larger = f"--train.global-batch-size {unit * max(1, round(batch / unit))}"
    if config.micro_batch_size < slots:
        larger = f"--train.micro-batch-size {slots}"
    return ConfigError(
        f"a global batch of {batch} cannot be divided over {ranks} ranks in micro-batches of up to"
        f" {config.micro_batch_size}",
        expected=f"equal micro-batches of complete groups (train.candidates_per_query is {slots})",
        next_command=f"{larger}, or a different --train.global-batch-size, --train.micro-batch-size or"
        " --train.candidates-per-query",
    )
