"""The training loop, in run order.

Rules it keeps: no value is read back from the device inside a step; a checkpoint is handed over only after the figures
of all its steps are on disk; every batch is counted; the stop signal is agreed on by all ranks at a step boundary.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from pipeline.backends import Batch
from pipeline.core.batch_order import BatchPlan, RankShare
from pipeline.core.errors import NumericError, Preempted, TransientError
from pipeline.core.shuffle import stream_key
from pipeline.core.stop import StopSignal
from pipeline.data.loader import GroupSource, sample_digest, training_batches
from pipeline.parallel.gang import Gang
from pipeline.telemetry.console import Console, StepFigures
from pipeline.telemetry.events import EventName
from pipeline.train.config import OptimizerConfig, TrainConfig
from pipeline.train.optimizer import control_values
from pipeline.train.step import TrainProgram

# The stream of micro-batches of one run: made ahead in a thread, matched with what the host knows of each.


def schedule_of(config: OptimizerConfig, step: int, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (1-based): linear warm-up, then down to `final_fraction` of the peak."""
    peak, warmup_steps = config.learning_rate, round(config.warmup_fraction * max_steps)
    if step <= warmup_steps:
        return peak * step / max(1, warmup_steps)
    if config.schedule == "constant":
        return peak
    # The step before the end of the decay, so that the last step still learns.
    progress = min(1.0, (step - 1 - warmup_steps) / max(1, max_steps - warmup_steps))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1.0 - progress
    return peak * (config.final_fraction + (1.0 - config.final_fraction) * remaining)


class BatchStream:
    """Micro-batches from position `start` (0-based) to `max_steps`. Iterated once, by the device loader's thread."""

    def __init__(
        self, source: GroupSource, plan: BatchPlan, share: RankShare, config: TrainConfig, start: int, max_steps: int
    ) -> None:
        self.accumulation, self.start, self.max_steps = share.accumulation, start, max_steps
        self._source, self._plan, self._share, self._optimizer = source, plan, share, config.optimizer
        self._notes: deque[tuple[int, int, int, float]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        stream = training_batches(self._source, self._plan, self._share, self.start, self.max_steps)
        for micro in stream:
            step = micro.position + 1
            rate = schedule_of(self._optimizer, step, self.max_steps)
            tokens = int(torch.count_nonzero(micro.tensors["segments"]))
            self._notes.append((micro.position, tokens, sample_digest(micro.sample_ids), time.monotonic()))
            yield {**micro.tensors, "control": control_values(step, rate, self._optimizer)}

    def received(self, position: int) -> tuple[int, int, float]:
        """Call once for every batch received: (real tokens, digest of its samples, when it was ready on the host).

        Raises RuntimeError when more batches arrive than were made, or another step is due. This counts batches and
        cannot see which one arrived: the loop checks that by the step number in each batch's control values.
        """
        if not self._notes:
            raise RuntimeError(f"received a batch at position {position} that was never made: one came twice")
        noted, tokens, digest, ready_at = self._notes.popleft()
        if noted != position:
            raise RuntimeError(f"received a batch of position {noted} at position {position}")
        return tokens, digest, ready_at


def add_digests(digests: list[int]) -> int:
    """Digest of a union of sample sets."""
    with np.errstate(over="ignore"):
        return int(np.array(digests, dtype=np.uint64).sum(dtype=np.uint64))


# Where the time of an interval went, and how fast it was.


class Interval(NamedTuple):
    seconds: float
    samples_per_s: float
    tokens_per_s: float
    data_wait_share: float


class Pace:
    """Counts steps, tokens and waiting; `read` closes an interval. Evaluation and saving are paused out of it."""

    def __init__(self, samples_per_step: int, data_size: int) -> None:
        """`data_size`: ranks with rows of their own."""
        self._samples = samples_per_step
        self._data_size = data_size
        self.seconds_per_step: float | None = None
        """None in the first interval, which holds what a process does once. Without compiling."""
        self._is_first = True
        self._started = time.monotonic()
        self._steps, self._tokens, self._wait_s = 0, 0, 0.0

    def step_done(self, tokens: int, waited_s: float) -> None:
        """One optimizer step of this rank is traced or done; `tokens` without padding. `waited_s`: for its data."""
        self._steps += 1
        self._tokens += tokens
        self._wait_s += waited_s

    def read(self, compile_s: float = 0.0) -> Interval:
        """Call right after the device was waited for: the interval is real time. `compile_s`: of it, for graphs."""
        seconds = max(1e-9, time.monotonic() - self._started)
        interval = Interval(
            seconds,
            self._steps * self._samples / seconds,
            self._tokens * self._data_size / seconds,
            self._wait_s / seconds,
        )
        if self._steps and not self._is_first:
            newest = max(1e-9, seconds - compile_s) / self._steps
            before = self.seconds_per_step
            self.seconds_per_step = newest if before is None else 0.7 * before + 0.3 * newest
        self._is_first = self._is_first and not self._steps
        self.resume()
        return interval

    def resume(self) -> None:
        self._started = time.monotonic()
        self._steps, self._tokens, self._wait_s = 0, 0, 0.0


_DROPOUT = 4  # purpose of a stream of random numbers, apart from those of core/batch_order and data/training_groups
Ended = Literal["complete", "stopped", "late", "converged"]


class EvaluationOutcome(NamedTuple):
    """What the figures of one evaluation mean for the run."""

    is_best: bool
    is_enough: bool = False
    """Going on is not expected to help: training ends here."""


@dataclass(frozen=True)
class Hooks:
    """What the loop calls out to.

    `evaluate(step)` scores the holdout; `save(step)` hands a checkpoint to the
    background; `scalars(step, values)` is an optional sink.
    """

    evaluate: Callable[[int], EvaluationOutcome]
    save: Callable[[int], None]
    scalars: Callable[[int, dict[str, float]], None]
    emit: Callable[..., None]


@dataclass(frozen=True)
class Cadence:
    """Steps between things. `evaluate` 0: only at the end."""

    log: int
    evaluate: int
    save: int


class TrainLoop:
    def __init__(
        self,
        program: TrainProgram,
        stream: BatchStream,
        gang: Gang,
        stop: StopSignal,
        console: Console,
        cadence: Cadence,
        hooks: Hooks,
        *,
        deadline_s: float | None = None,
        values_are_real: bool = True,
        skipped: int = 0,
    ) -> None:
        """`deadline_s`: seconds from now. `skipped`: steps that the guard skipped before the first one.

        `values_are_real`: false in a trial run; on Neuron the values of graph extraction mean nothing, so none is
        judged.
        """
        self.program, self.stream, self.gang = program, stream, gang
        self.stop, self.console, self.cadence, self.hooks = stop, console, cadence, hooks
        self.values_are_real, self.skipped = values_are_real, skipped
        self.config, self.backend = program.config, program.backend
        self.step, self.max_steps = stream.start, stream.max_steps
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self._digests: list[int] = []
        self._pace = Pace(self.config.global_batch_size, gang.layout.data_size)
        self._warned = False
        self._compiles, self._compile_s = 0, 0.0
        self._on_host: Counter[str] = Counter()
        """Operators that ran on the host, and how often, until the step after which they were looked at."""
        self._warned_of = {"aten::_local_scalar_dense"}  # a value is read every few steps

    def run(self) -> Ended:
        """Train until `max_steps`, the stop signal (a checkpoint is then handed over), the deadline, or convergence.

        Evaluating and saving the last step is left to the caller.
        """
        # The attempt before may have been stopped before or within this evaluation.
        if self.step > 0 and self._midway(self.cadence.evaluate) and self.hooks.evaluate(self.step).is_enough:
            return "converged"
        self._forget_host_operators()
        with self.backend.loader(self.stream) as batches:
            while self.step < self.max_steps:
                self._one_step(batches)
                stopping = self.gang.agree(self.stop.is_set())
                evaluating = self._midway(self.cadence.evaluate)
                saving = stopping or self._midway(self.cadence.save)
                late = False
                if evaluating or saving or self._due(self.cadence.log) or self.step == self.max_steps:
                    late = self._report()
                enough = False
                if evaluating and not stopping:
                    (is_best, enough), stopping = self._evaluate()
                    saving = saving or is_best or enough or stopping
                if saving and (stopping or not late):  # the last step's is saved once, with what its evaluation said
                    self.hooks.save(self.step)
                if evaluating or saving:
                    self._forget_host_operators()  # those were of no step
                    self._pace.resume()
                if stopping:
                    return "stopped"
                if late:
                    return "late"
                if enough:
                    return "converged"
        return "complete"

    def _one_step(self, batches: Iterator[Batch]) -> None:
        """Fetch the micro-batches and take the step. Nothing here waits for the device (except reductions on hosts)."""
        tokens, digest, waited_s, micros = 0, 0, 0.0, []
        for _ in range(self.stream.accumulation):
            asked_at = time.monotonic()
            batch = next(batches, None)
            if batch is None:
                raise RuntimeError(f"the loader ended at step {self.step} of {self.max_steps}")
            micro_tokens, micro_digest, ready_at = self.stream.received(self.step)
            # Not the clock around next(): on XLA that waits for the device.
            waited_s += max(0.0, ready_at - asked_at)
            tokens, digest = tokens + micro_tokens, add_digests([digest, micro_digest])
            micros.append(batch)
        seeds: list[int] = []
        if self.program.has_dropout:  # by step and micro-step, so that a run that was stopped draws the same numbers
            purpose = (self.config.seed, _DROPOUT, self.step, self.gang.layout.data_rank)
            seeds = [stream_key(*purpose, micro) % 2**31 for micro in range(self.stream.accumulation)]
        self.program.step(micros, seeds=seeds)
        self._digests.append(digest)
        self._pace.step_done(tokens, waited_s)
        self.step += 1

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _midway(self, every: int) -> bool:
        return self._due(every) and self.step < self.max_steps

    def _evaluate(self) -> tuple[EvaluationOutcome, bool]:
        """(what it says, stopped meanwhile). A stop must not cost the steps since the last checkpoint."""
        try:
            return self.hooks.evaluate(self.step), False
        except (Preempted, TransientError):  # transient: a peer noticed the stop before us and left
            if not self.stop.is_set():
                raise
            return EvaluationOutcome(is_best=False), True

    def _report(self) -> bool:
        """Read the figures since the last report, tell everybody, judge. True when the deadline ends the run."""
        count = len(self._digests)
        figures = self.program.read_figures(count)
        interval = self._pace.read(self._compiling_s())
        noted = self.gang.gather(self._digests)[:: self.gang.layout.tensor_size]
        digests = [add_digests(list(parts)) for parts in zip(*noted, strict=True)]
        self._digests = []
        if not self.values_are_real:
            return False
        # The step numbers that came with the batches tell when one was lost or swapped on the way.
        seen, due = [int(row["step"]) for row in figures], list(range(self.step - len(figures) + 1, self.step + 1))
        if seen != due:
            raise RuntimeError(f"the device saw the batches of steps {seen} where {due} were due")
        last = figures[-1]
        losses = [row["loss"] for row in figures]
        rate = schedule_of(self.config.optimizer, self.step, self.max_steps)
        left_s = None if self._deadline is None else self._deadline - time.monotonic()
        pace_s = self._pace.seconds_per_step
        eta_s = None if pace_s is None else (self.max_steps - self.step) * pace_s
        self.hooks.emit(
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
        self.hooks.scalars(
            self.step,
            {
                "train/loss": losses[-1],
                "train/grad_norm": last["grad_norm"],
                "train/rate": rate,
            },
        )
        self._note_compiles()
        self._note_host_operators(count)
        self._judge(figures)
        needed_s = eta_s or 0.0
        if left_s is not None and left_s < needed_s and not self._warned:
            self._warned = True
            self.console.warn(f"the deadline will be missed by about {needed_s - left_s:.0f} s at this pace")
            self.hooks.emit(EventName.DEADLINE_AT_RISK, step=self.step, eta_s=needed_s, spare_s=left_s - needed_s)
        if left_s is None or self.config.on_deadline == "warn":
            return False
        return self.gang.agree_now(left_s <= 0)

    def _compiling_s(self) -> float:
        """Seconds of compiling that `_note_compiles` has not noted yet."""
        if self.backend.compile_count() == self._compiles:
            return 0.0
        return self.backend.compile_seconds() - self._compile_s

    def _note_compiles(self) -> None:
        compiles = self.backend.compile_count()
        if compiles != self._compiles:
            compile_s = self.backend.compile_seconds()
            self.hooks.emit(
                EventName.GRAPH_COMPILED,
                step=self.step,
                new=compiles - self._compiles,
                total=compiles,
                compile_s=round(compile_s - self._compile_s, 3),
            )
            self._compiles, self._compile_s = compiles, compile_s

    def _forget_host_operators(self) -> None:
        self.backend.forget_host_operators()
        self._on_host = Counter(self.backend.host_operators())

    def _note_host_operators(self, steps: int) -> None:
        """Warn of those that were not there before: each cuts the step, and its tensors go to the host and back."""
        found = Counter(self.backend.host_operators())
        for name in sorted((found - self._on_host).keys() - self._warned_of):
            self._warned_of.add(name)
            times = found[name] - self._on_host[name]
            self.console.warn(
                f"{name} is not an operator of {self.backend.device_name()}: it ran on the host {times} times in the"
                f" last {steps} steps; another one, or its work done in the data preparation, keeps the step there"
            )
        self._forget_host_operators()

    def _judge(self, figures: Sequence[Mapping[str, float]]) -> None:
        """Warn of skipped steps. Raises NumericError when the guard's patience is spent, or a bad step was taken.

        The guard compares on the device, where a comparison with NaN may not be false. Nothing was saved since.
        """
        for row in figures:
            if row["skipped_in_a_row"] == 0 and not (math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])):
                raise NumericError(
                    f"step {int(row['step'])} had loss {row['loss']} and gradient norm {row['grad_norm']},"
                    f" and the guard on {self.backend.device_name()} did not skip it",
                    expected="finite numbers, or a step that changes nothing",
                    next_command="trnpipe health on this machine; the last checkpoint is good",
                )
        last = figures[-1]
        skipped, in_a_row = int(last["skipped"]), int(last["skipped_in_a_row"])
        if skipped > self.skipped:
            self.console.warn(f"{skipped - self.skipped} steps skipped (NaN or a gradient spike), {skipped} in all")
            self.hooks.emit(EventName.STEP_SKIPPED, step=self.step, new=skipped - self.skipped, total=skipped)
        self.skipped = skipped
        if in_a_row >= self.config.guard.patience:
            raise NumericError(
                f"{in_a_row} steps in a row had a loss or gradient that is not finite or far off",
                expected=f"fewer than train.guard.patience = {self.config.guard.patience}",
                next_command="lower train.optimizer.learning_rate, with another --cycle NAME where this one has"
                " checkpoints, or look at the data of these steps; the last checkpoint is good",
            )
