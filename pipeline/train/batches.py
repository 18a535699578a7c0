"""The stream of micro-batches of one run: made ahead in a thread, matched with what the host knows of each."""

import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from pipeline.backends import Batch
from pipeline.core.batching import BatchPlan, RankShare
from pipeline.core.lr import learning_rate
from pipeline.data.loader import GroupSource, sample_digest, training_batches
from pipeline.train.config import TrainConfig
from pipeline.train.optimizer import control_values


def schedule_of(config: TrainConfig, step: int, max_steps: int) -> float:
    """Learning rate of optimizer step `step` (1-based)."""
    optimizer = config.optimizer
    return learning_rate(
        step,
        max_steps=max_steps,
        peak=optimizer.learning_rate,
        shape=optimizer.schedule,
        warmup_steps=round(optimizer.warmup_fraction * max_steps),
        final_fraction=optimizer.final_fraction,
    )


class BatchStream:
    """Micro-batches from position `start` (0-based) to `max_steps`. Iterated once, by the device loader's thread."""

    def __init__(
        self, source: GroupSource, plan: BatchPlan, share: RankShare, config: TrainConfig, start: int, max_steps: int
    ) -> None:
        self._source, self._plan, self._share, self._config = source, plan, share, config
        self._start, self._max_steps = start, max_steps
        self._notes: deque[tuple[int, int, int, float]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        stream = training_batches(self._source, self._plan, self._share, self._start, self._max_steps)
        for micro in stream:
            step = micro.position + 1
            control = control_values(step, schedule_of(self._config, step, self._max_steps), self._config.optimizer)
            tokens = int(torch.count_nonzero(micro.tensors["segments"]))
            self._notes.append((micro.position, tokens, sample_digest(micro.sample_ids), time.monotonic()))
            yield {**micro.tensors, "control": control}

    def took(self, position: int) -> tuple[int, int, float]:
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
