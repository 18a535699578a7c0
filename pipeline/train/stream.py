"""The micro-batches of one run, made ahead in a thread and matched with what the host knows of each, and their pace."""

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
from pipeline.train.optimizer import control_values, schedule_of


class BatchStream:
    """Micro-batches from position `start` (0-based) to `max_steps`. Iterated once, by the device loader's thread."""

    def __init__(
        self, source: GroupSource, plan: BatchPlan, share: RankSlice, config: TrainConfig, start: int, max_steps: int
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
