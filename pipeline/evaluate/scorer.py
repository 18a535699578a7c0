"""Scores of one model on a holdout: static shapes, split over ranks, saved on the way."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeline.backends import Backend, Batch
from pipeline.core.stop import StopSignal
from pipeline.data.loader import to_tensors
from pipeline.data.shards import TokenRows
from pipeline.evaluate.order import HoldoutOrder, Span
from pipeline.evaluate.parts import Arrays, PartStore
from pipeline.parallel.gang import Gang

Score = Callable[[Mapping[str, Tensor]], Tensor]
"""A batch on the device to logits [B, K] on the device."""

KEPT = ("sample_id", "query_id", "label", "gain", "slice", "partition")
"""Arrays of the token shards that go into scores, where there are any; `query_tokens` [N] is counted beside."""
_SHORT_S, _LONG_S, _MOST_BATCHES = 1.0, 4.0, 256


@dataclass(frozen=True)
class Scorer:
    """Where and how rows are scored."""

    backend: Backend
    gang: Gang
    stop: StopSignal
    batch_size: int
    """Rows of one batch on one rank: that of training, so that the graphs are the same."""
    save_every_s: float
    clock: Callable[[], float] = time.monotonic

    def run(
        self,
        score: Score,
        rows: TokenRows,
        order: HoldoutOrder,
        parts: PartStore,
        advance: Callable[[int], None] = lambda count: None,
    ) -> Arrays:
        """Arrays of all rows, by ascending sample_id, on rank 0 (nothing on the others): KEPT, query_tokens, logits.

        Ranks meet after every few batches; the first one keeps what is done. Raises Preempted, with the rows so far
        committed, when any rank is told to stop.
        """
        is_main = self.gang.world.is_main
        start, held = parts.load() if is_main else (0, [])
        start = int(self.gang.gather(start)[0])
        advance(start)
        world_size = self.gang.world.world_size
        spans: deque[Span] = deque()

        def batches() -> Iterator[Batch]:
            for span in order.spans(start, self.batch_size * world_size):
                numbers, _ = span.share(self.gang.world.rank, self.batch_size)
                arrays = rows.read(np.full(self.batch_size, span.bucket, dtype=np.int64), numbers, span.bucket)
                spans.append(span)
                kept.append(_kept(arrays, rows.pad_id))
                yield to_tensors(arrays)

        kept: deque[Arrays] = deque()
        fresh: list[Arrays] = []
        place = saved = start
        size, since = 1, self.clock()
        with self.backend.loader(batches()) as ready:
            results = _one_behind(score, self.backend, ready)
            while place < order.total:
                began = self.clock()
                logits = list(islice(results, size))
                if not logits:
                    raise RuntimeError(f"scored {place} of {order.total} rows: a loader thread ended early")
                done = [(spans.popleft(), kept.popleft(), host) for host in logits]
                mine = joined([self._real(*one) for one in done])
                said = self.gang.gather((mine, self.clock() - began, self.stop.is_set()))
                count = sum(len(span.rows) for span, _, _ in done)
                place += count
                advance(count)
                fresh += [part for part, _, _ in said] if is_main else []
                stopping = any(stopped for _, _, stopped in said)
                due = self.clock() - since >= self.save_every_s and place < order.total
                if is_main and (due or stopping):
                    parts.commit(saved, joined(fresh))
                    held, fresh, saved, since = [*held, joined(fresh)], [], place, self.clock()
                if stopping:
                    self.stop.set("another rank")  # keeps the reason of our own signal, if there was one
                    self.stop.raise_if_set(f"scoring a holdout; {place:,} of {order.total:,} rows are saved")
                size = _next_size(size, max(seconds for _, seconds, _ in said))
        if not is_main:
            return {}
        every = joined([*held, *fresh])
        ascending = np.argsort(every["sample_id"], kind="stable")
        return {name: values[ascending] for name, values in every.items()}

    def _real(self, span: Span, kept: Arrays, logits: npt.NDArray[np.float32]) -> Arrays:
        """Without the rows that fill a batch."""
        _, count = span.share(self.gang.world.rank, self.batch_size)
        return {name: values[:count] for name, values in {**kept, "logits": logits}.items()}


def joined(parts: list[Arrays]) -> Arrays:
    """Parts one after the other; all hold the same arrays."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _kept(arrays: Arrays, pad_id: int) -> Arrays:
    kept = {name: arrays[name] for name in KEPT if name in arrays}
    return {**kept, "query_tokens": (arrays["query"] != pad_id).sum(axis=1, dtype=np.int32)}


def _one_behind(score: Score, backend: Backend, ready: Iterator[Batch]) -> Iterator[npt.NDArray[Any]]:
    """Logits on the host. A batch is fetched when the next one is under way, so that the device does not wait."""
    before: Tensor | None = None
    for batch in ready:
        logits = score(batch)
        if before is not None:
            yield backend.to_host([before])[0].numpy()
        before = logits
    if before is not None:
        yield backend.to_host([before])[0].numpy()


def _next_size(size: int, seconds: float) -> int:
    """Batches until ranks meet again: few enough to stop soon, enough not to wait for each other all the time."""
    if seconds < _SHORT_S:
        return min(size * 2, _MOST_BATCHES)
    return max(1, size // 2) if seconds > _LONG_S else size
