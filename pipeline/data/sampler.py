"""What a run trains on: groups of rows of one query, all of the new partitions' and a share of the old ones'."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.batching import Int64s
from pipeline.core.groups import EMPTY, Groups, deal_groups
from pipeline.core.order import mix64, permute, stream_key
from pipeline.data.loader import RowSource
from pipeline.data.shards import Arrays, TokenRows

_REPLAY = 3


@dataclass(frozen=True)
class GroupedRows:
    """Rows of a source by (pool, number of a group in it). A group is one query with `slots` products of it."""

    source: RowSource
    groups: Groups
    slots: int
    num_positives: int

    @staticmethod
    def of(source: RowSource, *, slots: int, positive_gain: float, seed: int) -> "GroupedRows":
        """Deal the rows of a source, see core/groups. Reads the query and gain of every row once."""
        every = [np.arange(size, dtype=np.int64) for size in source.sizes]
        columns = [_fields(source, bucket, rows, ("query_id", "gain")) for bucket, rows in enumerate(every)]
        positive = [column["gain"] >= np.float32(positive_gain) for column in columns]
        groups = deal_groups([column["query_id"] for column in columns], positive, slots=slots, seed=seed)
        return GroupedRows(source, groups, slots, int(sum(part.sum() for part in positive)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Groups of each bucket."""
        return self.groups.sizes

    def numeric_sample(self, most: int) -> npt.NDArray[np.float32]:
        """Numeric features [N, F] of at most `most` rows, spread evenly over the source."""
        total = sum(self.source.sizes)
        chosen = np.arange(0, total, max(1, -(-total // most)), dtype=np.int64)
        pools = np.searchsorted(self.groups.starts, chosen, side="right") - 1
        found = [
            _fields(self.source, int(pool), chosen[here] - self.groups.starts[pool], ("numeric",))
            for pool in np.unique(pools)
            for here in (pools == pool,)
        ]
        return np.concatenate([arrays["numeric"] for arrays in found])

    def read(self, pools: Int64s, numbers: Int64s, bucket: int) -> Arrays:
        """Groups `numbers[i]` of bucket `pools[i]` in the shape of `bucket`, in the order asked for.

        `query` and `query_id` have a row a group, everything else one a slot. `is_row` is False in an empty slot, which
        repeats the first row of its group. `product_key` is equal for products of equal tokens.
        """
        members = np.empty((len(numbers), self.slots), dtype=np.int64)
        for pool in np.unique(pools):
            here = pools == pool
            members[here] = self.groups.members[pool][numbers[here]]
        is_row = members != EMPTY
        rows = np.where(is_row, members, members[:, :1]).reshape(-1)
        pool_of = np.searchsorted(self.groups.starts, rows, side="right") - 1
        # A bucket without rows starts where the next one does; `right` finds the last of them, which has the row.
        arrays = self.source.read(pool_of, rows - self.groups.starts[pool_of], bucket)
        arrays["query"] = arrays["query"][:: self.slots]
        arrays["query_id"] = arrays["query_id"][:: self.slots]
        return {**arrays, "is_row": is_row.reshape(-1), "product_key": _text_keys(arrays["product"])}


@dataclass(frozen=True)
class TrainingPools:
    """New groups first, then replayed ones, per bucket. Which old groups are replayed is a function of the seed alone.

    `kept` is the number of old groups replayed of each bucket.
    """

    new: GroupedRows
    old: GroupedRows | None
    kept: tuple[int, ...]
    seed: int

    @staticmethod
    def build(
        new: TokenRows, old: TokenRows | None, replay_share: float, seed: int, *, slots: int, positive_gain: float
    ) -> "TrainingPools":
        """`replay_share` of the run's groups come from `old` (fewer when there are not so many)."""
        grouped = GroupedRows.of(new, slots=slots, positive_gain=positive_gain, seed=seed)
        if old is None or replay_share == 0.0:
            return TrainingPools(grouped, None, (0,) * len(grouped.sizes), seed)
        before = GroupedRows.of(old, slots=slots, positive_gain=positive_gain, seed=seed)
        wanted = sum(grouped.sizes) * replay_share / (1.0 - replay_share)
        share = min(1.0, wanted / max(1, sum(before.sizes)))
        return TrainingPools(grouped, before, tuple(round(size * share) for size in before.sizes), seed)

    @property
    def slots(self) -> int:
        """Products of a group."""
        return self.new.slots

    @property
    def sizes(self) -> tuple[int, ...]:
        """Groups of each bucket."""
        return tuple(a + b for a, b in zip(self.new.sizes, self.kept, strict=True))

    def read(self, pools: Int64s, numbers: Int64s, bucket: int) -> Arrays:
        """Groups by (pool, number in the pool), in the order asked for, see GroupedRows.read."""
        new_sizes = np.array(self.new.sizes, dtype=np.int64)
        replayed = numbers >= new_sizes[pools]
        if self.old is None or not replayed.any():
            return self.new.read(pools, numbers, bucket)
        chosen = numbers.copy()
        for pool in np.unique(pools[replayed]):
            here = replayed & (pools == pool)
            key = stream_key(self.seed, _REPLAY, int(pool))
            chosen[here] = permute(numbers[here] - new_sizes[pool], self.old.sizes[pool], key)
        parts = [
            (np.flatnonzero(mask), source.read(pools[mask], chosen[mask], bucket))
            for mask, source in ((~replayed, self.new), (replayed, self.old))
            if mask.any()
        ]
        return _interleave(parts, len(numbers))


def _fields(source: RowSource, bucket: int, rows: Int64s, fields: Sequence[str]) -> Arrays:
    """Some fields of some rows of one bucket."""
    if not len(rows):
        return {"query_id": np.zeros(0, dtype=np.int64), "gain": np.zeros(0, dtype=np.float32)}
    pools = np.full(len(rows), bucket, dtype=np.int64)
    if isinstance(source, TokenRows):
        return source.read(pools, rows, bucket, fields)
    return source.read(pools, rows, bucket)


def _text_keys(tokens: npt.NDArray[np.int32]) -> Int64s:
    """A 64-bit hash of each row of tokens [N, T]."""
    places = mix64(np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    with np.errstate(over="ignore"):
        return mix64((tokens.astype(np.uint64) * places).sum(axis=1, dtype=np.uint64)).view(np.int64)


def _interleave(parts: Sequence[tuple[Int64s, Arrays]], count: int) -> Arrays:
    """Arrays of groups read apart, put at their places among `count` groups."""
    result: Arrays = {}
    for places, arrays in parts:
        for name, values in arrays.items():
            each = len(values) // len(places)  # rows of a group: one, or its slots
            if name not in result:
                result[name] = np.empty((count * each, *values.shape[1:]), values.dtype)
            at = (places[:, None] * each + np.arange(each)).reshape(-1)
            result[name][at] = values
    return result
