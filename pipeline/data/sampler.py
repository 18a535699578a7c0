"""What a run trains on: groups of rows of one query, all of the new partitions' and a share of the old ones'.

Behind its judged rows a group has slots for mined negatives of its query, where they are asked for (data/mined).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.batching import Int64s
from pipeline.core.groups import EMPTY, Groups, deal_groups, locate, place_among_equals
from pipeline.core.order import mix64, permute, stream_key
from pipeline.data.loader import RowSource
from pipeline.data.mined import NONE, MinedProducts
from pipeline.data.shards import Arrays, TokenRows

_REPLAY = 3
_JUDGED = ("query_id", "label", "gain")


@dataclass(frozen=True)
class MinedGroups:
    """Mined products of groups, all by bucket of the group and [G]."""

    products: MinedProducts
    place: tuple[Int64s, ...]
    """Of the group's query in `products`."""
    first: tuple[Int64s, ...]
    """Which of its query's groups this is."""
    every: tuple[Int64s, ...]
    """How many groups its query has."""

    @staticmethod
    def of(products: MinedProducts, query_id: Sequence[Int64s]) -> "MinedGroups":
        """`query_id`: of each group, an array a bucket."""
        ends = np.cumsum([len(ids) for ids in query_id])[:-1]
        together = np.concatenate(list(query_id))
        columns = (products.places(together), *place_among_equals(together))
        place, first, every = (tuple(np.split(column, ends)) for column in columns)
        return MinedGroups(products, place, first, every)

    def choose(self, pools: Int64s, numbers: Int64s, epoch: int) -> Int64s:
        """Products [N, slots] of groups `numbers[i]` of bucket `pools[i]` in an epoch."""
        places, visits = np.empty_like(numbers), np.empty_like(numbers)
        for pool in np.unique(pools):
            here = pools == pool
            chosen = numbers[here]
            places[here] = self.place[pool][chosen]
            visits[here] = self.first[pool][chosen] + epoch * self.every[pool][chosen]
        return self.products.choose(places, visits)

    @property
    def fill(self) -> float:
        """Share of the slots for mined products that hold one."""
        place, products = np.concatenate(self.place), self.products
        if not len(place) or not products.product.size:
            return 0.0
        found = np.where(place == NONE, 0, (products.product != NONE).sum(axis=1)[place])
        return float(np.minimum(found, products.slots).mean()) / products.slots


@dataclass(frozen=True)
class Judged:
    """Counts of the judgements in some rows. By bucket of the row: rows and positives; by class: mean gain or None."""

    rows: tuple[int, ...]
    positives: tuple[int, ...]
    queries: int
    queries_without_negative: int
    mean_gains: tuple[float | None, ...]

    @staticmethod
    def of(columns: Sequence[Arrays], positive: Sequence[npt.NDArray[np.bool_]]) -> "Judged":
        """`columns`: query_id, label and gain of all rows of each bucket."""
        query, label, gain = (np.concatenate([column[name] for column in columns]) for name in _JUDGED)
        is_positive = np.concatenate(list(positive))
        queries, place = np.unique(query, return_inverse=True)
        positives = np.bincount(place, weights=is_positive, minlength=len(queries))
        known = label >= 0
        count = np.bincount(label[known])
        total = np.bincount(label[known], weights=gain[known])
        means = (float(t / c) if c else None for t, c in zip(total, count, strict=True))
        return Judged(
            rows=tuple(len(column["gain"]) for column in columns),
            positives=tuple(int(part.sum()) for part in positive),
            queries=len(queries),
            queries_without_negative=int((positives == np.bincount(place, minlength=len(queries))).sum()),
            mean_gains=tuple(means),
        )

    def lacks(self, bucket: int) -> bool:
        """It has rows, and none is a positive."""
        return self.rows[bucket] > 0 and not self.positives[bucket]


@dataclass(frozen=True)
class GroupedRows:
    """Rows of a source by (pool, number of a group in it). A group is one query with `slots` judged products of it."""

    source: RowSource
    groups: Groups
    slots: int
    judged: Judged
    mined: MinedGroups | None = None

    @staticmethod
    def of(
        source: RowSource, *, slots: int, positive_gain: float, seed: int, mined: MinedProducts | None = None
    ) -> "GroupedRows":
        """Deal the rows of a source, see core/groups. Reads the judgement of every row once."""
        every = [np.arange(size, dtype=np.int64) for size in source.sizes]
        columns = [_fields(source, bucket, rows, _JUDGED) for bucket, rows in enumerate(every)]
        positive = [column["gain"] >= np.float32(positive_gain) for column in columns]
        query_id = [column["query_id"] for column in columns]
        groups = deal_groups(query_id, positive, slots=slots, seed=seed)
        asking = None
        if mined is not None:
            every_id = np.concatenate(query_id)
            asking = MinedGroups.of(mined, [every_id[members[:, 0]] for members in groups.members])
        return GroupedRows(source, groups, slots, Judged.of(columns, positive), asking)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Groups of each bucket."""
        return self.groups.sizes

    def numeric_sample(self, most: int) -> npt.NDArray[np.float32]:
        """Numeric features [N, F] of at most `most` rows, spread evenly over the source."""
        total = sum(self.source.sizes)
        chosen = np.arange(0, total, max(1, -(-total // most)), dtype=np.int64)
        pools, numbers = locate(self.source.sizes, chosen)
        found = [
            _fields(self.source, int(pool), numbers[here], ("numeric",))
            for pool in np.unique(pools)
            for here in (pools == pool,)
        ]
        return np.concatenate([arrays["numeric"] for arrays in found])

    def read(self, pools: Int64s, numbers: Int64s, bucket: int, epoch: int = 0) -> Arrays:
        """Groups `numbers[i]` of bucket `pools[i]` in the shape of `bucket`, in the order asked for.

        `query` and `query_id` have a row a group, everything else one a slot: those of judged rows, then those of mined
        products, which change with the epoch. `is_row` and `is_mined` say which slot holds one. An empty slot repeats
        the first row of its group; one with a mined product has the tokens of that, and the rest, features too, of the
        group's first row: nothing may be learnt from it. `product_key` is equal for products of equal tokens.
        """
        slots = self.slots + (self.mined.products.slots if self.mined else 0)
        members = np.full((len(numbers), slots), EMPTY, dtype=np.int64)
        for pool in np.unique(pools):
            here = pools == pool
            members[here, : self.slots] = self.groups.members[pool][numbers[here]]
        is_row = members != EMPTY
        rows = np.where(is_row, members, members[:, :1]).reshape(-1)
        arrays = self.source.read(*locate(self.source.sizes, rows), bucket)
        arrays["query"] = arrays["query"][::slots]
        arrays["query_id"] = arrays["query_id"][::slots]
        is_mined = np.zeros_like(is_row)
        if self.mined is not None:
            chosen = self.mined.choose(pools, numbers, epoch)
            is_mined[:, self.slots :] = chosen != NONE
            length = arrays["product"].shape[1]
            arrays["product"][is_mined.reshape(-1)] = self.mined.products.tokens(chosen[chosen != NONE], bucket, length)
        flags = {"is_row": is_row.reshape(-1), "is_mined": is_mined.reshape(-1)}
        return {**arrays, **flags, "product_key": _text_keys(arrays["product"])}


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
        new: TokenRows,
        old: TokenRows | None,
        replay_share: float,
        seed: int,
        *,
        slots: int,
        positive_gain: float,
        mined: MinedProducts | None = None,
    ) -> "TrainingPools":
        """`replay_share` of the run's groups come from `old` (fewer when there are not so many)."""
        grouped = GroupedRows.of(new, slots=slots, positive_gain=positive_gain, seed=seed, mined=mined)
        if old is None or replay_share == 0.0:
            return TrainingPools(grouped, None, (0,) * len(grouped.sizes), seed)
        before = GroupedRows.of(old, slots=slots, positive_gain=positive_gain, seed=seed, mined=mined)
        wanted = sum(grouped.sizes) * replay_share / (1.0 - replay_share)
        share = min(1.0, wanted / max(1, sum(before.sizes)))
        return TrainingPools(grouped, before, tuple(round(size * share) for size in before.sizes), seed)

    @property
    def slots(self) -> int:
        """Judged products of a group."""
        return self.new.slots

    @property
    def sizes(self) -> tuple[int, ...]:
        """Groups of each bucket."""
        return tuple(a + b for a, b in zip(self.new.sizes, self.kept, strict=True))

    def read(self, pools: Int64s, numbers: Int64s, bucket: int, epoch: int = 0) -> Arrays:
        """Groups by (pool, number in the pool), in the order asked for, see GroupedRows.read."""
        new_sizes = np.array(self.new.sizes, dtype=np.int64)
        replayed = numbers >= new_sizes[pools]
        if self.old is None or not replayed.any():
            return self.new.read(pools, numbers, bucket, epoch)
        chosen = numbers.copy()
        for pool in np.unique(pools[replayed]):
            here = replayed & (pools == pool)
            key = stream_key(self.seed, _REPLAY, int(pool))
            chosen[here] = permute(numbers[here] - new_sizes[pool], self.old.sizes[pool], key)
        parts = [
            (np.flatnonzero(mask), source.read(pools[mask], chosen[mask], bucket, epoch))
            for mask, source in ((~replayed, self.new), (replayed, self.old))
            if mask.any()
        ]
        return _interleave(parts, len(numbers))


def _fields(source: RowSource, bucket: int, rows: Int64s, fields: Sequence[str]) -> Arrays:
    """Some fields of some rows of one bucket."""
    if not len(rows):
        kinds = {"query_id": np.int64, "label": np.int64, "gain": np.float32}
        return {name: np.zeros(0, dtype=kind) for name, kind in kinds.items()}
    pools = np.full(len(rows), bucket, dtype=np.int64)
    return source.read(pools, rows, bucket, fields)


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
