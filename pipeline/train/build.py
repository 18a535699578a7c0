"""Build everything that a training run needs before its first step.

This module opens the process group and the device, selects the training rows, builds the model and the training
program, and restores the starting checkpoint. The run itself is in `loop`, which calls `step` and `optimizer`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor

from pipeline.backends import Backend
from pipeline.checkpoint.save import CheckpointWriter, Snapshot
from pipeline.checkpoint.store import (
    Best,
    Checkpoint,
    CheckpointStore,
    PublishedWeights,
    TrainState,
)
from pipeline.compile.manifest import GraphWatch
from pipeline.context import StageContext
from pipeline.core.batch_order import BatchPlan, Bucket, RankSlice
from pipeline.core.errors import DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.data.shards import TokenRows
from pipeline.data.taught import TaughtRows
from pipeline.data.token_sets import Split, TokenSet, open_rows
from pipeline.data.tokenizer import has_vocabulary
from pipeline.data.trained_items import FIELDS, TrainedItems
from pipeline.data.training_groups import MinedProducts, TrainingPools
from pipeline.evaluate.score import HoldoutFigures
from pipeline.evaluate.trained import mark_trained
from pipeline.health.config import HealthConfig
from pipeline.health.device import diagnose_device_error
from pipeline.mine.store import open_negatives
from pipeline.model.hf import from_hf, hf_config, to_hf
from pipeline.model.weights import digest_of_initial, initial_model
from pipeline.parallel.mesh import check_plan, check_same
from pipeline.parallel.process_group import ProcessGroup, open_ranks
from pipeline.registry.records import checkpoints_in_use
from pipeline.settings import Settings
from pipeline.telemetry.events import EventName
from pipeline.train.config import TrainConfig, batch_lengths, groups_per_batch, rank_slice, run_layout
from pipeline.train.inputs import RunInputs, check_identity
from pipeline.train.optimizer import SKIPPED
from pipeline.train.step import TrainProgram, open_program

_NEEDS_GAINS = frozenset({"ndcg", "retrieval_ndcg", "combined"})
"""Metrics that are undefined unless at least one row has a gain above 0."""
PROJECTION = "teacher."  # prefix of the tensor of RelevanceModel.add_projection
MAX_EARLIER_STEPS = 1_000_000
"""Moments of that many steps have no bias to correct, and fp32 can count the steps of a run beyond them."""
_FITTED_ROWS = 200_000
"""Maximum number of training rows used to fit the scaling of numeric features."""
_MIN_QUERIES = 50
"""Minimum number of queries on which to select the best step if only unseen rows count."""


@dataclass
class Saver:
    """Saves and restores the checkpoints of a run. Only rank 0 writes them, but every rank can read them."""

    program: TrainProgram
    store: CheckpointStore
    writer: CheckpointWriter
    process_group: ProcessGroup
    base: TrainState
    """The state at step 0, which `_load_start` completes. Later, only `step`, `best` and `temperature` differ."""
    tokenizer: bytes
    warn: Callable[[str], None]
    projection: dict[str, Tensor]
    """The initial projection to the teacher's vectors, if any, unless the parent has one of the same shape."""
    _reported_failure: str = field(init=False, default="")

    def newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint of this cycle. Rank 0 chooses it, so that all ranks load the same one."""
        step, checkpoint = -1, None
        if self.process_group.world.is_main:
            checkpoint, rejected = self.store.newest_valid()
            for reason in rejected:
                self.warn(f"skipped an unusable checkpoint: {reason}")
            step = -1 if checkpoint is None else checkpoint.state.step
        chosen = int(self.process_group.gather(step)[0])
        return checkpoint if self.process_group.world.is_main else None if chosen < 0 else self.store.open(chosen)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load the weights and the optimizer and guard state of this run onto the device."""
        weights = from_hf(checkpoint.weights(), self.program.strategy.template, source=checkpoint.prefix)
        self.program.restore(weights, checkpoint.optimizer())

    def start_from(self, parent: Checkpoint) -> int:
        """Load the weights of a parent, and the moments of its optimizer if it has any that fit, onto the device.

        With moments of zero, the first steps of AdamW would be several times larger than those of the parent and undo
        part of its training. Returns the number of steps that the moments are averages of.
        """
        saved = parent.weights()
        new = {
            name: tensor
            for name, tensor in self.projection.items()
            if name not in saved or saved[name].shape != tensor.shape
        }
        weights = from_hf(saved | new, self.program.strategy.template, source=parent.prefix)
        fit = self.program.start_from(weights, parent.optimizer())
        return min(parent.state.earlier_steps + parent.state.step, MAX_EARLIER_STEPS) if fit else 0

    def save(self, step: int, best: Best | None, temperature: float) -> None:
        """Copy the training state to the host and queue it for writing. Logs a warning if an earlier save failed."""
        if self.writer.failure and self.writer.failure != self._reported_failure:
            self._reported_failure = self.writer.failure
            self.warn(f"a checkpoint could not be saved, but training continues: {self._reported_failure}")
        weights, optimizer = self.program.snapshot()
        if not self.process_group.world.is_main:
            return
        state = self.base.model_copy(update={"step": step, "best": best, "temperature": temperature})
        config = hf_config(state.model, state.inputs)
        self.writer.submit(Snapshot(state, to_hf(weights), optimizer, config, self.tokenizer))

    def wait_saved(self, step: int) -> None:
        """Block until the checkpoint of `step` is committed. Raises TransientError if it could not be saved."""
        self.writer.wait()
        if self.process_group.world.is_main and self.writer.last_saved != step:
            raise TransientError(
                f"the checkpoint of step {step} could not be saved: {self.writer.failure}",
                expected="a writable workspace with free space",
                next_command="free space, then run the same command, which continues from the last good checkpoint",
            )


@dataclass(frozen=True)
class Position:
    """The position to continue from. The default is the start of a new run."""

    step: int = 0
    skipped: int = 0
    """Number of steps that the guard has skipped so far."""
    best: Best | None = None
    """The best evaluation result so far."""


OpenWatch = Callable[[Sequence[Bucket], RankSlice, Backend], GraphWatch]
"""Returns the graph watch to use for a run with the given buckets."""


@dataclass(frozen=True)
class Run:
    """One rank of a training run, with the weights of `start` already on the device."""

    config: Settings
    ctx: StageContext
    inputs: RunInputs
    share: RankSlice
    process_group: ProcessGroup
    backend: Backend
    pools: TrainingPools
    plan: BatchPlan
    max_steps: int
    valid: TokenRows
    metric_rows: TokenRows
    """The validation rows on which the best step is selected."""
    program: TrainProgram
    saver: Saver
    start: Position

    def emit_evaluation(
        self, step: int, split: Split, figures: HoldoutFigures, started: float, **fields: JsonValue
    ) -> None:
        """Emit the event of an evaluation that started at `started` (time.monotonic). `fields` are those it adds."""
        self.ctx.events.emit(
            EventName.HOLDOUT_EVALUATED,
            step=step,
            split=split,
            **fields,
            loss=figures.loss,
            rows=figures.rows,
            seconds=round(time.monotonic() - started, 3),
        )


@contextmanager
def open_run(
    config: Settings,
    ctx: StageContext,
    inputs: RunInputs,
    tokenizer: bytes,
    open_watch: OpenWatch = lambda buckets, share, backend: GraphWatch(),
) -> Iterator[Run]:
    """Build a training run, or resume it if this cycle already has a checkpoint.

    The process group is destroyed on exit. `tokenizer` is the content of tokenizer.json, which is saved with every
    checkpoint.
    """
    train, world = config.train, ctx.world
    share, layout = rank_slice(train, world.world_size, world.rank), run_layout(train, world.world_size, world.rank)
    with (
        open_ranks(config.backend, world, timeout_s=train.collective_timeout_s, layout=layout) as (
            process_group,
            backend,
        ),
        _device_errors(config.health, ctx, backend),
    ):
        check_same(train.parallel.model_dump_json(), "plan")
        check_plan(train.parallel, backend)
        pools = _training_pools(train, ctx, inputs)
        plan = BatchPlan(pools.sizes, groups_per_batch(train), train.seed, train.queries_per_topic)
        max_steps = train.max_steps or max(1, round(train.epochs * plan.batches_per_epoch))
        valid = _valid_rows(train, ctx, inputs)
        metric_rows = _unseen_rows(ctx, inputs, valid, process_group) if train.metric_rows == "unseen" else valid

        folder = None if inputs.parent else config.model.init_from  # the parent replaces all weights
        same_vocabulary = folder is not None and has_vocabulary(folder, tokenizer)
        initial = config.model.model_copy(update={"init_from": folder})
        model = initial_model(initial, inputs.spec, train.seed, ctx.scratch, same_vocabulary=same_vocabulary)
        if inputs.parent is None:
            model.interactions.features.fit(torch.from_numpy(pools.new.numeric_sample(_FITTED_ROWS)))
        if inputs.taught is not None and inputs.taught.width:
            model.add_projection(inputs.taught.width, train.seed)
        projection = {
            name: tensor.clone() for name, tensor in model.state_dict().items() if name.startswith(PROJECTION)
        }
        program = open_program(
            model,
            backend,
            train,
            share,
            process_group,
            metric_rows=config.log.every_steps,
            buckets=valid.buckets,
            watch=open_watch(valid.buckets, share, backend),
        )
        store = CheckpointStore(
            ctx.workspace_after_stop, ctx.cycle, cache_dir=ctx.scratch / "checkpoints", emit=ctx.events.emit
        )
        writer = CheckpointWriter(
            store,
            config.checkpoint,
            ctx.scratch / "saving",
            # Ensure that the events of all steps in a checkpoint are durable before the checkpoint is committed.
            before_commit=lambda: ctx.events.flush(durable=True),
            in_use=lambda: checkpoints_in_use(ctx.workspace_after_stop),
        )
        base = TrainState(
            cycle=ctx.cycle,
            step=0,
            max_steps=max_steps,
            identity=fingerprint(dict(inputs.identity)),
            identity_parts=dict(inputs.identity),
            model=config.model,
            inputs=inputs.spec,
            tokenizer_fingerprint=inputs.sets[0].info.tokenizer_fingerprint,
            watermark=inputs.watermark,
            partitions=inputs.partitions,
            also_seen=inputs.also_seen,
            parent=inputs.parent_record,
            best=None,
            max_tokens=inputs.max_tokens,
            trained_head=train.loss.trains_head,
            settings_hash=ctx.settings_hash,
            code_version=ctx.code_version,
        )
        saver = Saver(program, store, writer, process_group, base, tokenizer, ctx.console.warn, projection)
        start = _load_start(saver, ctx, inputs)
        yield Run(
            config,
            ctx,
            inputs,
            share,
            process_group,
            backend,
            pools,
            plan,
            max_steps,
            valid,
            metric_rows,
            program,
            saver,
            start,
        )


@contextmanager
def _device_errors(health: HealthConfig, ctx: StageContext, backend: Backend) -> Iterator[None]:
    """Run the health checks on a device error, while the device is still open, and raise their diagnosis instead."""
    try:
        yield
    except RuntimeError as error:
        diagnosed = diagnose_device_error(error, backend, health, stop=ctx.stop)
        if diagnosed is error:
            raise
        raise diagnosed from error


def _training_pools(train: TrainConfig, ctx: StageContext, inputs: RunInputs) -> TrainingPools:
    """Build the pools of training rows from the new partitions and a replayed fraction of the old ones.

    Raises DataError if there is no new partition or if the rows do not fill a single batch.
    """
    if not inputs.new_sets:
        raise DataError(
            f"{inputs.parent.prefix if inputs.parent else 'no parent'} was already trained on all prepared data",
            expected=f"a partition that is newer than {inputs.watermark or 'those it was trained on'}",
            next_command="prepare newer data (data.path), or --train.start scratch",
        )
    cache, workspace = ctx.scratch / "tokens", ctx.workspace
    new = open_rows(workspace, inputs.new_sets, "train", cache)
    old = open_rows(workspace, inputs.old_sets, "train", cache) if inputs.old_sets else None
    buckets = [Bucket.parse(name) for name in inputs.sets[0].info.buckets]
    mined = None
    if inputs.negatives is not None:
        rows = open_rows(workspace, inputs.sets, "train", cache)
        pairs = open_negatives(workspace, inputs.negatives, rows.sizes, ctx.scratch / "negatives")
        taught, score = _taught(ctx, inputs, inputs.sets), None
        if inputs.taught is not None:
            score = inputs.taught.open_mined(rows.sizes, pairs.product.shape, ctx.scratch / "teach")
        slots = train.mined_per_query
        mined = MinedProducts(rows, rows.pad_id, pairs.query_id, pairs.product, slots, train.seed, taught, score)
    pools = TrainingPools.build(
        new,
        old,
        train.replay_share,
        train.seed,
        slots=train.candidates_per_query,
        lengths=batch_lengths(train, buckets),
        positive_gain=train.loss.positive_gain,
        mined=mined,
        topic=train.queries_per_topic,
        link_queries=train.link_queries and train.loss.contrastive_weight > 0,
        repeat_positives=train.repeat_positives and train.loss.contrastive_weight > 0,
        taught=(_taught(ctx, inputs, inputs.new_sets), _taught(ctx, inputs, inputs.old_sets)),
    )
    groups, required = sum(pools.sizes), groups_per_batch(train)
    if groups < required:  # the message counts samples, as the settings do
        raise DataError(
            f"the training data has only {groups} groups of up to {pools.slots} products, but a batch of"
            f" {train.global_batch_size} samples requires {required}",
            expected="enough rows for at least one full batch",
            next_command=f"--train.global-batch-size {max(1, groups) * pools.slots}, or add data",
        )
    return pools


def _taught(ctx: StageContext, inputs: RunInputs, sets: Sequence[TokenSet]) -> TaughtRows | None:
    """Open what the teacher computed for the rows of the given partitions, if there is a teacher."""
    if inputs.taught is None or not sets:
        return None
    sizes = [(each.info.fingerprint, each.info.rows_by_bucket("train")) for each in sets]
    return inputs.taught.open_rows(sizes, ctx.scratch / "teach")


def _valid_rows(train: TrainConfig, ctx: StageContext, inputs: RunInputs) -> TokenRows:
    """Open the validation rows. Raises DataError if there are none or if the best metric is undefined for them."""
    rows = holdout_rows(ctx, inputs, "valid")
    if not sum(rows.sizes):
        raise DataError(
            "no prepared partition has a row in the validation split",
            expected="validation rows, which are used to select the best checkpoint",
            next_command="raise data.valid_fraction, or name rows valid in the split column, if there is one."
            " Then run trnpipe prepare again",
        )
    has_gains = train.best_metric not in _NEEDS_GAINS or any(
        (block["gain"] > 0).any() for block in rows.read_blocks(("gain",))
    )
    if not has_gains:
        raise metric_undefined_error(train)
    return rows


def _unseen_rows(ctx: StageContext, inputs: RunInputs, valid: TokenRows, process_group: ProcessGroup) -> TokenRows:
    """Select the validation rows with an item that is not trained on, or all rows if they have too few queries."""
    items = TrainedItems(valid.read_blocks(FIELDS), valid.pad_id)
    trained = open_rows(ctx.workspace, inputs.sets, "train", ctx.scratch / "tokens")
    mark_trained(items, [trained], process_group, ctx.stop, sum(trained.sizes))
    is_unseen = items.parts > 0
    queries = len(np.unique(items.rows["query_id"][is_unseen]))
    unseen = f"{is_unseen.sum():,} of {len(is_unseen):,} validation rows ({queries:,} queries)"
    unseen += " with a query or a product that is not trained on"
    if queries < _MIN_QUERIES:
        ctx.console.warn(f"only {unseen}, so the best step is selected on all rows (train.metric_rows)")
        return valid
    ctx.console.info(f"train: the best step is selected on the {unseen}")
    return valid.select([np.flatnonzero(part) for part in np.split(is_unseen, np.cumsum(valid.sizes)[:-1])])


def holdout_rows(ctx: StageContext, inputs: RunInputs, split: Split) -> TokenRows:
    """Open the rows of a split in the new partitions, or in all partitions if the new ones have no rows for it."""
    cache = ctx.scratch / "tokens"
    new = open_rows(ctx.workspace, inputs.new_sets, split, cache)
    return new if sum(new.sizes) else open_rows(ctx.workspace, inputs.sets, split, cache)


def metric_undefined_error(train: TrainConfig) -> DataError:
    """Return the error to raise if the metric that selects the best checkpoint is undefined."""
    alternative = "--train.metric accuracy, or " if train.loss.trains_head else ""
    return DataError(
        f"{train.best_metric} is undefined on the validation split, because none of the scored queries has a gain"
        " above 0",
        expected="graded rows in the validation split",
        next_command=f"{alternative}set data.columns.gain and run trnpipe prepare again, with a different --cycle NAME"
        " if this cycle already has checkpoints",
    )


def _load_start(saver: Saver, ctx: StageContext, inputs: RunInputs) -> Position:
    """Load the starting weights and return the position to continue from.

    The newest checkpoint of this cycle takes precedence over the parent. If there is neither, the initial weights stay
    as they are. Every checkpoint also records which published weights the model was originally initialised from.
    """
    newest, folder = saver.newest(), saver.base.model.init_from
    published = newest.state.published if newest else None
    if published is None and inputs.parent is not None:
        published = inputs.parent.state.published
    elif published is None and folder is not None and ctx.world.is_main:
        # Hashing a large file takes seconds, so only rank 0 does it, which is the rank that saves.
        uri, sha256 = digest_of_initial(folder, ctx.scratch)
        published = PublishedWeights(uri=uri, sha256=sha256)
    saver.base = saver.base.model_copy(update={"published": published})
    if newest is None:
        if inputs.parent is not None:
            saver.base = saver.base.model_copy(update={"earlier_steps": saver.start_from(inputs.parent)})
        return Position()
    check_identity(newest.state.identity_parts, inputs.identity, where=newest.prefix)
    saver.base = saver.base.model_copy(update={"earlier_steps": newest.state.earlier_steps})
    saver.restore(newest)
    ctx.console.info(f"train: resuming from {newest.uri}")
    ctx.events.emit(EventName.TRAIN_RESUMED, step=newest.state.step, prefix=newest.prefix)
    return Position(newest.state.step, int(saver.program.guard.state.cpu()[SKIPPED]), newest.state.best)
