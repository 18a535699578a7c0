"""Buckets: parsing, nesting, and the smallest one that holds both texts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.buckets import Bucket, assign_buckets, check_buckets, row_lengths
from pipeline.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"), [("16x32", Bucket(16, 32)), ("24", Bucket(24, 24)), ("8X9", Bucket(8, 9))]
)
def test_parse(text: str, expected: Bucket) -> None:
    assert Bucket.parse(text) == expected
    assert Bucket.parse(expected.name) == expected


@pytest.mark.parametrize("text", ["", "x", "16x", "x16", "16x32x64", "-4x8", "4.5x8", "²x16", "a"])
def test_anything_else_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="bucket"):
        Bucket.parse(text)


def test_buckets_are_ordered_unique_and_nested() -> None:
    assert [b.name for b in check_buckets([Bucket(16, 32), Bucket(8, 8), Bucket(16, 32)])] == ["8x8", "16x32"]
    with pytest.raises(ConfigError, match="8x32 and 16x16 are not nested"):
        check_buckets([Bucket(16, 16), Bucket(8, 32)])
    for bad in ([], [Bucket(2, 8)], [Bucket(8, 2)]):
        with pytest.raises(ConfigError, match="at least one bucket"):
            check_buckets(bad)


LENGTHS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=20)
SHAPES = st.lists(st.tuples(st.integers(3, 40), st.integers(3, 40)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, SHAPES)
def test_assigned_is_the_first_that_fits(lengths: list[tuple[int, int]], steps: list[tuple[int, int]]) -> None:
    sides = np.cumsum(np.array(steps), axis=0)  # nested by construction
    buckets = check_buckets([Bucket(int(q), int(p)) for q, p in sides])
    query, product = np.array(lengths).T
    for q, p, chosen in zip(query, product, assign_buckets(query, product, buckets), strict=True):
        fitting = [i for i, b in enumerate(buckets) if q <= b.query_tokens and p <= b.product_tokens]
        assert chosen == (fitting[0] if fitting else len(buckets) - 1)


def test_row_lengths_end_with_one_that_holds_all() -> None:
    buckets = (Bucket(16, 24), Bucket(32, 64))
    assert row_lengths(buckets, 4) == (72, 184, 288)
    assert row_lengths(buckets, 4, (80, 400, 96, 80)) == (80, 96, 288)
    assert row_lengths((Bucket(3, 3),), 1) == (6,)
