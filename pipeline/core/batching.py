"""Which samples make up global batch number p. Pure: (pools, batch size, seed, position) -> (bucket, sample indices).

Per epoch each bucket's pool is permuted and cut into batches. What is left over of a bucket rides in the next larger
one (buckets are nested), so one epoch leaves out fewer samples than one batch. The order of batches is itself permuted.
Nothing here knows the world size: ranks take their slice of the global batch.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError
from pipeline.core.order import permute, stream_key

_ORDER_OF_BATCHES, _ORDER_IN_POOL = 1, 2


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step. `pools[i]`, `rows[i]` name sample i: row of the pool it comes from."""

    epoch: int
    bucket: int
    pools: Int64s
    rows: Int64s


@dataclass(frozen=True)
class BatchPlan:
    """Order of all global batches.

    Args:
        pool_sizes: samples per bucket, smallest bucket first.
        batch_size: samples of a global batch.
        seed: of the order.
    """

    pool_sizes: tuple[int, ...]
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.batches_per_epoch < 1:
            raise DataError(
                f"{sum(self.pool_sizes)} training samples for a global batch of {self.batch_size}",
                expected="at least one full batch",
                next_command="lower train.global_batch_size or give more data",
            )

    @property
    def _filled(self) -> list[tuple[int, int]]:
        """Per bucket (samples carried in from smaller buckets, whole batches)."""
        result, carried = [], 0
        for size in self.pool_sizes:
            result.append((carried, (size + carried) // self.batch_size))
            carried = (size + carried) % self.batch_size
        return result

    @property
    def batches_per_epoch(self) -> int:
        return sum(batches for _, batches in self._filled)

    @property
    def batches_by_bucket(self) -> tuple[int, ...]:
        """Batches of each bucket in one epoch."""
        return tuple(batches for _, batches in self._filled)

    def batch(self, position: int) -> GlobalBatch:
        """Global batch number `position`, counted from 0 over all epochs. O(batch size), no state."""
        epoch, index = divmod(position, self.batches_per_epoch)
        key = stream_key(self.seed, _ORDER_OF_BATCHES, epoch)
        index = int(permute(np.array([index]), self.batches_per_epoch, key)[0])
        ends = np.cumsum(self.batches_by_bucket)
        bucket = int(np.searchsorted(ends, index, side="right"))
        index -= int(ends[bucket]) - self.batches_by_bucket[bucket]
        places = np.arange(index * self.batch_size, (index + 1) * self.batch_size, dtype=np.int64)
        pools, rows = self._resolve(bucket, places, epoch)
        return GlobalBatch(epoch, bucket, pools, rows)

    def _resolve(self, bucket: int, places: Int64s, epoch: int) -> tuple[Int64s, Int64s]:
        """Places in a bucket's sequence (own samples and those carried in, shuffled together) to (pool, row)."""
        carried = self._filled[bucket][0]
        own = self.pool_sizes[bucket]
        shuffled = permute(places, own + carried, stream_key(self.seed, _ORDER_IN_POOL, epoch, bucket))
        pools = np.full(places.shape, bucket, dtype=np.int64)
        rows = shuffled.copy()
        from_smaller = shuffled >= own
        if from_smaller.any():
            smaller = bucket - 1
            first_left_over = self._filled[smaller][1] * self.batch_size
            pools[from_smaller], rows[from_smaller] = self._resolve(
                smaller, first_left_over + shuffled[from_smaller] - own, epoch
            )
        return pools, rows


@dataclass(frozen=True)
class RankShare:
    """Which part of every global batch this rank takes."""

    rank: int = 0
    world_size: int = 1
    accumulation: int = 1


def rank_slice(batch_size: int, world_size: int, rank: int, accumulation: int, micro_step: int) -> slice:
    """The part of a global batch that one rank handles in one micro-step: contiguous, equal for all."""
    per_rank = batch_size // world_size
    size = per_rank // accumulation
    start = rank * per_rank + micro_step * size
    return slice(start, start + size)
