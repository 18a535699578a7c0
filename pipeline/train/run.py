"""One training run: assemble, resume, train, choose the candidate, score it."""

import time
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import torch

from pipeline.checkpoint.config import CheckpointConfig
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.checkpoint.state import Best, TrainState
from pipeline.checkpoint.store import CheckpointStore, prefix_of
from pipeline.compile.config import CompileConfig
from pipeline.compile.plan import GraphSettings, graph_plan, open_guard
from pipeline.compile.watch import GraphWatch, NoWatch
from pipeline.core.batching import BatchPlan
from pipeline.core.buckets import Bucket
from pipeline.core.errors import CheckpointError, DataError, Preempted, TransientError
from pipeline.core.events import EventName
from pipeline.core.fingerprint import fingerprint
from pipeline.core.stop import StopSignal
from pipeline.data.sampler import MinedProducts, TrainingPools
from pipeline.data.shards import TokenRows
from pipeline.data.tokens import Split, open_rows
from pipeline.embed.config import EmbedConfig
from pipeline.evaluate.holdout import HoldoutFigures, evaluate_holdout
from pipeline.health.after_error import informed
from pipeline.health.config import HealthConfig
from pipeline.io.storage import Storage
from pipeline.mine.negatives import open_negatives
from pipeline.model.config import ModelConfig
from pipeline.model.hf import initial_model
from pipeline.model.temperature import start_values
from pipeline.parallel.gang import open_ranks
from pipeline.parallel.world import World
from pipeline.registry.history import in_use
from pipeline.telemetry.console import Console
from pipeline.telemetry.tensorboard import TensorBoardSink
from pipeline.train.batches import BatchStream
from pipeline.train.config import TrainConfig
from pipeline.train.guard import SKIPPED
from pipeline.train.identity import check_identity
from pipeline.train.inputs import RunInputs, warnings_of
from pipeline.train.loop import Cadence, Hooks, Standing, TrainLoop
from pipeline.train.saver import Saver
from pipeline.train.share import batch_share, groups_of_batch, rows_of_batch
from pipeline.train.step import TrainProgram

_FITTED_ROWS = 200_000
"""Training rows whose features are read to scale them."""


class Events(Protocol):
    """The event log of the cycle."""

    def emit(self, event: EventName, /, **fields: object) -> None: ...
    def flush(self, durable: bool = False) -> None: ...


@dataclass(frozen=True)
class Surroundings:
    """Where a run happens: everything that is not a setting."""

    workspace: Storage
    workspace_after_stop: Storage
    """The same place for what must still be written once the stop signal is set."""
    cycle: str
    scratch: Path
    events: Events
    console: Console
    stop: StopSignal
    world: World
    settings_hash: str
    code_version: str


@dataclass(frozen=True)
class RunConfig:
    """The settings a run reads."""

    train: TrainConfig
    model: ModelConfig
    checkpoint: CheckpointConfig
    backend: str
    log_every: int
    tensorboard: bool = False
    compile: CompileConfig = field(default_factory=CompileConfig)
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    health: HealthConfig = field(default_factory=HealthConfig)


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves: the candidate checkpoint and its figures by split."""

    prefix: str
    step: int
    steps_done: int
    late: bool
    holdouts: dict[str, HoldoutFigures]


class Rungs(Protocol):
    """What a run is asked when it is one trial of many: only figures on the valid split come of it."""

    def is_due(self, step: int) -> bool:
        """Whether the holdout is scored at a step at which it could be."""

    def is_hopeless(self, step: int, value: float) -> bool:
        """Told of every figure, at the last step too; True ends the run."""


class TrainRun:
    """Carries one run of one rank from its start to its end."""

    def __init__(
        self,
        config: RunConfig,
        around: Surroundings,
        inputs: RunInputs,
        tokenizer: bytes,
        rungs: Rungs | None = None,
    ) -> None:
        self.config, self.around, self.inputs = config, around, inputs
        self._tokenizer, self._rungs = tokenizer, rungs

    def run(self) -> Outcome:
        """Train to the end and score the candidate. Raises Preempted, after saving, when told to stop."""
        train, world = self.config.train, self.around.world
        self.share = batch_share(train, world)
        with open_ranks(self.config.backend, world, timeout_s=train.collective_timeout_s) as (self.gang, self.backend):
            try:
                return self._run()
            except RuntimeError as error:
                config, nodes = self.config.health, world.world_size // world.local_world_size
                better = informed(error, self.backend, config, num_nodes=nodes, stop=self.around.stop)
                if better is error:
                    raise
                raise better from error

    def _run(self) -> Outcome:
        around = self.around
        pools = self._pools()
        plan = BatchPlan(pools.sizes, groups_of_batch(self.config.train), self.config.train.seed)
        self.max_steps = self.config.train.max_steps or max(1, round(self.config.train.epochs * plan.batches_per_epoch))
        self._assemble(pools)
        start, skipped = self._resume()
        self._announce(pools, plan, start)
        with closing(self._sink()) as sink:
            loop = TrainLoop(
                program=self.program,
                backend=self.backend,
                stream=BatchStream(pools, plan, self.share, self.config.train, start, self.max_steps),
                gang=self.gang,
                stop=around.stop,
                console=around.console,
                config=self.config.train,
                cadence=Cadence(
                    self.config.log_every, self.config.train.evaluate_every, self.config.checkpoint.every_steps
                ),
                hooks=Hooks(self._evaluate, self.saver.save, sink.scalars, around.events.emit),
                start_step=start,
                max_steps=self.max_steps,
                accumulation=self.share.accumulation,
                deadline_s=_seconds_to(self.config.train.deadline),
                skipped=skipped,
            )
            ended = loop.run()
            if ended == "stopped":
                self.saver.wait_saved(loop.step)
                around.stop.set("another rank")  # keeps the reason of our own signal, if there was one
                around.stop.raise_if_set(f"training; step {loop.step} of {self.max_steps} is saved")
            if self._rungs is not None:
                return self._finish_trial(loop.step, is_over=ended == "converged")
            return self._finish(loop.step, late=ended == "late")

    def _rows(self, split: Split) -> TokenRows:
        """A holdout split: of the new partitions, or of all of them when the new ones are too small to hold any."""
        cache = self.around.scratch / "tokens"
        new = open_rows(self.around.workspace, self.inputs.new_sets, split, cache)
        return new if sum(new.sizes) else open_rows(self.around.workspace, self.inputs.sets, split, cache)

    def _pools(self) -> TrainingPools:
        """Training rows: new partitions, and a replay share of old ones. Raises DataError when nothing is new."""
        if not self.inputs.new_sets:
            raise DataError(
                f"{self.inputs.parent.prefix if self.inputs.parent else 'no parent'} was trained on all prepared data",
                expected=f"a partition after {self.inputs.watermark or 'those it knows'}",
                next_command="prepare newer data (data.path), or --train.start scratch",
            )
        cache, workspace = self.around.scratch / "tokens", self.around.workspace
        new = open_rows(workspace, self.inputs.new_sets, "train", cache)
        old = open_rows(workspace, self.inputs.old_sets, "train", cache) if self.inputs.old_sets else None
        train = self.config.train
        return TrainingPools.build(
            new,
            old,
            train.replay_share,
            train.seed,
            slots=train.candidates_per_query,
            lengths=self._lengths(),
            positive_gain=train.loss.positive_gain,
            mined=self._mined(),
        )

    def _lengths(self) -> tuple[int, ...]:
        info = self.inputs.sets[0].info
        return rows_of_batch(self.config.train, [Bucket.parse(name) for name in info.buckets])

    def _mined(self) -> MinedProducts | None:
        """What fills the slots for mined negatives, where there are such slots. Raises DataError."""
        workspace, inputs, train = self.around.workspace, self.inputs, self.config.train
        if inputs.negatives is None:
            return None
        rows = open_rows(workspace, inputs.sets, "train", self.around.scratch / "tokens")
        mined = open_negatives(workspace, inputs.negatives, rows.sizes, self.around.scratch / "negatives")
        return MinedProducts(rows, rows.pad_id, mined.query_id, mined.product, train.mined_per_query, train.seed)

    def _assemble(self, pools: TrainingPools) -> None:
        """Model, program, and the two ends of checkpointing."""
        config, around, inputs = self.config, self.around, self.inputs
        self.valid = self._rows("valid")
        if not sum(self.valid.sizes):
            raise DataError(
                "no prepared partition has a row in the valid split",
                expected="a holdout that names the best checkpoint",
                next_command="raise data.valid_fraction, or give a split column, then trnpipe prepare again",
            )
        model = initial_model(config.model, inputs.spec, config.train.seed, around.scratch)
        if inputs.parent is None:
            model.interactions.features.fit(torch.from_numpy(pools.new.numeric_sample(_FITTED_ROWS)))
        self.program = TrainProgram(
            model,
            self.backend,
            config.train,
            accumulation=self.share.accumulation,
            world_size=self.share.world_size,
            host_mean=self.gang.mean,
            host_gather=self.gang.gather_rows,
            figure_rows=config.log_every,
            buckets=self.valid.buckets,
            watch=self._watch(),
        )
        template = model.state_dict()  # without content: the program has taken the model over
        store = CheckpointStore(
            around.workspace_after_stop, around.cycle, cache_dir=around.scratch / "checkpoints", emit=around.events.emit
        )
        base = TrainState(
            cycle=around.cycle,
            step=0,
            max_steps=self.max_steps,
            identity=fingerprint(dict(inputs.identity)),
            identity_parts=dict(inputs.identity),
            model=config.model,
            inputs=inputs.spec,
            tokenizer_fingerprint=inputs.sets[0].info.tokenizer_fingerprint,
            watermark=inputs.watermark,
            partitions=inputs.partitions,
            parent=inputs.parent_record,
            best=None,
            max_tokens=inputs.max_tokens,
            trained_head=config.train.loss.trains_head,
            settings_hash=around.settings_hash,
            code_version=around.code_version,
        )
        writer = CheckpointWriter(
            store,
            config.checkpoint,
            around.scratch / "saving",
            before_commit=lambda: around.events.flush(durable=True),  # on another machine there is no journal
            in_use=lambda: in_use(around.workspace_after_stop),
        )
        self.saver = Saver(
            self.program,
            store,
            writer,
            self.gang,
            base,
            template,
            self._tokenizer,
            around.console.warn,
            start_values(config.train.loss),
        )

    def _watch(self) -> GraphWatch:
        """What holds graphs against the manifest of this way of running."""
        if not self.backend.is_lazy:
            return NoWatch()
        config, device = self.config, self.backend.device_name()
        plan = graph_plan(
            GraphSettings(config.train, config.model, config.embed, config.compile, config.log_every),
            self.inputs.spec,
            self.valid.buckets,
            self.share,
            device,
        )
        return open_guard(self.around.workspace, plan, self.backend, self.config.compile, self.around.console)

    def _resume(self) -> tuple[int, int]:
        """Put the starting weights on the device. Returns (step to continue from, steps skipped before it)."""
        newest = self.saver.newest()
        if newest is not None:
            check_identity(newest.state.identity_parts, self.inputs.identity, where=newest.prefix)
            self.saver.restore(newest)
            self.around.console.info(f"train: continuing from {newest.uri}")
            self.around.events.emit(EventName.TRAIN_RESUMED, step=newest.state.step, prefix=newest.prefix)
            return newest.state.step, int(self.program.guard.state.cpu()[SKIPPED])
        if self.inputs.parent is not None:
            self.saver.start_from(self.inputs.parent)
        return 0, 0

    def _announce(self, pools: TrainingPools, plan: BatchPlan, start: int) -> None:
        world, train, selection = self.around.world, self.config.train, self.inputs.selection
        parameters = self.program.layout.size
        parent = self.inputs.parent.prefix if self.inputs.parent else "scratch"
        mined = f" and {train.mined_per_query} mined negatives" if train.mined_per_query else ""
        self.around.console.info(
            f"train: {parameters / 1e6:.1f}M parameters on {world.world_size} x {self.backend.name} | from {parent} | "
            f"{sum(pools.new.sizes):,} new and {sum(pools.kept):,} replayed groups of up to {pools.slots} samples"
            f"{mined} | "
            f"{plan.batches_per_epoch:,} batches of {train.global_batch_size} an epoch, "
            f"{self.share.accumulation} micro-steps a step | steps {start:,} to {self.max_steps:,}"
        )
        for message in warnings_of(pools.new, train, self.inputs.spec.labels, self.valid.buckets):
            self.around.console.warn(message)
        if selection.late:
            names = ", ".join(p.name for p in selection.late)
            self.around.console.warn(
                f"partitions at or before the parent's watermark have changed: {names}; replayed only"
            )
        self.around.events.emit(
            EventName.TRAIN_STARTED,
            step=start,
            max_steps=self.max_steps,
            parameters=parameters,
            world_size=world.world_size,
            backend=self.backend.name,
            precision=train.precision,
            parent=parent,
            new_partitions=[p.name for p in selection.new],
            old_partitions=[p.name for p in selection.old],
            batches_by_row_tokens=dict(zip(map(str, pools.new.lengths), plan.batches_by_bucket, strict=True)),
        )

    def _sink(self) -> "_NoSink | TensorBoardSink":
        if not (self.config.tensorboard and self.around.world.is_main):
            return _NoSink()
        local = self.around.workspace.local_path(f"cycles/{self.around.cycle}/tensorboard")
        return TensorBoardSink(local or self.around.scratch / "tensorboard")

    def _score(self, rows: TokenRows, limit: int, *, searching: bool = False) -> HoldoutFigures:
        return evaluate_holdout(
            self.program.outputs,
            self.backend,
            rows,
            label_gains=self.inputs.spec.label_gains,
            batch_size=min(self.config.train.micro_batch_size, self.config.train.global_batch_size),
            limit=limit,
            gang=self.gang,
            stop=self.around.stop,
            search_pad_id=rows.pad_id if searching else None,
        )

    def _evaluate(self, step: int) -> Standing:
        """Score the holdout: is it the best so far, and is there hope for a better one?"""
        if self._rungs is not None and not self._rungs.is_due(step):
            return Standing(is_best=False)
        started = time.monotonic()
        metric = self.config.train.metric
        searching = metric in ("retrieval_ndcg", "combined")
        figures = self._score(self.valid, self.config.train.evaluate_rows, searching=searching)
        value: float | None = getattr(figures, metric)
        if value is None or value != value:  # NaN would be the best for ever, and state.json cannot hold it
            raise DataError(
                f"the holdout has no {metric}: no query in it has a gain above 0",
                expected="graded rows in the valid split",
                next_command="--train.metric accuracy, or give data.columns.gain",
            )
        best = self.saver.best
        is_best = best is None or value > best.value
        if is_best:
            self.saver.best = Best(step=step, metric=metric, value=value)
        self.around.events.emit(
            EventName.HOLDOUT_EVALUATED,
            step=step,
            split="valid",
            best=is_best,
            **{metric: value},
            loss=figures.loss,
            rows=figures.rows,
            seconds=round(time.monotonic() - started, 3),
        )
        self.around.console.info(
            f"valid at step {step}: {metric} {value:.4f}, loss {figures.loss:.4f}{' (best)' if is_best else ''}"
        )
        is_hopeless = self._rungs is not None and self._rungs.is_hopeless(step, value)
        return Standing(is_best, is_hopeless or self._is_enough(step))

    def _is_enough(self, step: int) -> bool:
        """No new best for `train.patience` evaluations: a function of what checkpoints hold, so a resume agrees."""
        train, best = self.config.train, self.saver.best
        waited = train.patience * train.evaluate_every
        return bool(waited) and best is not None and step - best.step >= waited

    def _finish(self, step: int, *, late: bool) -> Outcome:
        """Evaluate and save the last step, take the best, score it on everything."""
        try:
            self._evaluate(step)
        finally:  # a stop or a fault within the evaluation must not cost the last steps
            self.saver.save(step)
            self.saver.wait_saved(step)
        self.gang.barrier()
        chosen = self._load_best(step)
        holdouts = {}
        for split in ("valid", "test"):
            rows = self.valid if split == "valid" else self._rows("test")
            if sum(rows.sizes):
                started = time.monotonic()
                holdouts[split] = figures = self._score(rows, sum(rows.sizes))
                self.around.events.emit(
                    EventName.HOLDOUT_EVALUATED,
                    step=chosen,
                    split=split,
                    accuracy=figures.accuracy,
                    loss=figures.loss,
                    rows=figures.rows,
                    seconds=round(time.monotonic() - started, 3),
                )
        return Outcome(prefix_of(self.around.cycle, chosen), chosen, step, late, holdouts)

    def _finish_trial(self, step: int, *, is_over: bool) -> Outcome:
        """Of a trial nothing is kept but its figures, and the test split is not looked at."""
        try:
            if not is_over:
                self._evaluate(step)
        except (Preempted, TransientError):  # must not cost the steps since the last checkpoint
            self.saver.save(step)
            raise
        finally:
            self.saver.writer.wait()
        return Outcome("", step, step, False, {})

    def _load_best(self, last: int) -> int:
        """Put the best weights on the device; the last ones stay when the best could not be saved or read."""
        best = self.saver.best
        if best is None or best.step == last:
            return last
        checkpoint, reason = None, ""
        try:
            checkpoint = self.saver.store.open(best.step)
        except CheckpointError as error:
            reason = error.seen
        if self.gang.agree_now(checkpoint is None) or checkpoint is None:
            self.around.console.warn(f"the best checkpoint cannot be used, the last one is the candidate: {reason}")
            self.around.events.emit(EventName.CHECKPOINT_REJECTED, step=best.step, reason=reason)
            return last
        self.saver.restore(checkpoint)
        return best.step


class _NoSink:
    def scalars(self, step: int, values: dict[str, float]) -> None:
        return None

    def close(self) -> None:
        return None


def _seconds_to(deadline: datetime | None) -> float | None:
    if deadline is None:
        return None
    aware = deadline if deadline.tzinfo else deadline.replace(tzinfo=UTC)
    return (aware - datetime.now(UTC)).total_seconds()
