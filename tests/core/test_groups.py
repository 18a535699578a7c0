"""Rows dealt into groups: every row once, one query a group, positives spread."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.groups import EMPTY, Groups, deal_groups, place_among_equals

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30), min_size=1, max_size=4)


def deal(rows: list[list[tuple[int, bool]]], slots: int, seed: int = 1) -> Groups:
    queries = [np.array([query for query, _ in bucket], dtype=np.int64) for bucket in rows]
    positive = [np.array([good for _, good in bucket], dtype=np.bool_) for bucket in rows]
    return deal_groups(queries, positive, slots=slots, seed=seed)


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(1, 6))
def test_every_row_once_and_no_group_more_than_needed(rows: list[list[tuple[int, bool]]], slots: int) -> None:
    groups = deal(rows, slots)
    flat = [row for bucket in rows for row in bucket]
    bucket_of = [number for number, bucket in enumerate(rows) for _ in bucket]
    seen: list[int] = []
    for bucket, members in enumerate(groups.members):
        assert members.shape[1] == slots
        for member in members.tolist():
            real = [row for row in member if row != EMPTY]
            assert real == member[: len(real)] and real
            assert len({flat[row][0] for row in real}) == 1
            assert max(bucket_of[row] for row in real) == bucket
            seen += real
    assert sorted(seen) == list(range(len(flat)))
    sizes = [sum(query == wanted for query, _ in flat) for wanted in {query for query, _ in flat}]
    assert sum(groups.sizes) == sum(-(-size // slots) for size in sizes)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 8), st.integers(0, 5))
def test_positives_are_spread_evenly(others: int, positives: int, slots: int, seed: int) -> None:
    rows = [[(3, False)] * others + [(3, True)] * positives]
    (members,) = deal(rows, slots, seed).members
    found = [int((member >= others).sum()) for member in members]
    share = positives / len(members)
    assert all(share - 1.001 <= count <= share + 1.001 for count in found), found
    assert {int((member != EMPTY).sum()) for member in members} <= {
        (others + positives) // len(members),
        -(-(others + positives) // len(members)),
    }


def test_the_seed_decides_who_stands_together() -> None:
    rows = [[(1, False)] * 30]
    one, same, other = (deal(rows, 4, seed).members[0].tolist() for seed in (1, 1, 2))
    assert one == same != other


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_place_among_equals(keys: list[int]) -> None:
    place, count = place_among_equals(np.array(keys, dtype=np.int64))
    assert place.tolist() == [keys[:index].count(key) for index, key in enumerate(keys)]
    assert count.tolist() == [keys.count(key) for key in keys]


def test_nothing_to_deal() -> None:
    groups = deal([[], []], 3)
    assert groups.sizes == (0, 0) and groups.fill == 1.0
