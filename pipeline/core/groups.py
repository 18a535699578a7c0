"""Rows of one query dealt into groups of fixed size, so that a query is encoded once for several of its products.

A group is the unit of training batches: one query and `slots` products of it, in one row of tokens. Its positives are
spread over its groups, and every row is in exactly one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.order import mix64

EMPTY = -1


@dataclass(frozen=True)
class Groups:
    """Members by length of the group's row of tokens: int64 [G, slots], EMPTY in slots without one (never the first).

    Members are numbers of rows over all buckets of the data, smallest bucket first.
    """

    members: tuple[Int64s, ...]

    @staticmethod
    def of(members: Int64s, tokens: Int64s, lengths: Sequence[int]) -> "Groups":
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
