"""Prefetch the micro-batches of a run, keep track of their token counts and digests, and measure the throughput."""

import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from pipeline.backends import Batch
from pipeline.core.batch_order import BatchPlan, RankSlice
from pipeline.data.loader import GroupSource, sample_digest, training_batches
from pipeline.train.config import TrainConfig
from pipeline.train.optimizer import control_values, learning_rate_at


class BatchStream:
    """The micro-batches of steps `start` (0-based) to `max_steps`.

    The optimizer continues from the moments of `earlier_steps` steps of other runs.

    The device loader iterates over them in its thread, while the training loop calls `received` for each one.
    """

    def __init__(
        self,
        source: GroupSource,
        plan: BatchPlan,
        share: RankSlice,
        config: TrainConfig,
        start: int,
        max_steps: int,
        earlier_steps: int = 0,
    ) -> None:
        self.earlier_steps = earlier_steps
        self.accumulation, self.start, self.max_steps = share.accumulation, start, max_steps
        self._source, self._plan, self._share, self._optimizer = source, plan, share, config.optimizer
        self._pending: deque[tuple[int, int, int, float]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        stream = training_batches(self._source, self._plan, self._share, self.start, self.max_steps)
        for micro in stream:
            step = micro.position + 1
            rate = learning_rate_at(self._optimizer, step, self.max_steps)
            tokens = int(torch.count_nonzero(micro.tensors["segments"]))
            self._pending.append((micro.position, tokens, sample_digest(micro.sample_ids), time.monotonic()))
            yield {**micro.tensors, "control": control_values(self.earlier_steps + step, rate, self._optimizer)}

    def received(self, position: int) -> tuple[int, int, float]:
        """Return the number of non-padding tokens, the sample digest and the host time of the next batch.

        This must be called exactly once per received batch. Raises RuntimeError if more batches are received than were
        produced, or if the next batch belongs to a different step. Note that batches are only counted here. To detect
        reordered batches, the loop compares the step number in their control values.
        """
        if not self._pending:
            raise RuntimeError(f"received more batches than were produced, at position {position}")
        batch_position, tokens, digest, ready_at = self._pending.popleft()
        if batch_position != position:
            raise RuntimeError(f"expected the batch at position {position}, but got the one at {batch_position}")
        return tokens, digest, ready_at


def add_digests(digests: list[int]) -> int:
    """Return the digest of the union of several sets of samples."""
    with np.errstate(over="ignore"):
        return int(np.array(digests, dtype=np.uint64).sum(dtype=np.uint64))


# Throughput and time spent waiting for data, per logging interval.


class Interval(NamedTuple):
    seconds: float
    samples_per_s: float
    tokens_per_s: float
    data_wait_share: float


class Pace:
    """Measures the throughput between calls of `read`, excluding the time spent on evaluation and saving."""

    def __init__(self, samples_per_step: int, data_size: int) -> None:
        """Start the first interval. `data_size` is the number of data-parallel ranks."""
        self._samples = samples_per_step
        self._data_size = data_size
        self.seconds_per_step: float | None = None
        """Moving average, excluding compile time. None in the first interval, because it includes one-time setup."""
        self._is_first = True
        self._started = time.monotonic()
        self._steps, self._tokens, self._wait_s = 0, 0, 0.0

    def step_done(self, tokens: int, waited_s: float) -> None:
        """Record an optimizer step with its number of non-padding tokens and the time spent waiting for data."""
        self._steps += 1
        self._tokens += tokens
        self._wait_s += waited_s

    def read(self, compile_s: float = 0.0) -> Interval:
        """Return the current interval and start the next one.

        Call this right after a device sync. `compile_s` is excluded from `seconds_per_step`.
        """
        seconds = max(1e-9, time.monotonic() - self._started)
        interval = Interval(
            seconds,
            self._steps * self._samples / seconds,
            self._tokens * self._data_size / seconds,
            self._wait_s / seconds,
        )
        if self._steps and not self._is_first:
            newest = max(1e-9, seconds - compile_s) / self._steps
            average = self.seconds_per_step
            self.seconds_per_step = newest if average is None else 0.7 * average + 0.3 * newest
        self._is_first = self._is_first and not self._steps
        self.resume()
        return interval

    def resume(self) -> None:
        self._started = time.monotonic()
        self._steps, self._tokens, self._wait_s = 0, 0, 0.0
