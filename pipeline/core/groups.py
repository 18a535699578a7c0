"""Rows of one query dealt into groups of fixed size, so that a query is encoded once for several of its products.

A group is the unit of training batches: one query and `slots` products of it. Its positives are spread over its groups,
long rows ride together (a group has the shape of its longest row), and every row is in exactly one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.order import mix64

Int64s = npt.NDArray[np.int64]
EMPTY = -1


@dataclass(frozen=True)
class Groups:
    """Members by bucket of the group: row numbers int64 [G, slots], EMPTY in slots without a row (never the first).

    Row numbers count over all buckets, smallest bucket first; `starts[b]` is the first of bucket b.
    """

    members: tuple[Int64s, ...]
    starts: Int64s

    @property
    def sizes(self) -> tuple[int, ...]:
        """Groups of each bucket."""
        return tuple(len(members) for members in self.members)

    @property
    def fill(self) -> float:
        """Share of slots that hold a row; 1.0 without groups."""
        slots = sum(members.size for members in self.members)
        return sum(int((members != EMPTY).sum()) for members in self.members) / slots if slots else 1.0


def deal_groups(
    query_ids: Sequence[Int64s], positive: Sequence[npt.NDArray[np.bool_]], *, slots: int, seed: int
) -> Groups:
    """Groups of at most `slots` rows of one query each. Both sequences: one array a bucket, a value a row.

    A function of its arguments alone, so every rank and every attempt deals the same. A query of n rows has
    ceil(n / slots) groups of nearly equal size. Memory: about 80 bytes a row while dealing, 8 bytes a slot after.
    """
    sizes = np.array([len(ids) for ids in query_ids], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    query, is_positive = np.concatenate(list(query_ids)), np.concatenate(list(positive))
    if not len(query):
        return Groups(tuple(np.zeros((0, slots), dtype=np.int64) for _ in sizes), starts[:-1])
    bucket = np.repeat(np.arange(len(sizes)), sizes)
    tie = mix64(np.arange(len(query), dtype=np.uint64) ^ mix64(np.full(1, seed, dtype=np.uint64)))
    order = np.lexsort((tie, bucket, is_positive, query))
    rank, count = _rank_in_runs(query[order], is_positive[order])
    share = np.empty(len(query))
    share[order] = (rank + 0.5) / count  # of its kind: positives and the others interleave evenly
    order = np.lexsort((tie, share, query))
    place, rows = _rank_in_runs(query[order])
    wanted = -(-rows // slots)
    group_in_query = place * wanted // rows
    first = np.flatnonzero(place == 0)
    before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(wanted[first])])
    group = np.repeat(before[:-1], rows[first]) + group_in_query
    slot = place - -(-group_in_query * rows // wanted)
    members = np.full((int(before[-1]), slots), EMPTY, dtype=np.int64)
    members[group, slot] = order
    widest = np.zeros(len(members), dtype=np.int64)
    np.maximum.at(widest, group, bucket[order])
    return Groups(tuple(members[widest == index] for index in range(len(sizes))), starts[:-1])


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


def place_among_equals(keys: Int64s) -> tuple[Int64s, Int64s]:
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
