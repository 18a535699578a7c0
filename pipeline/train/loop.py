"""The training loop, which trains a model, selects the best step, and scores its checkpoint as the candidate.

The loop maintains these invariants: it never waits for a value from the device within a step, it queues a checkpoint
only after the metrics of all its steps are on disk, it accounts for every batch, and all ranks agree on the stop signal
at a step boundary, so that they all stop at the same step.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from pipeline.backends import Batch
from pipeline.checkpoint.store import Best, prefix_of
from pipeline.core.errors import CheckpointError, NumericError, Preempted, TransientError
from pipeline.core.shuffle import stream_key
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import Split
from pipeline.data.training_groups import MAX_LINKED
from pipeline.evaluate.gate.judge import count_queries, precision_warning
from pipeline.evaluate.score import HoldoutFigures, evaluate_holdout
from pipeline.parallel.process_group import ProcessGroup
from pipeline.telemetry.console import Console, StepFigures, TensorBoardSink
from pipeline.telemetry.events import EventName
from pipeline.train.build import Run, holdout_rows, metric_undefined_error
from pipeline.train.config import Cadence, choose_cadence
from pipeline.train.inputs import data_warnings
from pipeline.train.optimizer import learning_rate_at
from pipeline.train.step import TrainProgram
from pipeline.train.stream import BatchStream, Pace, add_digests

_DROPOUT = 4  # identifies this random stream. Must differ from those in core/batch_order and data/training_groups


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run: the candidate checkpoint and its metrics by split."""

    prefix: str
    step: int
    steps_done: int
    late: bool
    holdouts: dict[str, HoldoutFigures]
    has_scores: bool
    """Whether the relevance head was trained. If not, its scores are meaningless."""
    groups_new: int
    groups_replayed: int
    """Number of groups from older partitions. A group is a query with its products."""


def train(run: Run) -> Outcome:
    """Train until the run ends, then score the candidate.

    If the stop signal is set, a checkpoint is saved before Preempted is raised.
    """
    ctx, config = run.ctx, run.config
    save_every, log_every = config.checkpoint.every_steps, config.log.every_steps
    cadence = choose_cadence(config.train, save_every, log_every, steps=run.max_steps, rows=sum(run.metric_rows.sizes))
    _announce(run, cadence)
    best = BestStep(run, cadence)
    with ExitStack() as stack:
        sink = None
        if config.log.tensorboard and ctx.world.is_main:
            local = ctx.workspace.local_path(f"cycles/{ctx.cycle}/tensorboard")
            sink = stack.enter_context(closing(TensorBoardSink(local or ctx.scratch / "tensorboard")))
        loop = TrainLoop(
            program=run.program,
            stream=BatchStream(
                run.pools,
                run.plan,
                run.share,
                config.train,
                run.start.step,
                run.max_steps,
                run.saver.base.earlier_steps,
            ),
            process_group=run.process_group,
            stop=ctx.stop,
            console=ctx.console,
            cadence=cadence,
            evaluate=best.evaluate,
            save=best.save,
            emit=ctx.events.emit,
            scalars=sink.scalars if sink else None,
            skipped=run.start.skipped,
        )
        ended = loop.run()
        if ended == "stopped":
            run.saver.wait_saved(loop.step)
            ctx.stop.set("another rank")  # has no effect if this rank already recorded a reason
            ctx.stop.raise_if_set(f"training (step {loop.step} of {run.max_steps} is saved)")
        return _finish(run, best, loop.step, late=ended == "late")


def _announce(run: Run, cadence: Cadence) -> None:
    ctx, train, inputs, pools = run.ctx, run.config.train, run.inputs, run.pools
    parameters = run.program.strategy.size
    parent, published = inputs.parent, run.saver.base.published
    start = parent.prefix if parent else published.text if published else "scratch"
    if parent and published:
        start += f" (originally {published.text})"
    mined = f" and {train.mined_per_query} mined negatives" if train.mined_per_query else ""
    links = pools.new.links
    linked = f" | {links.linked:,} of {links.queries:,} queries linked to an equivalent query" if links else ""
    ctx.console.info(
        f"train: {parameters / 1e6:.1f}M parameters on {ctx.world.world_size} x {run.backend.name} | from {start} | "
        f"{sum(pools.new.sizes):,} new and {sum(pools.num_replayed):,} replayed groups of up to {pools.slots} "
        f"samples{mined}{linked} | "
        f"{run.plan.batches_per_epoch:,} batches of {train.global_batch_size} per epoch, "
        f"{run.share.accumulation} micro-steps per step | steps {run.start.step:,} to {run.max_steps:,}, evaluated "
        f"every {cadence.evaluate or run.max_steps:,} and saved every {cadence.save:,}"
    )
    infos = [token_set.info for token_set in inputs.new_sets]
    imprecise = precision_warning("valid", count_queries(infos))
    slow = run.backend.precision_warning("train.precision", train.precision)
    is_eager = run.backend.can_compile and not (run.backend.compiles_layers or run.backend.compiles_steps)
    uncompiled = "there is no C compiler, so layers are not compiled, which is slower: install gcc" if is_eager else ""
    unused = ""
    if train.parallel.shard == "state" and run.process_group.layout.shard_size == 1:
        unused = "train.parallel.shard has no effect, because shard_degree is 1: set train.parallel.shard_degree 0"
    for message in (*data_warnings(pools.new, train, infos), *filter(None, (imprecise, slow, uncompiled, unused))):
        ctx.console.warn(message)
    if links and links.unlinked:
        ctx.console.warn(
            f"{links.unlinked:,} of {links.queries:,} queries are not linked, because their clusters have more than"
            f" {MAX_LINKED} queries and are too large for all of them to be equivalent"
        )
    if late := ", ".join(partition.name for partition in inputs.selection.late):
        ctx.console.warn(f"partitions at or before the parent's watermark have changed and are only replayed: {late}")
    ctx.events.emit(
        EventName.TRAIN_STARTED,
        step=run.start.step,
        max_steps=run.max_steps,
        parameters=parameters,
        world_size=ctx.world.world_size,
        backend=run.backend.name,
        precision=train.precision,
        parent=parent.prefix if parent else None,
        new_partitions=[p.name for p in inputs.selection.new],
        old_partitions=[p.name for p in inputs.selection.old],
        batches_by_row_tokens=dict(zip(map(str, pools.new.lengths), run.plan.batches_by_bucket, strict=True)),
    )


class BestStep:
    """Keeps track of the step with the best validation score, which is also recorded in every checkpoint."""

    def __init__(self, run: Run, cadence: Cadence) -> None:
        self.run, self.cadence, self.best = run, cadence, run.start.best
        self.latest = Best(step=-1, metric=run.config.train.best_metric, value=math.nan)
        self.fitted = 1.0
        """The temperature that was fitted by the latest evaluation."""

    def evaluate(self, step: int) -> tuple[bool, bool]:
        """Score the validation split. Return whether this is the best step so far and whether training should stop."""
        run, train, started = self.run, self.run.config.train, time.monotonic()
        metric = train.best_metric
        searching = metric in ("retrieval_ndcg", "combined")
        figures = _score(run, run.metric_rows, self.cadence.rows, searching=searching)
        value: float | None = getattr(figures, metric)
        if not math.isfinite(figures.loss):  # the metric may be finite, because NaN has a rank and a most likely class
            raise NumericError(
                f"the model's scores on the validation split are not finite at step {step}",
                expected="a finite loss and finite embeddings",
                next_command="lower train.optimizer.learning_rate and start a new cycle (--cycle NAME)",
            )
        if value is None or math.isnan(value):  # no later value would ever beat NaN, and JSON cannot represent it
            raise metric_undefined_error(train)
        self.latest = Best(step=step, metric=metric, value=value)
        self.fitted = figures.temperature if train.loss.trains_head else 1.0
        is_best = self.best is None or value > self.best.value
        if is_best:
            self.best = self.latest
        run.emit_evaluation(step, "valid", figures, started, best=is_best, **{metric: value})
        run.ctx.console.info(
            f"valid at step {step}: {metric} {value:.4f}, loss {figures.loss:.4f}{' (best)' if is_best else ''}"
        )
        # Stop if there was no improvement for too long. This depends only on the state in the checkpoint, so that a
        # resumed run makes the same decision.
        wait = self.cadence.wait
        return is_best, bool(wait) and self.best is not None and step - self.best.step >= wait

    def save(self, step: int) -> None:
        """Queue a checkpoint for saving. Unless its step was evaluated, it has no temperature."""
        self.run.saver.save(step, self.best, self.fitted if self.latest.step == step else 1.0)


def _finish(run: Run, best: BestStep, step: int, *, late: bool) -> Outcome:
    """Evaluate and save the last step, then load the best step and score it on all rows of each split."""
    try:
        if best.latest.step != step:  # if an evaluation has ended training, it was that of the last step
            best.evaluate(step)
    finally:  # save the last steps even if the evaluation is stopped or fails
        best.save(step)
        run.saver.wait_saved(step)
    run.process_group.barrier()
    chosen, temperature = _load_best(run, best)
    prefix = prefix_of(run.ctx.cycle, chosen.step)
    holdouts: dict[str, HoldoutFigures] = {}
    splits: tuple[Split, ...] = ("valid", "test")
    for split in splits:
        rows = run.valid if split == "valid" else holdout_rows(run.ctx, run.inputs, "test")
        if sum(rows.sizes):
            started = time.monotonic()
            holdouts[split] = figures = _score(run, rows, sum(rows.sizes), temperature=temperature)
            run.emit_evaluation(chosen.step, split, figures, started, accuracy=figures.accuracy)
    return Outcome(
        prefix,
        chosen.step,
        step,
        late,
        holdouts,
        has_scores=run.config.train.loss.trains_head,
        groups_new=sum(run.pools.new.sizes),
        groups_replayed=sum(run.pools.num_replayed),
    )


def _score(
    run: Run, rows: TokenRows, limit: int, *, searching: bool = False, temperature: float = 1.0
) -> HoldoutFigures:
    return evaluate_holdout(
        run.program.outputs,
        run.backend,
        rows,
        label_gains=run.inputs.spec.label_gains,
        batch_size=min(run.config.train.micro_batch_size, run.config.train.global_batch_size),
        limit=limit,
        process_group=run.process_group,
        stop=run.ctx.stop,
        search_pad_id=rows.pad_id if searching else None,
        temperature=temperature,
    )


def _load_best(run: Run, steps: BestStep) -> tuple[Best, float]:
    """Load the best weights onto the device and return their evaluation and temperature.

    Falls back to the weights of the last step if the best checkpoint was not saved or cannot be read.
    """
    best, last = steps.best, (steps.latest, steps.fitted)
    if best is None or best.step == steps.latest.step:
        return last
    checkpoint, reason = None, ""
    try:
        checkpoint = run.saver.store.open(best.step)
    except CheckpointError as error:
        reason = error.seen
    if run.process_group.agree_now(checkpoint is None) or checkpoint is None:
        run.ctx.console.warn(f"the best checkpoint cannot be used, so the last one is the candidate: {reason}")
        run.ctx.events.emit(EventName.CHECKPOINT_REJECTED, step=best.step, reason=reason)
        return last
    run.saver.restore(checkpoint)
    return best, checkpoint.state.temperature


Ended = Literal["complete", "stopped", "late", "converged"]


@dataclass
class TrainLoop:
    """Runs the steps of a training run or a trial run, with logging, evaluation and saving between them."""

    program: TrainProgram
    stream: BatchStream
    process_group: ProcessGroup
    stop: StopSignal
    console: Console
    cadence: Cadence
    evaluate: Callable[[int], tuple[bool, bool]]
    """Scores the validation split after the given step."""
    save: Callable[[int], None]
    emit: Callable[..., None]
    scalars: Callable[[int, dict[str, float]], None] | None = None
    values_are_real: bool = True
    """False in a trial run, where metrics must not be checked because graph extraction on Neuron computes no values."""
    skipped: int = 0
    """Number of steps that the guard has skipped so far."""

    def __post_init__(self) -> None:
        self.config, self.backend = self.program.config, self.program.backend
        self.step, self.max_steps = self.stream.start, self.stream.max_steps
        self._digests: list[int] = []
        self._pace = Pace(self.config.global_batch_size, self.process_group.layout.data_size)
        self._ends_at = math.inf
        if (deadline := self.config.deadline) is not None:
            remaining = deadline.replace(tzinfo=deadline.tzinfo or UTC) - datetime.now(UTC)
            self._ends_at = time.monotonic() + remaining.total_seconds()
        self._warned_of_deadline = False
        self._compiles, self._compile_s = 0, 0.0
        self._on_host: Counter[str] = Counter()
        """Number of calls per operator that fell back to the host, as of the last check."""
        self._ignored_operators = {"aten::_local_scalar_dense"}  # reading the metrics every few steps is expected

    def run(self) -> Ended:
        """Train until `max_steps`, the stop signal, the deadline or convergence, and return which one ended training.

        On a stop signal, a checkpoint is queued before returning. In all other cases, the caller evaluates and saves
        the last step.
        """
        # The previous attempt may have been stopped before it completed the evaluation of this step.
        if self.step > 0 and self._midway(self.cadence.evaluate):
            is_best, converged = self.evaluate(self.step)
            if is_best:
                self.save(self.step)
            if converged:
                return "converged"
        self._forget_host_operators()
        with self.backend.loader(self.stream) as batches:
            while self.step < self.max_steps:
                self._train_step(batches)
                stopping = self.process_group.agree(self.stop.is_set())
                evaluating = self._midway(self.cadence.evaluate)
                saving = stopping or self._midway(self.cadence.save)
                late = False
                if evaluating or saving or self._due(self.cadence.log) or self.step == self.max_steps:
                    late = self._report()
                converged = False
                if evaluating and not stopping:
                    (is_best, converged), stopping = self._evaluate()
                    saving = saving or is_best or stopping
                if saving and (stopping or not late):  # the caller saves the last step, after evaluating it
                    self.save(self.step)
                if evaluating or saving:
                    self._forget_host_operators()  # ignore operators that ran during evaluation or saving
                    self._pace.resume()
                if stopping:
                    return "stopped"
                if late:
                    return "late"
                if converged:
                    return "converged"
        return "complete"

    def _train_step(self, batches: Iterator[Batch]) -> None:
        """Fetch the micro-batches and take one step.

        There is no host sync, unless the backend reduces gradients on the host.
        """
        tokens, digest, waited_s, micros = 0, 0, 0.0, []
        for _ in range(self.stream.accumulation):
            requested_at = time.monotonic()
            batch = next(batches, None)
            if batch is None:
                raise RuntimeError(f"the loader ended at step {self.step} of {self.max_steps}")
            micro_tokens, micro_digest, ready_at = self.stream.received(self.step)
            # Do not time the call to next(), because on XLA it also waits for the device.
            waited_s += max(0.0, ready_at - requested_at)
            tokens, digest = tokens + micro_tokens, add_digests([digest, micro_digest])
            micros.append(batch)
        seeds: list[int] = []
        if self.program.has_dropout:  # seeded per step and micro-step, so that a resumed run drops the same elements
            purpose = (self.config.seed, _DROPOUT, self.step, self.process_group.layout.data_rank)
            seeds = [stream_key(*purpose, micro) % 2**31 for micro in range(self.stream.accumulation)]
        self.program.step(micros, seeds=seeds)
        self._digests.append(digest)
        self._pace.step_done(tokens, waited_s)
        self.step += 1

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _midway(self, every: int) -> bool:
        return self._due(every) and self.step < self.max_steps

    def _evaluate(self) -> tuple[tuple[bool, bool], bool]:
        """Evaluate, and return the outcome and whether the evaluation was interrupted by a stop.

        The exception is handled here, so that the caller can still save the steps since the last checkpoint.
        """
        try:
            return self.evaluate(self.step), False
        except (Preempted, TransientError):  # a TransientError if another rank noticed the stop first and exited
            if not self.stop.is_set():
                raise
            return (False, False), True

    def _report(self) -> bool:
        """Read, log and check the metrics since the last report. Return True if the run must end at its deadline."""
        count = len(self._digests)
        figures = self.program.read_metrics(count)
        interval = self._pace.read(self._note_compiles())
        rank_digests = self.process_group.gather(self._digests)[:: self.process_group.layout.tensor_size]
        digests = [add_digests(list(step_digests)) for step_digests in zip(*rank_digests, strict=True)]
        self._digests = []
        if not self.values_are_real:
            return False
        # Each batch carries its step number, so that lost or reordered batches are detected here.
        steps, expected = (
            [int(row["step"]) - self.stream.earlier_steps for row in figures],
            list(range(self.step - len(figures) + 1, self.step + 1)),
        )
        if steps != expected:
            raise RuntimeError(f"expected the device to receive the batches of steps {expected}, but got {steps}")
        last = figures[-1]
        losses = [row["loss"] for row in figures]
        rate = learning_rate_at(self.config.optimizer, self.step, self.max_steps)
        pace_s = self._pace.seconds_per_step
        eta_s = None if pace_s is None else (self.max_steps - self.step) * pace_s
        self.emit(
            EventName.TRAIN_STEPS,
            step=self.step,
            losses=losses,
            grad_norms=[row["grad_norm"] for row in figures],
            samples=[f"{digest:016x}" for digest in digests],
            seconds=round(interval.seconds, 3),
            learning_rate=rate,
            samples_per_s=round(interval.samples_per_s, 1),
            tokens_per_s=round(interval.tokens_per_s, 1),
            data_wait_share=round(interval.data_wait_share, 4),
            memory_bytes=self.backend.memory_bytes(),
            eta_s=None if eta_s is None else round(eta_s, 1),
        )
        self.console.step_line(
            StepFigures(
                step=self.step,
                max_steps=self.max_steps,
                loss=sum(losses) / count,
                grad_norm=last["grad_norm"],
                learning_rate=rate,
                samples_per_s=interval.samples_per_s,
                tokens_per_s=interval.tokens_per_s,
                data_wait_share=interval.data_wait_share,
                eta_s=eta_s,
            )
        )
        if self.scalars:
            values = {"train/loss": losses[-1], "train/grad_norm": last["grad_norm"], "train/rate": rate}
            self.scalars(self.step, values)
        self._note_host_operators(count)
        self._judge(figures)
        return self._is_late(eta_s or 0.0)

    def _is_late(self, needed_s: float) -> bool:
        """Log a warning once if the deadline will be missed. Return True if it has passed and the run must end."""
        if self.config.deadline is None:
            return False
        remaining_s = self._ends_at - time.monotonic()
        if remaining_s < needed_s and not self._warned_of_deadline:
            self._warned_of_deadline = True
            self.console.warn(f"at this pace, the deadline will be missed by about {needed_s - remaining_s:.0f} s")
            self.emit(EventName.DEADLINE_AT_RISK, step=self.step, eta_s=needed_s, spare_s=remaining_s - needed_s)
        return self.config.on_deadline == "finish" and self.process_group.agree_now(remaining_s <= 0)

    def _note_compiles(self) -> float:
        """Emit an event if graphs were compiled since the last call, and return how many seconds that took."""
        compiles = self.backend.compile_count()
        if compiles == self._compiles:
            return 0.0
        previous_s, self._compile_s = self._compile_s, self.backend.compile_seconds()
        new, self._compiles = compiles - self._compiles, compiles
        seconds = self._compile_s - previous_s
        fields = {"step": self.step, "new": new, "total": compiles, "compile_s": round(seconds, 3)}
        self.emit(EventName.GRAPH_COMPILED, **fields)
        return seconds

    def _forget_host_operators(self) -> None:
        self.backend.reset_host_operators()
        self._on_host = Counter(self.backend.host_operators())

    def _note_host_operators(self, steps: int) -> None:
        """Log a warning about each operator that newly fell back to the host.

        Such an operator splits the graph, and its tensors are copied to the host and back in every step.
        """
        counts = Counter(self.backend.host_operators())
        for name in sorted((counts - self._on_host).keys() - self._ignored_operators):
            self._ignored_operators.add(name)
            times = counts[name] - self._on_host[name]
            self.console.warn(
                f"{self.backend.device_name()} does not support {name}, so it ran on the host {times} times in the last"
                f" {steps} steps. Use a different operator or move the work to data preparation."
            )
        self._forget_host_operators()

    def _judge(self, figures: Sequence[Mapping[str, float]]) -> None:
        """Log skipped steps. Raises NumericError if too many were skipped in a row or if a bad step was taken.

        The guard decides on the device, and not every device evaluates a comparison with NaN to false, so its decision
        is verified here. This happens before the next checkpoint, so that a bad step is never saved.
        """
        for row in figures:
            if row["skipped_in_a_row"] == 0 and not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                raise NumericError(
                    f"step {int(row['step']) - self.stream.earlier_steps} had loss {row['loss']} and gradient norm"
                    f" {row['grad_norm']},"
                    f" and the guard on {self.backend.device_name()} did not skip it",
                    expected="finite values, or a step that is skipped by the guard",
                    next_command="trnpipe health on this machine (the last checkpoint is not affected)",
                )
        last = figures[-1]
        skipped, in_a_row = int(last["skipped"]), int(last["skipped_in_a_row"])
        if skipped > self.skipped:
            self.console.warn(f"skipped {skipped - self.skipped} steps (NaN or gradient spike), {skipped} in total")
            self.emit(EventName.STEP_SKIPPED, step=self.step, new=skipped - self.skipped, total=skipped)
        self.skipped = skipped
        if in_a_row >= self.config.guard.patience:
            raise NumericError(
                f"{in_a_row} consecutive steps were skipped because of a non-finite loss or a gradient spike",
                expected=f"fewer than train.guard.patience = {self.config.guard.patience}",
                next_command="inspect the data of these steps (the last checkpoint is not affected), or lower"
                " train.optimizer.learning_rate and start a new cycle (--cycle NAME)",
            )
