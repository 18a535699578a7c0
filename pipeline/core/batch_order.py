"""The samples of every global batch, as a pure function of pool sizes, batch size, seed and position.

In every epoch the pool of each bucket is permuted and cut into batches. The remaining samples of a bucket are added to
the next larger one (buckets are nested), so that an epoch skips fewer samples than one batch. The order of batches is
also permuted. The order does not depend on the world size: ranks take slices of the global batch.

Buckets are the few static shapes of a run. Groups are the unit of training batches: a query and up to `slots` of its
products in one row of tokens, so that a query is encoded once for several products. The positives of a query are spread
over its groups, and every row is in exactly one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.shuffle import mix64, permute, permute_runs, stream_key


@dataclass(frozen=True, order=True)
class Bucket:
    """One static shape: tokens per query and tokens per product (special tokens included)."""

    query_tokens: int
    product_tokens: int

    @property
    def name(self) -> str:
        return f"{self.query_tokens}x{self.product_tokens}"

    @staticmethod
    def parse(text: str) -> "Bucket":
        """Read `16x32` (query x product) or `32` (both)."""
        parts = text.lower().split("x")
        if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
            raise ConfigError(f"invalid bucket {text!r}", expected="QUERYxPRODUCT tokens such as 16x32")
        sizes = [int(part) for part in parts]
        return Bucket(sizes[0], sizes[-1])


def check_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Sort buckets by size and check that each fits into the next, so that it can hold samples of smaller buckets.

    Raises ConfigError if there is no bucket, one has fewer than 3 tokens on a side, or they are not nested.
    """
    ordered = tuple(sorted(set(buckets)))
    if not ordered or ordered[0].query_tokens < 3 or ordered[0].product_tokens < 3:
        raise ConfigError(
            f"invalid buckets {[bucket.name for bucket in ordered]}",
            expected="at least one bucket, each with 3 or more tokens per side",
        )
    for small, large in pairwise(ordered):
        if small.product_tokens > large.product_tokens:
            raise ConfigError(
                f"buckets {small.name} and {large.name} are not nested",
                expected="every bucket at least as long on both sides as the next smaller one",
            )
    return ordered


def assign_buckets(
    query_lengths: npt.NDArray[np.int64], product_lengths: npt.NDArray[np.int64], buckets: Sequence[Bucket]
) -> npt.NDArray[np.int64]:
    """Return the index [N] of the first of the sorted `buckets` that holds both texts, or of the last if none does."""
    query_index = np.searchsorted([b.query_tokens for b in buckets], query_lengths, side="left")
    product_index = np.searchsorted([b.product_tokens for b in buckets], product_lengths, side="left")
    return np.minimum(np.maximum(query_index, product_index), len(buckets) - 1)


def row_lengths(buckets: Sequence[Bucket], products: int) -> tuple[int, ...]:
    """Return the ascending lengths of training rows, which contain a query followed by `products` products.

    The last length holds the longest texts of the largest bucket. The others, one for each bucket in multiples of 8,
    are for texts that fill five eighths of their bucket (titles fill a little less).
    """
    full = [bucket.query_tokens + products * bucket.product_tokens for bucket in buckets]
    shorter = [-(-size * 5 // 64) * 8 for size in full]
    return (*sorted({length for length in shorter if length < full[-1]}), full[-1])


EMPTY = -1


@dataclass(frozen=True)
class Groups:
    """Members of groups, for each row length an int64 array [G, slots] with EMPTY in unused slots (never the first).

    Members are row numbers over all buckets of the data, smallest bucket first.
    """

    members: tuple[Int64s, ...]

    @staticmethod
    def from_members(members: Int64s, tokens: Int64s, lengths: Sequence[int]) -> "Groups":
        """Assign groups [G, slots] of `tokens` [G] tokens to the shortest of `lengths` (ascending) that holds them."""
        index = np.searchsorted(lengths, tokens)
        if len(index) and index.max() == len(lengths):
            raise ValueError(f"a group of {tokens.max()} tokens for rows of {lengths[-1]}")
        return Groups(tuple(members[index == number] for number in range(len(lengths))))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of groups of each length."""
        return tuple(len(members) for members in self.members)

    @property
    def fill(self) -> float:
        """Fraction of slots with a row (1.0 without groups)."""
        slots = sum(members.size for members in self.members)
        return sum(int((members != EMPTY).sum()) for members in self.members) / slots if slots else 1.0


def deal_groups(query_id: Int64s, positive: npt.NDArray[np.bool_], *, slots: int, seed: int) -> Int64s:
    """Distribute rows to groups [G, slots] of one query each. `query_id` and `positive` are [N], one value per row.

    Depends only on its arguments, so that all ranks and attempts get the same groups. A query of n rows has
    ceil(n / slots) groups of nearly equal size. Memory: about 80 bytes per row, and 8 bytes per slot for the result.
    """
    if not len(query_id):
        return np.zeros((0, slots), dtype=np.int64)
    tie = mix64(np.arange(len(query_id), dtype=np.uint64) ^ mix64(np.full(1, seed, dtype=np.uint64)))
    order = np.lexsort((tie, positive, query_id))
    rank, count = _rank_in_runs(query_id[order], positive[order])
    quantile = np.empty(len(query_id))
    quantile[order] = (rank + 0.5) / count  # among the positives or the others of a query: interleaves them evenly
    order = np.lexsort((tie, quantile, query_id))
    position, rows = _rank_in_runs(query_id[order])
    num_groups = -(-rows // slots)  # of the query
    group_in_query = position * num_groups // rows
    first = np.flatnonzero(position == 0)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_groups[first])])
    group = np.repeat(offsets[:-1], rows[first]) + group_in_query
    slot = position - -(-group_in_query * rows // num_groups)
    members = np.full((int(offsets[-1]), slots), EMPTY, dtype=np.int64)
    members[group, slot] = order
    return members


def first_rows(sizes: Sequence[int]) -> Int64s:
    """Return the number of the first row of each bucket. Rows are numbered over all buckets, smallest first."""
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    return ends - np.array(sizes, dtype=np.int64)


def locate(sizes: Sequence[int], numbers: Int64s) -> tuple[Int64s, Int64s]:
    """Return (bucket, row in it) [N] of rows [N] that are numbered over all buckets as in `first_rows`."""
    starts = first_rows(sizes)
    # An empty bucket has the same start as the next one. `right` finds the last of them, which contains the row.
    bucket = np.searchsorted(starts, numbers, side="right") - 1
    return bucket, numbers - starts[bucket]


def rank_among_equals(keys: Int64s) -> tuple[Int64s, Int64s]:
    """Return for each of the keys [N] the number of equal keys before it, and the number of equal keys."""
    rank, count = np.empty_like(keys), np.empty_like(keys)
    if len(keys):
        order = np.argsort(keys, kind="stable")
        rank[order], count[order] = _rank_in_runs(keys[order])
    return rank, count


def _rank_in_runs(*keys: npt.NDArray[np.generic]) -> tuple[Int64s, Int64s]:
    """Return the index of each element of sorted keys in its run of equal keys, and the length of the run."""
    changes = np.zeros(len(keys[0]), dtype=np.bool_)
    changes[0] = True
    for key in keys:
        changes[1:] |= key[1:] != key[:-1]
    first = np.flatnonzero(changes)
    lengths = np.diff(np.concatenate([first, [len(changes)]]))
    return np.arange(len(changes)) - np.repeat(first, lengths), np.repeat(lengths, lengths)


_ORDER_OF_BATCHES, _ORDER_IN_POOL = 1, 2


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step. Sample i is row `rows[i]` of pool `pools[i]`."""

    epoch: int
    bucket: int
    pools: Int64s
    rows: Int64s


@dataclass(frozen=True)
class BatchPlan:
    """The order of all global batches.

    Args:
        pool_sizes: groups per bucket, smallest bucket first.
        batch_size: groups in a global batch.
        seed: seed of the order.
        run: number of neighbours in a pool that are shuffled together as one run.
    """

    pool_sizes: tuple[int, ...]
    batch_size: int
    seed: int
    run: int = 1

    def __post_init__(self) -> None:
        if self.batches_per_epoch < 1:
            raise DataError(
                f"{sum(self.pool_sizes)} groups do not fill a global batch of {self.batch_size}",
                expected="at least one full batch",
                next_command="lower train.global_batch_size or add data",
            )

    @property
    def _filled(self) -> list[tuple[int, int]]:
        """For each bucket (samples carried over from smaller buckets, full batches)."""
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
        """Number of batches of each bucket in one epoch."""
        return tuple(batches for _, batches in self._filled)

    def batch(self, position: int) -> GlobalBatch:
        """Return global batch number `position`, counted from 0 over all epochs. O(batch size), stateless."""
        epoch, index = divmod(position, self.batches_per_epoch)
        key = stream_key(self.seed, _ORDER_OF_BATCHES, epoch)
        index = int(permute(np.array([index]), self.batches_per_epoch, key)[0])
        ends = np.cumsum(self.batches_by_bucket)
        bucket = int(np.searchsorted(ends, index, side="right"))
        index -= int(ends[bucket]) - self.batches_by_bucket[bucket]
        positions = np.arange(index * self.batch_size, (index + 1) * self.batch_size, dtype=np.int64)
        pools, rows = self._resolve(bucket, positions, epoch)
        return GlobalBatch(epoch, bucket, pools, rows)

    def _resolve(self, bucket: int, positions: Int64s, epoch: int) -> tuple[Int64s, Int64s]:
        """Return (pool, row) of positions in the shuffled sequence of a bucket, with the samples carried over."""
        carried = self._filled[bucket][0]
        size = self.pool_sizes[bucket]
        key = stream_key(self.seed, _ORDER_IN_POOL, epoch, bucket)
        shuffled = permute_runs(positions, size + carried, key, self.run)
        pools = np.full(positions.shape, bucket, dtype=np.int64)
        rows = shuffled.copy()
        from_smaller = shuffled >= size
        if from_smaller.any():
            smaller = bucket - 1
            first_carried = self._filled[smaller][1] * self.batch_size
            pools[from_smaller], rows[from_smaller] = self._resolve(
                smaller, first_carried + shuffled[from_smaller] - size, epoch
            )
        return pools, rows


@dataclass(frozen=True)
class RankSlice:
    """The slice of every global batch that this rank processes. `rank` is the data-parallel rank (core/layout)."""

    rank: int = 0
    world_size: int = 1
    accumulation: int = 1


def rank_slice(batch_size: int, world_size: int, rank: int, accumulation: int, micro_step: int) -> slice:
    """Return the contiguous slice of a global batch that a rank processes in a micro-step. All have equal size."""
    per_rank = batch_size // world_size
    size = per_rank // accumulation
    start = rank * per_rank + micro_step * size
    return slice(start, start + size)
