"""Texts in rows and in batches: every text once, nothing overlaps, little padding."""

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.embed.engine import flat_batches, pack_rows
from tests.embed.models import texts

ROWS = (16, 40)


@given(
    lengths=st.lists(st.integers(1, ROWS[-1]), max_size=200),
    most=st.tuples(st.integers(1, 20), st.integers(1, 20)),
)
def test_every_text_has_a_place_of_its_own(lengths: list[int], most: tuple[int, int]) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    packing = pack_rows(sizes, ROWS, most)
    assert len(packing.row) == len(packing.start) == len(packing.slot) == len(sizes)
    assert sorted(packing.bucket, reverse=True) == packing.bucket.tolist()
    for row, kind in enumerate(packing.bucket.tolist()):
        texts = np.flatnonzero(packing.row == row)
        assert 1 <= len(texts) <= most[kind]
        assert sorted(packing.slot[texts]) == list(range(len(texts)))
        taken = np.zeros(ROWS[kind], dtype=np.int64)
        for text in texts:
            end = packing.start[text] + sizes[text]
            assert end <= ROWS[kind]
            taken[packing.start[text] : end] += 1
        assert taken.max() == 1
        assert kind == 0 or sizes[texts].max() > ROWS[kind - 1]  # no longer than it must be
    assert set(packing.row.tolist()) == set(range(len(packing.bucket)))


def test_few_tokens_are_padding() -> None:
    """Lengths as of product titles: the best six lengths with one text a row leave more than 10 %."""
    lengths = np.minimum(np.random.default_rng(1).lognormal(2.85, 0.36, 16_384).astype(np.int64) + 2, 128)
    packing = pack_rows(lengths, (128, 512), (32, 128))
    assert (packing.bucket == 0).all()
    assert lengths.sum() > 0.98 * 128 * len(packing.bucket)


def test_short_texts_fill_the_room_beside_long_ones() -> None:
    packing = pack_rows(np.array([30, 5, 5, 16]), ROWS, (8, 8))
    assert packing.bucket.tolist() == [1, 0]
    assert packing.row.tolist() == [0, 0, 0, 1]


def test_places_depend_on_the_order_only_among_texts_of_one_length() -> None:
    lengths = np.random.default_rng(2).integers(1, 41, 300)
    shuffled = np.random.default_rng(3).permutation(300)
    one, other = pack_rows(lengths, ROWS, (8, 8)), pack_rows(lengths[shuffled], ROWS, (8, 8))
    assert one.bucket.tolist() == other.bucket.tolist()
    for row in range(len(one.bucket)):
        assert sorted(lengths[one.row == row]) == sorted(lengths[shuffled][other.row == row])


@pytest.mark.parametrize("length", [0, 41])
def test_a_text_that_fits_no_row_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"{length} to|to {length}"):
        pack_rows(np.array([length]), ROWS, (8, 8))


@given(lengths=st.lists(st.integers(2, 50), max_size=100), tokens=st.integers(1, 120))
def test_batches_hold_every_text_once_within_their_budget(lengths: list[int], tokens: int) -> None:
    sizes = np.array(lengths, dtype=np.int64)
    batches = [batch.texts for batch in flat_batches(texts(lengths), tokens, 0)]
    order = [text for batch in batches for text in batch.tolist()]
    assert sorted(order) == list(range(len(lengths)))
    assert sizes[order].tolist() == sorted(lengths, reverse=True)
    for batch, following in zip_longest(batches, batches[1:]):
        assert sizes[batch].sum() <= tokens or len(batch) == 1
        assert following is None or sizes[batch].sum() + sizes[following[0]] > tokens  # not cut too early
