"""Exact nearest items: equal to a full sort, to the last tie, however the items are cut and shared."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.arrays import Float32s
from pipeline.core.errors import NumericError
from pipeline.retrieval.search import ExactTopK, exact_scores


def unit(values: npt.NDArray[np.float64]) -> Float32s:
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values / lengths, dtype=np.float32)


def by_sorting(queries: Float32s, items: Float32s, k: int) -> list[list[int]]:
    """In Python's whole numbers, which cannot round."""
    left, right = (np.rint(side.astype(np.float64) * 2**26).astype(int).tolist() for side in (queries, items))
    found = []
    for query in left:
        scores = [sum(a * b for a, b in zip(query, item, strict=True)) for item in right]
        best = sorted(range(len(right)), key=lambda number: (-scores[number], number))[:k]
        found.append(best + [-1] * (k - len(best)))
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[Float32s, Float32s, int, list[int]]:
    """Vectors with many exact ties: items are drawn from a few directions, some a rounding error apart."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    width = draw(st.integers(1, 6))
    directions = unit(rng.normal(size=(draw(st.integers(1, 5)), width)))
    items = directions[rng.integers(0, len(directions), draw(st.integers(1, 40)))]
    items[:: draw(st.integers(2, 9))] *= np.float32(1 + 6e-8)
    queries = unit(rng.normal(size=(draw(st.integers(1, 4)), width)))
    cuts = sorted(draw(st.lists(st.integers(0, len(items)), max_size=4)))
    return queries, items, draw(st.integers(1, 45)), [0, *cuts, len(items)]


@given(cases(), st.tuples(st.integers(1, 4), st.integers(1, 16), st.integers(1, 9)))
def test_equal_to_a_full_sort(case: tuple[Float32s, Float32s, int, list[int]], sizes: tuple[int, int, int]) -> None:
    """Whatever the sizes of the blocks."""
    queries, items, k, cuts = case
    with pytest.MonkeyPatch.context() as patch:
        for name, size in zip(("BLOCK_QUERIES", "BLOCK_ITEMS", "RESCORED_NUMBERS"), sizes, strict=True):
            patch.setattr(f"pipeline.retrieval.search._{name}", size)
        top = ExactTopK(queries, k)
        for start, stop in pairwise(cuts):
            top.add(start, items[start:stop])
    assert top.result()[1].tolist() == by_sorting(queries, items, k)


@given(cases(), st.integers(2, 4))
def test_ranks_that_share_the_items_find_the_same(
    case: tuple[Float32s, Float32s, int, list[int]], world_size: int
) -> None:
    queries, items, k, cuts = case
    ranks = [ExactTopK(queries, k) for _ in range(world_size)]
    for number, (start, stop) in enumerate(pairwise(cuts)):
        ranks[number % world_size].add(start, items[start:stop])
    merged = ExactTopK(queries, k)
    for rank in reversed(ranks):
        merged.merge(*rank.result())
    assert merged.result()[1].tolist() == by_sorting(queries, items, k)


def test_many_items_of_real_width() -> None:
    """Against all products in float64; the best of them are told apart by more than that rounds."""
    rng = np.random.default_rng(1)
    queries, items = unit(rng.normal(size=(20, 384))), unit(rng.normal(size=(5000, 384)))
    items[4000:4500] = items[:500]
    top = ExactTopK(queries, 30)
    for start in range(0, 5000, 1700):
        top.add(start, items[start : start + 1700])
    products = np.rint(queries.astype(np.float64) * 2**26) @ np.rint(items.astype(np.float64) * 2**26).T
    best = np.argsort(-products, axis=1, kind="stable")[:, :30]
    np.testing.assert_array_equal(top.result()[1], best)
    np.testing.assert_array_equal(top.result()[0], np.take_along_axis(products, best, axis=1) / 2.0**52)
    found = exact_scores(np.repeat(queries, 30, axis=0), items[best.reshape(-1)])
    np.testing.assert_array_equal(found.reshape(20, 30), top.result()[0])


def test_values_that_are_no_numbers_are_refused() -> None:
    good = np.eye(2, dtype=np.float32)
    with pytest.raises(NumericError, match="1 query vectors contain NaN"):
        ExactTopK(np.array([[1.0, 0.0], [np.nan, 0.0]], dtype=np.float32), 1)
    with pytest.raises(NumericError, match="2 item vectors"):
        ExactTopK(good, 1).add(0, np.full((2, 2), np.inf, dtype=np.float32))
