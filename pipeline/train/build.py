"""Everything a training run is made of, in the order it is made: ranks and device, rows, model, program, checkpoints.

Read on in `run`, which trains it, then `loop`, `step` and `optimizer`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pipeline.backends import Backend
from pipeline.checkpoint.save import CheckpointWriter, Snapshot
from pipeline.checkpoint.store import Best, Checkpoint, CheckpointStore, PublishedWeights, TrainState
from pipeline.compile.plan import graph_plan, open_guard
from pipeline.compile.watch import GraphWatch
from pipeline.context import StageContext
from pipeline.core.batch_order import BatchPlan, Bucket, RankShare
from pipeline.core.errors import DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import Split, open_rows
from pipeline.data.tokenizer import has_vocabulary
from pipeline.data.training_groups import MinedProducts, TrainingPools
from pipeline.health.device import diagnose_device_error
from pipeline.mine.store import open_negatives
from pipeline.model.hf_config import hf_config
from pipeline.model.hf_weights import digest_of_initial, from_hf, initial_model, to_hf
from pipeline.parallel.gang import Gang, open_ranks
from pipeline.parallel.mesh import check_plan, check_same
from pipeline.registry.records import in_use
from pipeline.settings import Settings
from pipeline.telemetry.events import EventName
from pipeline.train.config import TrainConfig, batch_share, groups_of_batch, rows_of_batch, run_layout
from pipeline.train.inputs import RunInputs, check_identity
from pipeline.train.optimizer import SKIPPED
from pipeline.train.step import TrainProgram, open_program

_OF_GAINS = frozenset({"ndcg", "retrieval_ndcg", "combined"})
"""Metrics that a holdout has only where a row has a gain above 0."""
_FITTED_ROWS = 200_000
"""Training rows whose features are read to scale them."""


@dataclass
class Saver:
    """Saves and restores one run. Rank 0 writes; every rank reads for itself."""

    program: TrainProgram
    store: CheckpointStore
    writer: CheckpointWriter
    gang: Gang
    base: TrainState
    """State at step 0; only step and best change afterwards."""
    template: Mapping[str, Tensor]
    """Names and shapes of the model's tensors (on the meta device)."""
    tokenizer: bytes
    warn: Callable[[str], None]
    _warned: str = field(init=False, default="")

    def newest(self) -> Checkpoint | None:
        """The newest valid checkpoint of this cycle, the same on every rank."""
        step, checkpoint = -1, None
        if self.gang.world.is_main:
            checkpoint, rejected = self.store.newest_valid()
            for reason in rejected:
                self.warn(f"checkpoint passed over: {reason}")
            step = -1 if checkpoint is None else checkpoint.state.step
        chosen = int(self.gang.gather(step)[0])
        return checkpoint if self.gang.world.is_main else None if chosen < 0 else self.store.open(chosen)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this run: weights, moments, guard."""
        weights = from_hf(checkpoint.weights(), self.template, source=checkpoint.prefix)
        self.program.restore(weights, checkpoint.optimizer())

    def start_from(self, parent: Checkpoint) -> None:
        """Take over a parent's weights. The optimizer starts anew."""
        self.program.restore(from_hf(parent.weights(), self.template, source=parent.prefix), None)

    def save(self, step: int, best: Best | None) -> None:
        """Copy to the host and hand over, with the `best` evaluation so far. Warns of a failed earlier save, once."""
        if self.writer.failure and self.writer.failure != self._warned:
            self._warned = self.writer.failure
            self.warn(f"a checkpoint could not be saved, training goes on: {self._warned}")
        weights, optimizer = self.program.snapshot()
        if not self.gang.world.is_main:
            return
        state = self.base.model_copy(update={"step": step, "best": best})
        config = hf_config(state.model, state.inputs)
        self.writer.submit(Snapshot(state, to_hf(weights), optimizer, config, self.tokenizer))

    def wait_saved(self, step: int) -> None:
        """Until the checkpoint of `step` is safe. Raises TransientError when it could not be saved."""
        self.writer.wait()
        if self.gang.world.is_main and self.writer.last_saved != step:
            raise TransientError(
                f"the checkpoint of step {step} could not be saved: {self.writer.failure}",
                expected="a workspace with room that can be written",
                next_command="make room, then run the same command; it continues from the last good checkpoint",
            )


@dataclass(frozen=True)
class Position:
    """Where a run continues from; the default: its beginning."""

    step: int = 0
    skipped: int = 0
    """Steps that the guard skipped until then."""
    best: Best | None = None
    """The best evaluation until then."""


@dataclass(frozen=True)
class Run:
    """One run of one rank, ready to train: the weights of `start` are on the device."""

    settings: Settings
    ctx: StageContext
    inputs: RunInputs
    share: RankShare
    gang: Gang
    backend: Backend
    pools: TrainingPools
    plan: BatchPlan
    max_steps: int
    valid: TokenRows
    program: TrainProgram
    saver: Saver
    start: Position


@contextmanager
def open_run(settings: Settings, ctx: StageContext, inputs: RunInputs, tokenizer: bytes) -> Iterator[Run]:
    """Make a run, or continue the one of this cycle at its newest checkpoint; on leaving, the ranks part.

    `tokenizer`: content of its tokenizer.json, saved beside the weights. Raises TrnpipeError.
    """
    train, world = settings.train, ctx.world
    share, layout = batch_share(train, world.world_size, world.rank), run_layout(train, world.world_size, world.rank)
    with (
        open_ranks(settings.backend, world, timeout_s=train.collective_timeout_s, layout=layout) as (gang, backend),
        _device_errors(settings, ctx, backend),
    ):
        check_same(train.parallel.model_dump_json(), "plan")
        check_plan(train.parallel, backend)
        pools = _training_pools(train, ctx, inputs)
        _check_one_batch(sum(pools.sizes), pools.slots, train)
        plan = BatchPlan(pools.sizes, groups_of_batch(train), train.seed, train.queries_per_topic)
        max_steps = train.max_steps or max(1, round(train.epochs * plan.batches_per_epoch))
        valid = holdout_rows(ctx, inputs, "valid")
        if not sum(valid.sizes):
            raise DataError(
                "no prepared partition has a row in the valid split",
                expected="a holdout that names the best checkpoint",
                next_command="raise data.valid_fraction, or give a split column, then trnpipe prepare again",
            )
        if train.best_metric in _OF_GAINS and not _has_gains(valid):
            raise without_gains(train)

        folder = settings.model.init_from
        same_vocabulary = folder is not None and has_vocabulary(folder, tokenizer)
        model = initial_model(settings.model, inputs.spec, train.seed, ctx.scratch, same_vocabulary=same_vocabulary)
        if inputs.parent is None:
            model.interactions.features.fit(torch.from_numpy(pools.new.numeric_sample(_FITTED_ROWS)))
        watch: GraphWatch = GraphWatch()
        if backend.is_lazy or backend.compiles_steps:  # graphs are held against the manifest of this way of running
            graphs = graph_plan(settings, inputs.spec, valid.buckets, share, backend.device_name())
            watch = open_guard(ctx.workspace, graphs, backend, settings.compile, ctx.console)
        program = open_program(
            model,
            backend,
            train,
            share,
            gang,
            figure_rows=settings.log.every_steps,
            buckets=valid.buckets,
            watch=watch,
        )
        store = CheckpointStore(
            ctx.workspace_after_stop, ctx.cycle, cache_dir=ctx.scratch / "checkpoints", emit=ctx.events.emit
        )
        writer = CheckpointWriter(
            store,
            settings.checkpoint,
            ctx.scratch / "saving",
            before_commit=lambda: ctx.events.flush(durable=True),  # on another machine there is no journal
            in_use=lambda: in_use(ctx.workspace_after_stop),
        )
        saver = Saver(
            program,
            store,
            writer,
            gang,
            _state_at_start(settings, ctx, inputs, max_steps),
            program.strategy.template,
            tokenizer,
            ctx.console.warn,
        )
        start = _load_start(saver, ctx, inputs)
        yield Run(
            settings, ctx, inputs, share, gang, backend, pools, plan, max_steps, valid, program, saver, start=start
        )


@contextmanager
def _device_errors(settings: Settings, ctx: StageContext, backend: Backend) -> Iterator[None]:
    """An error of the device is raised as what the health checks make of it, while the device is still open."""
    try:
        yield
    except RuntimeError as error:
        num_nodes = ctx.world.world_size // ctx.world.local_world_size
        better = diagnose_device_error(error, backend, settings.health, num_nodes=num_nodes, stop=ctx.stop)
        if better is error:
            raise
        raise better from error


def _training_pools(train: TrainConfig, ctx: StageContext, inputs: RunInputs) -> TrainingPools:
    """Training rows: new partitions, and a replay share of old ones. Raises DataError when nothing is new."""
    if not inputs.new_sets:
        raise DataError(
            f"{inputs.parent.prefix if inputs.parent else 'no parent'} was trained on all prepared data",
            expected=f"a partition after {inputs.watermark or 'those it knows'}",
            next_command="prepare newer data (data.path), or --train.start scratch",
        )
    cache, workspace = ctx.scratch / "tokens", ctx.workspace
    new = open_rows(workspace, inputs.new_sets, "train", cache)
    old = open_rows(workspace, inputs.old_sets, "train", cache) if inputs.old_sets else None
    buckets = [Bucket.parse(name) for name in inputs.sets[0].info.buckets]
    mined = None
    if inputs.negatives is not None:
        rows = open_rows(workspace, inputs.sets, "train", cache)
        found = open_negatives(workspace, inputs.negatives, rows.sizes, ctx.scratch / "negatives")
        mined = MinedProducts(rows, rows.pad_id, found.query_id, found.product, train.mined_per_query, train.seed)
    return TrainingPools.build(
        new,
        old,
        train.replay_share,
        train.seed,
        slots=train.candidates_per_query,
        lengths=rows_of_batch(train, buckets),
        positive_gain=train.loss.positive_gain,
        mined=mined,
        topic=train.queries_per_topic,
        link_queries=train.link_queries and train.loss.contrastive_weight > 0,
    )


def _check_one_batch(num_groups: int, slots: int, train: TrainConfig) -> None:
    """Raise DataError, in samples as the settings count them, for data that does not fill one batch."""
    wanted = groups_of_batch(train)
    if num_groups < wanted:
        raise DataError(
            f"{num_groups} groups of up to {slots} products; a batch of {train.global_batch_size} samples has {wanted}",
            expected="at least one full batch",
            next_command=f"--train.global-batch-size {max(1, num_groups) * slots}, or give more data",
        )


def holdout_rows(ctx: StageContext, inputs: RunInputs, split: Split) -> TokenRows:
    """A holdout split: of the new partitions, or of all of them when the new ones are too small to hold any."""
    cache = ctx.scratch / "tokens"
    new = open_rows(ctx.workspace, inputs.new_sets, split, cache)
    return new if sum(new.sizes) else open_rows(ctx.workspace, inputs.sets, split, cache)


def _has_gains(rows: TokenRows) -> bool:
    return any(
        (rows.read(np.full(len(numbers), bucket), numbers, bucket, ("gain",))["gain"] > 0).any()
        for bucket, numbers in rows.blocks()
    )


def without_gains(train: TrainConfig) -> DataError:
    """Return the error for a holdout on which the metric of the best checkpoint is undefined."""
    other = "--train.metric accuracy, or " if train.loss.trains_head else ""
    return DataError(
        f"the holdout has no {train.best_metric}: no query in it, or among the {train.evaluate_rows:,} rows that are"
        " scored, has a gain above 0",
        expected="graded rows in the valid split",
        next_command=f"{other}give data.columns.gain and trnpipe prepare again; with another --cycle NAME where this"
        " one has checkpoints",
    )


def _state_at_start(settings: Settings, ctx: StageContext, inputs: RunInputs, max_steps: int) -> TrainState:
    """What every checkpoint of the run says of it, at step 0."""
    return TrainState(
        cycle=ctx.cycle,
        step=0,
        max_steps=max_steps,
        identity=fingerprint(dict(inputs.identity)),
        identity_parts=dict(inputs.identity),
        model=settings.model,
        inputs=inputs.spec,
        tokenizer_fingerprint=inputs.sets[0].info.tokenizer_fingerprint,
        watermark=inputs.watermark,
        partitions=inputs.partitions,
        also_seen=inputs.also_seen,
        parent=inputs.parent_record,
        best=None,
        max_tokens=inputs.max_tokens,
        trained_head=settings.train.loss.trains_head,
        settings_hash=ctx.settings_hash,
        code_version=ctx.code_version,
    )


def _load_start(saver: Saver, ctx: StageContext, inputs: RunInputs) -> Position:
    """Put the starting weights on the device: of this cycle's newest checkpoint, else the parent's, else as made."""
    newest = saver.newest()
    if newest is not None:
        check_identity(newest.state.identity_parts, inputs.identity, where=newest.prefix)
        saver.restore(newest)
        ctx.console.info(f"train: continuing from {newest.uri}")
        ctx.events.emit(EventName.TRAIN_RESUMED, step=newest.state.step, prefix=newest.prefix)
        skipped = int(saver.program.guard.state.cpu()[SKIPPED])
        _name_start(saver, ctx, inputs, newest.state.published)
        return Position(newest.state.step, skipped, newest.state.best)
    if inputs.parent is not None:
        saver.start_from(inputs.parent)
    _name_start(saver, ctx, inputs, None)
    return Position()


def _name_start(saver: Saver, ctx: StageContext, inputs: RunInputs, known: PublishedWeights | None) -> None:
    """Put into every checkpoint which published weights the model goes back to. `known`: by an earlier checkpoint."""
    folder = saver.base.model.init_from
    if known is None and inputs.parent is not None:
        known = inputs.parent.state.published
    elif known is None and folder is not None and ctx.world.is_main:  # who saves; to read a large file takes seconds
        uri, sha256 = digest_of_initial(folder, ctx.scratch)
        known = PublishedWeights(uri=uri, sha256=sha256)
    saver.base = saver.base.model_copy(update={"published": known})
