"""Compute which samples are in each global batch from the pool sizes, the batch size, the seed and the position.

Every epoch shuffles the pool of each bucket and splits it into batches. Samples that don't fill a batch are carried
over to the next larger bucket, which can hold them because buckets are nested. As a result, an epoch skips less than
one batch in total. The batches themselves are shuffled too. The order does not depend on the world size, because each
rank processes a slice of the global batch.

A run uses only a few static shapes, called buckets. Training batches are made of groups. A group is a query with up to
`slots` of its products in a single row of tokens, so that the query is encoded only once. The positives of a query are
spread evenly over its groups, and every row of the data belongs to exactly one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, pairwise

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.shuffle import mix64, permute, permute_runs, stream_key


@dataclass(frozen=True, order=True)
class Bucket:
    """A static shape, given by the number of tokens per query and per product. This includes special tokens."""

    query_tokens: int
    product_tokens: int

    @property
    def name(self) -> str:
        return f"{self.query_tokens}x{self.product_tokens}"

    @staticmethod
    def parse(text: str) -> "Bucket":
        """Parse a bucket such as `16x32` (query x product), or `32` if both sides have the same length."""
        parts = text.lower().split("x")
        if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
            raise ConfigError(
                f"invalid bucket {text!r}",
                expected="QUERYxPRODUCT tokens such as 16x32",
                next_command="correct --data.buckets",
            )
        sizes = [int(part) for part in parts]
        return Bucket(sizes[0], sizes[-1])


def check_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Sort the buckets by size and verify that each one fits into the next.

    This ensures that samples can be moved to a larger bucket. Raises ConfigError if the list is empty, if a bucket has
    fewer than 3 tokens on either side, or if the buckets are not nested.
    """
    ordered = tuple(sorted(set(buckets)))
    if not ordered or ordered[0].query_tokens < 3 or ordered[0].product_tokens < 3:
        raise ConfigError(
            f"invalid buckets {[bucket.name for bucket in ordered]}",
            expected="at least one bucket, and at least 3 tokens per side in each bucket",
        )
    for small, large in pairwise(ordered):
        if small.product_tokens > large.product_tokens:
            raise ConfigError(
                f"buckets {small.name} and {large.name} are not nested",
                expected="every bucket to be at least as long on both sides as the next smaller one",
            )
    return ordered


LONGEST = 128
"""Maximum number of tokens of chosen buckets. It is the most with which all presets fit into 16 GiB."""


def fit_buckets(
    query_lengths: Int64s, product_lengths: Int64s, longest: int = LONGEST, products: int = 4
) -> tuple[Bucket, ...]:
    """Choose up to three buckets, which result in up to four lengths of training rows, for N pairs of texts.

    All sizes are multiples of 8 and at most `longest`. Apart from that, at most 0.5% of the texts of each side are
    truncated. Smaller buckets minimise the padding of pairs and of training rows with `products` products (see
    `row_lengths`), but each one must save 5% of the tokens, because it requires graphs. Training takes about ten times
    as long as evaluations.
    """
    rows = query_lengths + sum(np.roll(product_lengths, shift) for shift in range(products))

    def at(fraction: float) -> Bucket:
        sides = (np.quantile(lengths, fraction, method="higher") for lengths in (query_lengths, product_lengths))
        return Bucket(*(8 * min(longest // 8, -(-int(side) // 8)) for side in sides))

    def cost(buckets: tuple[Bucket, ...]) -> float:
        sizes = np.array([bucket.query_tokens + bucket.product_tokens for bucket in buckets])
        scored = sizes[assign_buckets(query_lengths, product_lengths, buckets)].sum()
        lengths = np.array(row_lengths(buckets, products))
        trained = lengths[np.minimum(np.searchsorted(lengths, rows), len(lengths) - 1)].sum() / products
        return float((10 * trained + scored) * 1.05 ** len(buckets))

    largest = at(0.995)
    sides = (largest.query_tokens, largest.product_tokens)
    scaled = (Bucket(*(8 * -(-side * step // 128) for side in sides)) for step in range(1, 16))
    shapes = sorted({largest, *scaled, *(at(step / 20) for step in range(1, 20))})
    pairs = (
        pair for pair in combinations_with_replacement(shapes, 2) if pair[0].product_tokens <= pair[1].product_tokens
    )
    return min((check_buckets([*pair, largest]) for pair in pairs), key=cost)


def assign_buckets(
    query_lengths: npt.NDArray[np.int64], product_lengths: npt.NDArray[np.int64], buckets: Sequence[Bucket]
) -> npt.NDArray[np.int64]:
    """Return the index [N] of the smallest bucket that holds both texts, or of the largest bucket if none does.

    `buckets` must be sorted, see `check_buckets`.
    """
    query_index = np.searchsorted([b.query_tokens for b in buckets], query_lengths, side="left")
    product_index = np.searchsorted([b.product_tokens for b in buckets], product_lengths, side="left")
    return np.minimum(np.maximum(query_index, product_index), len(buckets) - 1)


def row_lengths(buckets: Sequence[Bucket], products: int) -> tuple[int, ...]:
    """Return the lengths of training rows in ascending order. A row is a query followed by `products` products.

    The last length is long enough for the longest texts of the largest bucket. In addition, every bucket gets a
    shorter length (a multiple of 8) for texts that fill five eighths of it. Typical titles fill slightly less.
    """
    full = [bucket.query_tokens + products * bucket.product_tokens for bucket in buckets]
    shorter = [-(-size * 5 // 64) * 8 for size in full]
    return (*sorted({length for length in shorter if length < full[-1]}), full[-1])


EMPTY = -1


@dataclass(frozen=True)
class Groups:
    """The members of all groups, as one int64 array [G, slots] per row length.

    Members are row numbers, counted over all buckets of the data starting with the smallest. Unused slots are EMPTY.
    The first slot is always used.
    """

    members: tuple[Int64s, ...]

    @staticmethod
    def from_members(members: Int64s, tokens: Int64s, lengths: Sequence[int]) -> "Groups":
        """Assign each group to the shortest row length that holds it.

        Args:
            members: int64 array [G, slots], one row per group.
            tokens: number of tokens in each group [G].
            lengths: the available row lengths in ascending order.
        """
        index = np.searchsorted(lengths, tokens)
        if len(index) and index.max() == len(lengths):
            raise ValueError(f"a group has {tokens.max()} tokens, but rows hold at most {lengths[-1]}")
        return Groups(tuple(members[index == number] for number in range(len(lengths))))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of groups for each row length."""
        return tuple(len(members) for members in self.members)

    @property
    def fill(self) -> float:
        """Fraction of slots that are used (1.0 if there are no groups)."""
        slots = sum(members.size for members in self.members)
        return sum(int((members != EMPTY).sum()) for members in self.members) / slots if slots else 1.0


def deal_groups(query_id: Int64s, positive: npt.NDArray[np.bool_], *, slots: int, seed: int) -> Int64s:
    """Distribute rows over groups, so that each group contains rows of a single query.

    A query with n rows gets ceil(n / slots) groups of nearly equal size. The result only depends on the arguments,
    which ensures that all ranks and attempts see the same groups. This needs about 80 bytes of memory per row, plus
    8 bytes per slot for the result.

    Args:
        query_id: the query of each row [N].
        positive: whether each row [N] is a positive.
        slots: maximum number of rows in a group.
        seed: seed of the order of rows within a query.

    Returns:
        An int64 array [G, slots] with the row numbers of each group.
    """
    if not len(query_id):
        return np.zeros((0, slots), dtype=np.int64)
    tie = mix64(np.arange(len(query_id), dtype=np.uint64) ^ mix64(np.full(1, seed, dtype=np.uint64)))
    order = np.lexsort((tie, positive, query_id))
    rank, count = _rank_in_runs(query_id[order], positive[order])
    quantile = np.empty(len(query_id))
    # Quantiles are computed separately for the positives and the other rows of a query, so that sorting by quantile
    # interleaves the two evenly.
    quantile[order] = (rank + 0.5) / count
    order = np.lexsort((tie, quantile, query_id))
    position, rows = _rank_in_runs(query_id[order])
    num_groups = -(-rows // slots)  # number of groups of the row's query
    group_in_query = position * num_groups // rows
    first = np.flatnonzero(position == 0)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(num_groups[first])])
    group = np.repeat(offsets[:-1], rows[first]) + group_in_query
    slot = position - -(-group_in_query * rows // num_groups)
    members = np.full((int(offsets[-1]), slots), EMPTY, dtype=np.int64)
    members[group, slot] = order
    return members


def repeated_positives(query_id: Int64s, positive: npt.NDArray[np.bool_], *, slots: int) -> Int64s:
    """Choose the positive rows [R] to repeat, so that every group of a query that has positives can contain one.

    The positives of a query are repeated in turn, as often as its other rows need groups of `slots` rows that contain
    one positive each. See `deal_groups` for the arguments.
    """
    chosen = np.flatnonzero(positive)
    chosen = chosen[np.argsort(query_id[chosen], kind="stable")]
    queries, first, count = np.unique(query_id[chosen], return_index=True, return_counts=True)
    others = np.sort(query_id[~positive])
    negatives = np.searchsorted(others, queries, "right") - np.searchsorted(others, queries, "left")
    repeats = np.maximum(0, -(-negatives // max(1, slots - 1)) - count)
    number = np.arange(repeats.sum()) - np.repeat(first_rows(repeats.tolist()), repeats)
    repeated: Int64s = chosen[np.repeat(first, repeats) + number % np.repeat(count, repeats)]
    return repeated


def first_rows(sizes: Sequence[int]) -> Int64s:
    """Return the number of the first row in each bucket, if rows are numbered across buckets, smallest bucket first."""
    ends = np.cumsum(np.array(sizes, dtype=np.int64))
    return ends - np.array(sizes, dtype=np.int64)


def locate(sizes: Sequence[int], numbers: Int64s) -> tuple[Int64s, Int64s]:
    """Look up the bucket [N] and the index within that bucket [N] for row numbers [N] (see `first_rows`)."""
    starts = first_rows(sizes)
    # An empty bucket starts at the same row as the bucket after it. `side="right"` selects the last bucket with a given
    # start, which is the one that contains the row.
    bucket = np.searchsorted(starts, numbers, side="right") - 1
    return bucket, numbers - starts[bucket]


def rank_among_equals(keys: Int64s) -> tuple[Int64s, Int64s]:
    """Return, for each key [N], how many equal keys precede it and how many equal keys there are in total."""
    rank, count = np.empty_like(keys), np.empty_like(keys)
    if len(keys):
        order = np.argsort(keys, kind="stable")
        rank[order], count[order] = _rank_in_runs(keys[order])
    return rank, count


def _rank_in_runs(*keys: npt.NDArray[np.generic]) -> tuple[Int64s, Int64s]:
    """Return each element's index within its run of equal keys, and the length of that run. Keys must be sorted."""
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
    """The samples of one optimizer step, where sample i is row `rows[i]` of pool `pools[i]`."""

    epoch: int
    bucket: int
    pools: Int64s
    rows: Int64s


@dataclass(frozen=True)
class BatchPlan:
    """The order in which a training run visits the global batches.

    Args:
        pool_sizes: number of groups in each bucket, smallest bucket first.
        batch_size: number of groups in a global batch.
        seed: seed of the shuffle.
        run: number of neighboring groups that are shuffled as one block and stay next to each other.
    """

    pool_sizes: tuple[int, ...]
    batch_size: int
    seed: int
    run: int = 1

    def __post_init__(self) -> None:
        if self.batches_per_epoch < 1:
            raise DataError(
                f"{sum(self.pool_sizes)} groups do not fill a global batch of {self.batch_size}",
                expected="enough data for at least one full batch",
                next_command="decrease train.global_batch_size or add more data",
            )

    @property
    def _filled(self) -> list[tuple[int, int]]:
        """The number of samples carried over from smaller buckets and the number of full batches, for each bucket."""
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
        """Number of batches in each bucket per epoch."""
        return tuple(batches for _, batches in self._filled)

    def batch(self, position: int) -> GlobalBatch:
        """Return the global batch at `position`, which counts batches from 0 across epochs.

        Any batch can be computed directly in O(batch size), so that resuming a run requires no other state.
        """
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
        """Look up the pool and the row for positions in the shuffled order of a bucket.

        The order includes the samples that are carried over from smaller buckets, so their pool differs.
        """
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
    """The slice of every global batch that this rank processes.

    Note that `rank` is the data-parallel rank (core/layout), not the global rank.
    """

    rank: int = 0
    world_size: int = 1
    accumulation: int = 1


def rank_slice(batch_size: int, world_size: int, rank: int, accumulation: int, micro_step: int) -> slice:
    """Return the contiguous slice of the global batch that a rank processes in one micro-step.

    All slices have the same size.
    """
    per_rank = batch_size // world_size
    size = per_rank // accumulation
    start = rank * per_rank + micro_step * size
    return slice(start, start + size)
