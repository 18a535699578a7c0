"""Rows dealt into groups: every row once, one query a group, positives spread."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.groups import EMPTY, Groups, deal_groups, place_among_equals

ROWS = st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(1, 9)), max_size=60)
LENGTHS = (4, 12, 54)


def deal(rows: list[tuple[int, bool]], slots: int, seed: int = 1) -> list[list[int]]:
    query = np.array([query for query, _ in rows], dtype=np.int64)
    positive = np.array([good for _, good in rows], dtype=np.bool_)
    found: list[list[int]] = deal_groups(query, positive, slots=slots, seed=seed).tolist()
    return found


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(1, 6))
def test_every_row_once_and_no_group_more_than_needed(rows: list[tuple[int, bool, int]], slots: int) -> None:
    groups = deal([row[:2] for row in rows], slots)
    seen: list[int] = []
    for member in groups:
        real = [row for row in member if row != EMPTY]
        assert len(member) == slots and real == member[: len(real)] and real
        assert len({rows[row][0] for row in real}) == 1
        seen += real
    assert sorted(seen) == list(range(len(rows)))
    sizes = [sum(row[0] == wanted for row in rows) for wanted in {row[0] for row in rows}]
    assert len(groups) == sum(-(-size // slots) for size in sizes)


@settings(deadline=None)
@given(ROWS, st.integers(1, 6))
def test_a_group_lies_in_the_shortest_row_that_holds_it(rows: list[tuple[int, bool, int]], slots: int) -> None:
    members = deal_groups(*(np.array([row[i] for row in rows], dtype=kind) for i, kind in ((0, np.int64), (1, bool))),
                          slots=slots, seed=1)  # fmt: skip
    tokens = np.array([sum(rows[row][2] for row in member if row != EMPTY) for member in members.tolist()], np.int64)
    groups = Groups.of(members, tokens, LENGTHS)
    assert sum(groups.sizes) == len(members)
    for number, found in enumerate(groups.members):
        for member in found.tolist():
            size = sum(rows[row][2] for row in member if row != EMPTY)
            assert size <= LENGTHS[number] and (not number or size > LENGTHS[number - 1])


def test_a_group_that_no_row_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="a group of 55 tokens for rows of 54"):
        Groups.of(np.zeros((1, 2), dtype=np.int64), np.array([55]), LENGTHS)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 8), st.integers(0, 5))
def test_positives_are_spread_evenly(others: int, positives: int, slots: int, seed: int) -> None:
    members = np.array(deal([(3, False)] * others + [(3, True)] * positives, slots, seed))
    found, sizes = (members >= others).sum(axis=1), (members != EMPTY).sum(axis=1)
    assert np.abs(found - sizes * positives / (others + positives)).max() <= 1.001, found.tolist()
    assert {int((member != EMPTY).sum()) for member in members} <= {
        (others + positives) // len(members),
        -(-(others + positives) // len(members)),
    }


def test_the_seed_decides_who_stands_together() -> None:
    one, same, other = (deal([(1, False)] * 30, 4, seed) for seed in (1, 1, 2))
    assert one == same != other


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_place_among_equals(keys: list[int]) -> None:
    place, count = place_among_equals(np.array(keys, dtype=np.int64))
    assert place.tolist() == [keys[:index].count(key) for index, key in enumerate(keys)]
    assert count.tolist() == [keys.count(key) for key in keys]


def test_nothing_to_deal() -> None:
    none = np.zeros(0, dtype=np.int64)
    members = deal_groups(none, none.astype(np.bool_), slots=3, seed=1)
    groups = Groups.of(members, none, LENGTHS)
    assert members.shape == (0, 3) and groups.sizes == (0, 0, 0) and groups.fill == 1.0
