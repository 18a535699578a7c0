"""Which samples make up global batch number p. Pure: (pools, batch size, seed, position) -> (bucket, sample indices).

Per epoch each bucket's pool is permuted and cut into batches. What is left over of a bucket rides in the next larger
one (buckets are nested), so one epoch leaves out fewer samples than one batch. The order of batches is itself permuted.
Nothing here knows the world size: ranks take their slice of the global batch.

Buckets are the few static shapes a run may use. Groups are the unit of training batches: one query and `slots` products
of it in one row of tokens, so that a query is encoded once for several of its products. Its positives are spread over
its groups, and every row is in exactly one group.
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
            raise ConfigError(f"bucket {text!r}", expected="QUERYxPRODUCT tokens such as 16x32")
        sizes = [int(part) for part in parts]
        return Bucket(sizes[0], sizes[-1])


def check_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Order buckets from small to large and require each to fit in the next.

    The nesting lets samples left over from one bucket ride in the next larger one. Raises ConfigError.
    """
    ordered = tuple(sorted(set(buckets)))
    if not ordered or ordered[0].query_tokens < 3 or ordered[0].product_tokens < 3:
        raise ConfigError(
            f"buckets {[b.name for b in ordered]}", expected="at least one bucket, of 3 tokens or more a side"
        )
    for small, large in pairwise(ordered):
        if small.product_tokens > large.product_tokens:
            raise ConfigError(
                f"buckets {small.name} and {large.name} are not nested",
                expected="every bucket at least as long as the one before it on both sides",
            )
    return ordered


def assign_buckets(
    query_lengths: npt.NDArray[np.int64], product_lengths: npt.NDArray[np.int64], buckets: Sequence[Bucket]
) -> npt.NDArray[np.int64]:
    """The index of the smallest bucket that holds both texts; the largest (truncating) when none does.

    Shapes: lengths [N] -> [N]. `buckets` as returned by `check_buckets`.
    """
    query_index = np.searchsorted([b.query_tokens for b in buckets], query_lengths, side="left")
    product_index = np.searchsorted([b.product_tokens for b in buckets], product_lengths, side="left")
    return np.minimum(np.maximum(query_index, product_index), len(buckets) - 1)


def row_lengths(buckets: Sequence[Bucket], products: int) -> tuple[int, ...]:
    """Lengths of the rows of training, ascending. A row holds a query and `products` products, one after the other.

    The last length holds the largest bucket's texts in full. Before it is one for each bucket, for texts that fill five
    eighths of it (titles fill a little less), in multiples of 8.
    """
    full = [bucket.query_tokens + products * bucket.product_tokens for bucket in buckets]
    shorter = [-(-size * 5 // 64) * 8 for size in full]
    return (*sorted({length for length in shorter if length < full[-1]}), full[-1])


EMPTY = -1


@dataclass(frozen=True)
class Groups:
    """Members by length of the group's row of tokens: int64 [G, slots], EMPTY in slots without one (never the first).

    Members are numbers of rows over all buckets of the data, smallest bucket first.
    """

    members: tuple[Int64s, ...]

    @staticmethod
    def from_members(members: Int64s, tokens: Int64s, lengths: Sequence[int]) -> "Groups":
        """Groups [G, slots] of `tokens` [G] tokens, each in the shortest row of `lengths` (ascending) that holds it."""
        place = np.searchsorted(lengths, tokens)
        if len(place) and place.max() == len(lengths):
            raise ValueError(f"a group of {tokens.max()} tokens for rows of {lengths[-1]}")
        return Groups(tuple(members[place == number] for number in range(len(lengths))))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Groups of each length."""
        return tuple(len(members) for members in self.members)

    @property
    def fill(self) -> float:
        """Share of slots that hold a row; 1.0 without groups."""
        slots = sum(members.size for members in self.members)
        return sum(int((members != EMPTY).sum()) for members in self.members) / slots if slots else 1.0


def deal_groups(query_id: Int64s, positive: npt.NDArray[np.bool_], *, slots: int, seed: int) -> Int64s:
    """Groups [G, slots] of at most `slots` rows of one query each. Both arguments: [N], a value a row.

    A function of its arguments alone, so every rank and every attempt deals the same. A query of n rows has
    ceil(n / slots) groups of nearly equal size. Memory: about 80 bytes a row while dealing, 8 bytes a slot after.
    """
    if not len(query_id):
        return np.zeros((0, slots), dtype=np.int64)
    tie = mix64(np.arange(len(query_id), dtype=np.uint64) ^ mix64(np.full(1, seed, dtype=np.uint64)))
    order = np.lexsort((tie, positive, query_id))
    rank, count = _rank_in_runs(query_id[order], positive[order])
    share = np.empty(len(query_id))
    share[order] = (rank + 0.5) / count  # of its kind: positives and the others interleave evenly
    order = np.lexsort((tie, share, query_id))
    place, rows = _rank_in_runs(query_id[order])
    wanted = -(-rows // slots)
    group_in_query = place * wanted // rows
    first = np.flatnonzero(place == 0)
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(wanted[first])])
    group = np.repeat(before[:-1], rows[first]) + group_in_query
    slot = place - -(-group_in_query * rows // wanted)
    members = np.full((int(before[-1]), slots), EMPTY, dtype=np.int64)
    members[group, slot] = order
    return members


def first_rows(sizes: Sequence[int]) -> Int64s:
    """The number of the first row of each bucket, for rows numbered over all buckets, smallest bucket first."""
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    return ends - np.array(sizes, dtype=np.int64)


def locate(sizes: Sequence[int], numbers: Int64s) -> tuple[Int64s, Int64s]:
    """(bucket, row in it) [N] of rows numbered over all buckets [N], see `first_rows`."""
    starts = first_rows(sizes)
    # A bucket without rows starts where the next one does; `right` finds the last of them, which has the row.
    bucket = np.searchsorted(starts, numbers, side="right") - 1
    return bucket, numbers - starts[bucket]


def rank_among_equals(keys: Int64s) -> tuple[Int64s, Int64s]:
    """For each of N keys [N]: how many equal ones stand before it, and how many equal ones there are."""
    place, count = np.empty_like(keys), np.empty_like(keys)
    if len(keys):
        order = np.argsort(keys, kind="stable")
        place[order], count[order] = _rank_in_runs(keys[order])
    return place, count


def _rank_in_runs(*keys: npt.NDArray[np.generic]) -> tuple[Int64s, Int64s]:
    """For sorted keys: the place of each element in its run of equal keys, and the length of that run."""
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
    """The samples of one optimizer step. `pools[i]`, `rows[i]` name sample i: row of the pool it comes from."""

    epoch: int
    bucket: int
    pools: Int64s
    rows: Int64s


@dataclass(frozen=True)
class BatchPlan:
    """Order of all global batches.

    Args:
        pool_sizes: groups per bucket, smallest bucket first.
        batch_size: groups of a global batch.
        seed: of the order.
        run: neighbours in a pool that stay together: whole runs of so many are shuffled.
    """

    pool_sizes: tuple[int, ...]
    batch_size: int
    seed: int
    run: int = 1

    def __post_init__(self) -> None:
        if self.batches_per_epoch < 1:
            raise DataError(
                f"{sum(self.pool_sizes)} groups for a global batch of {self.batch_size}",
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
        shuffled = permute_runs(places, own + carried, stream_key(self.seed, _ORDER_IN_POOL, epoch, bucket), self.run)
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
class RankSlice:
    """Which part of every global batch this rank takes. Ranks here are data ranks, see core/layout."""

    rank: int = 0
    world_size: int = 1
    accumulation: int = 1


def rank_slice(batch_size: int, world_size: int, rank: int, accumulation: int, micro_step: int) -> slice:
    """The part of a global batch that one rank handles in one micro-step: contiguous, equal for all."""
    per_rank = batch_size // world_size
    size = per_rank // accumulation
    start = rank * per_rank + micro_step * size
    return slice(start, start + size)
