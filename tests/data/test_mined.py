"""Mined products: which of a query's fill the slots of a visit, and their tokens in the shape of a batch."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.training_groups import NONE, MinedProducts
from tests.train.rows import PAD, make_rows, mined_from


def of_counts(counts: list[int], slots: int, tmp_path: Path, seed: int = 1) -> MinedProducts:
    """Query 10 i has counts[i] products, 100 i and on."""
    product = np.full((len(counts), max(counts, default=0)), NONE, dtype=np.int64)
    for place, count in enumerate(counts):
        product[place, :count] = 100 * place + np.arange(count)
    rows = make_rows(tmp_path, [(4, 4)])
    return MinedProducts(rows, PAD, 10 * np.arange(len(counts), dtype=np.int64), product, slots, seed)


@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=5), slots=st.integers(1, 5), seed=st.integers(0, 9))
def test_visits_take_each_product_equally_often(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], slots: int, seed: int
) -> None:
    mined = of_counts(counts, slots, tmp_path_factory.getbasetemp(), seed)
    for place, count in enumerate(counts):
        visits = np.arange(max(1, count), dtype=np.int64)
        chosen = mined.choose(np.full(len(visits), place), visits)
        assert chosen.shape == (len(visits), slots)
        for row in chosen.tolist():
            real = [product for product in row if product != NONE]
            assert row[: len(real)] == real and len(real) == len(set(real)) == min(slots, count)
        found, times = np.unique(chosen[chosen != NONE], return_counts=True)
        assert found.tolist() == [100 * place + number for number in range(count)]
        assert set(times.tolist()) <= {min(slots, count)}


def test_a_query_that_nothing_was_mined_for(tmp_path: Path) -> None:
    mined = of_counts([2, 0, 3], 2, tmp_path)
    places = mined.places(np.array([20, 5, 10, 99, 0]))
    assert places.tolist() == [2, NONE, 1, NONE, 0]
    chosen = mined.choose(places, np.zeros(5, dtype=np.int64))
    assert (chosen[1:4] == NONE).all() and (chosen[[0, 4]] != NONE).all()
    empty = of_counts([0], 2, tmp_path)
    assert empty.choose(np.array([0, NONE]), np.array([3, 4])).tolist() == [[NONE, NONE]] * 2
    nobody = MinedProducts(mined.rows, PAD, np.zeros(0, np.int64), np.zeros((0, 3), np.int64), 2, 1)
    assert nobody.choose(nobody.places(np.array([4])), np.array([0])).tolist() == [[NONE, NONE]]


def test_tokens_are_those_of_the_row(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(3, 2), (0, 4)])
    mined = mined_from(rows, 1)
    numbers = np.array([8, 0, 3, 2, 5])
    every = [rows.read(np.full(size, bucket), np.arange(size), 1)["product"] for bucket, size in enumerate(rows.sizes)]
    np.testing.assert_array_equal(mined.tokens(numbers), np.concatenate(every)[numbers])


def test_there_is_room_for_whichever_are_chosen(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(5, 3)])  # 4 and 6 tokens
    product = np.array([[0, 6, 1], [7, 5, NONE], [2, NONE, NONE], [NONE, NONE, NONE]])
    mined = MinedProducts(rows, PAD, np.array([1, 2, 4, 6]), product, 2, 1)
    assert mined.room(np.array([2, 1, 4, 6, 3])).tolist() == [12, 10, 4, 0, 0]
    nobody = MinedProducts(rows, PAD, np.zeros(0, np.int64), np.zeros((0, 3), np.int64), 2, 1)
    assert nobody.room(np.array([4])).tolist() == [0]
