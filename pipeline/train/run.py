"""One training run from its start to its end: train, name the best step, score it as the candidate."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from pipeline.checkpoint.store import Best, prefix_of
from pipeline.core.errors import CheckpointError, NumericError, Preempted, TransientError
from pipeline.data.shards import TokenRows
from pipeline.data.training_groups import MOST_LINKED
from pipeline.evaluate.score import HoldoutFigures, evaluate_holdout
from pipeline.telemetry.console import TensorBoardSink
from pipeline.telemetry.events import EventName
from pipeline.train.build import Run, holdout_rows, without_gains
from pipeline.train.inputs import warnings_of
from pipeline.train.loop import BatchStream, Cadence, EvaluationOutcome, Hooks, TrainLoop


@dataclass(frozen=True)
class Outcome:
    """What a finished run leaves: the candidate checkpoint and its figures by split."""

    prefix: str
    step: int
    steps_done: int
    late: bool
    holdouts: dict[str, HoldoutFigures]
    groups_new: int = 0
    groups_replayed: int = 0
    """Of earlier partitions; a group is a query with its products."""


class PruningRule(NamedTuple):
    """When one trial of many is scored, and when it ends early. Of such a run come figures on the valid split alone."""

    is_due: Callable[[int], bool]
    """Whether the holdout is scored at a step at which it could be."""
    is_hopeless: Callable[[int, float], bool]
    """Told of every figure, at the last step too; True ends the run."""


def train(run: Run, pruning: PruningRule | None = None) -> Outcome:
    """Train to the end and score the candidate. Raises Preempted, after saving, when told to stop."""
    settings, ctx = run.settings, run.ctx
    _announce(run)
    best, deadline, deadline_s = BestStep(run, pruning), settings.train.deadline, None
    if deadline is not None:
        aware = deadline if deadline.tzinfo else deadline.replace(tzinfo=UTC)
        deadline_s = (aware - datetime.now(UTC)).total_seconds()
    with _scalars(run) as scalars:
        loop = TrainLoop(
            program=run.program,
            stream=BatchStream(run.pools, run.plan, run.share, settings.train, run.start.step, run.max_steps),
            gang=run.gang,
            stop=ctx.stop,
            console=ctx.console,
            cadence=Cadence(settings.log.every_steps, settings.train.evaluate_every, settings.checkpoint.every_steps),
            hooks=Hooks(best.evaluate, best.save, scalars, ctx.events.emit),
            deadline_s=deadline_s,
            skipped=run.start.skipped,
        )
        ended = loop.run()
        if ended == "stopped":
            run.saver.wait_saved(loop.step)
            ctx.stop.set("another rank")  # keeps the reason of our own signal, if there was one
            ctx.stop.raise_if_set(f"training; step {loop.step} of {run.max_steps} is saved")
        if pruning is None:
            return _finish(run, best, loop.step, late=ended == "late")
        # Of a trial nothing is kept but its figures, and the test split is not looked at.
        try:
            if ended != "converged":
                best.evaluate(loop.step)
        except (Preempted, TransientError):  # must not cost the steps since the last checkpoint
            best.save(loop.step)
            raise
        finally:
            run.saver.writer.wait()
        return Outcome("", loop.step, loop.step, False, {})


def _announce(run: Run) -> None:
    ctx, train, selection = run.ctx, run.settings.train, run.inputs.selection
    parameters = run.program.strategy.size
    parent, published = run.inputs.parent, run.saver.base.published
    start = parent.prefix if parent else published.text if published else "scratch"
    if parent and published:
        start += f", which goes back to {published.text}"
    mined = f" and {train.mined_per_query} mined negatives" if train.mined_per_query else ""
    links = run.pools.new.links
    linked = f" | {links.linked:,} of {links.queries:,} queries mean the same as another" if links else ""
    ctx.console.info(
        f"train: {parameters / 1e6:.1f}M parameters on {ctx.world.world_size} x {run.backend.name} | from {start} | "
        f"{sum(run.pools.new.sizes):,} new and {sum(run.pools.kept):,} replayed groups of up to {run.pools.slots} "
        f"samples{mined}{linked} | "
        f"{run.plan.batches_per_epoch:,} batches of {train.global_batch_size} an epoch, "
        f"{run.share.accumulation} micro-steps a step | steps {run.start.step:,} to {run.max_steps:,}"
    )
    for message in warnings_of(run.pools.new, train, [one.info for one in run.inputs.new_sets]):
        ctx.console.warn(message)
    if links and links.loose:
        ctx.console.warn(
            f"{links.loose:,} of {links.queries:,} queries are not linked: more than {MOST_LINKED} hang together by"
            " texts that are both products and queries, too many to mean the same"
        )
    if selection.late:
        names = ", ".join(p.name for p in selection.late)
        ctx.console.warn(f"partitions at or before the parent's watermark have changed: {names}; replayed only")
    ctx.events.emit(
        EventName.TRAIN_STARTED,
        step=run.start.step,
        max_steps=run.max_steps,
        parameters=parameters,
        world_size=ctx.world.world_size,
        backend=run.backend.name,
        precision=train.precision,
        parent=parent,
        new_partitions=[p.name for p in selection.new],
        old_partitions=[p.name for p in selection.old],
        batches_by_row_tokens=dict(zip(map(str, run.pools.new.lengths), run.plan.batches_by_bucket, strict=True)),
    )


class BestStep:
    """Which step is the best so far, by the valid split; every checkpoint is saved with its name."""

    def __init__(self, run: Run, pruning: PruningRule | None) -> None:
        self.run, self.pruning = run, pruning
        self.best = run.start.best

    def evaluate(self, step: int) -> EvaluationOutcome:
        """Score the valid split: is it the best so far, and is there hope for a better one?"""
        if self.pruning is not None and not self.pruning.is_due(step):
            return EvaluationOutcome(is_best=False)
        run, train, started = self.run, self.run.settings.train, time.monotonic()
        metric = train.best_metric
        searching = metric in ("retrieval_ndcg", "combined")
        figures = _score(run, run.valid, train.evaluate_rows, searching=searching)
        value: float | None = getattr(figures, metric)
        if value is None or value != value:  # NaN would be the best for ever, and state.json cannot hold it
            if math.isfinite(figures.loss):
                raise without_gains(train)
            raise NumericError(
                f"the model's scores of the valid split are not finite at step {step}",
                expected="a loss and vectors of finite numbers",
                next_command="lower train.optimizer.learning_rate, with another --cycle NAME where this one has"
                " checkpoints",
            )
        is_best = self.best is None or value > self.best.value
        if is_best:
            self.best = Best(step=step, metric=metric, value=value)
        run.ctx.events.emit(
            EventName.HOLDOUT_EVALUATED,
            step=step,
            split="valid",
            best=is_best,
            **{metric: value},
            loss=figures.loss,
            rows=figures.rows,
            seconds=round(time.monotonic() - started, 3),
        )
        run.ctx.console.info(
            f"valid at step {step}: {metric} {value:.4f}, loss {figures.loss:.4f}{' (best)' if is_best else ''}"
        )
        is_hopeless = self.pruning is not None and self.pruning.is_hopeless(step, value)
        # No new best for `train.patience` evaluations: a function of what checkpoints hold, so a resume agrees.
        waited = train.patience * train.evaluate_every
        is_enough = bool(waited) and self.best is not None and step - self.best.step >= waited
        return EvaluationOutcome(is_best, is_hopeless or is_enough)

    def save(self, step: int) -> None:
        self.run.saver.save(step, self.best)


def _finish(run: Run, best: BestStep, step: int, *, late: bool) -> Outcome:
    """Evaluate and save the last step, take the best, score it on everything."""
    try:
        best.evaluate(step)
    finally:  # a stop or a fault within the evaluation must not cost the last steps
        best.save(step)
        run.saver.wait_saved(step)
    run.gang.barrier()
    chosen = _load_best(run, best.best, step)
    holdouts = {}
    for split in ("valid", "test"):
        rows = run.valid if split == "valid" else holdout_rows(run.ctx, run.inputs, "test")
        if sum(rows.sizes):
            started = time.monotonic()
            holdouts[split] = figures = _score(run, rows, sum(rows.sizes))
            run.ctx.events.emit(
                EventName.HOLDOUT_EVALUATED,
                step=chosen,
                split=split,
                accuracy=figures.accuracy,
                loss=figures.loss,
                rows=figures.rows,
                seconds=round(time.monotonic() - started, 3),
            )
    return Outcome(
        prefix_of(run.ctx.cycle, chosen),
        chosen,
        step,
        late,
        holdouts,
        groups_new=sum(run.pools.new.sizes),
        groups_replayed=sum(run.pools.kept),
    )


def _score(run: Run, rows: TokenRows, limit: int, *, searching: bool = False) -> HoldoutFigures:
    train = run.settings.train
    return evaluate_holdout(
        run.program.outputs,
        run.backend,
        rows,
        label_gains=run.inputs.spec.label_gains,
        batch_size=min(train.micro_batch_size, train.global_batch_size),
        limit=limit,
        gang=run.gang,
        stop=run.ctx.stop,
        search_pad_id=rows.pad_id if searching else None,
    )


def _load_best(run: Run, best: Best | None, last: int) -> int:
    """Put the best weights on the device; the last ones stay when the best could not be saved or read."""
    if best is None or best.step == last:
        return last
    checkpoint, reason = None, ""
    try:
        checkpoint = run.saver.store.open(best.step)
    except CheckpointError as error:
        reason = error.seen
    if run.gang.agree_now(checkpoint is None) or checkpoint is None:
        run.ctx.console.warn(f"the best checkpoint cannot be used, the last one is the candidate: {reason}")
        run.ctx.events.emit(EventName.CHECKPOINT_REJECTED, step=best.step, reason=reason)
        return last
    run.saver.restore(checkpoint)
    return best.step


@contextmanager
def _scalars(run: Run) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Where figures go beside events and console: to TensorBoard, if anywhere."""
    if not (run.settings.log.tensorboard and run.ctx.world.is_main):
        yield lambda step, values: None
        return
    local = run.ctx.workspace.local_path(f"cycles/{run.ctx.cycle}/tensorboard")
    with closing(TensorBoardSink(local or run.ctx.scratch / "tensorboard")) as sink:
        yield sink.scalars
