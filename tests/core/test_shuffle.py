"""The order of samples: a bijection, pinned for ever, computed without memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.shuffle import mix64, permute, permute_runs, stream_key

KEYS = st.integers(0, 2**64 - 1)


@given(st.integers(0, 700), KEYS)
def test_permute_is_a_bijection_of_any_size(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(st.integers(1, 10**12), KEYS, st.data())
def test_permute_stays_in_range_and_keeps_the_shape(size: int, key: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8, unique=True))
    result = permute(np.array(positions).reshape(-1, 1), size, key)
    assert result.shape == (len(positions), 1) and result.dtype == np.int64
    assert len(set(result.ravel().tolist())) == len(positions)
    assert result.min() >= 0 and result.max() < size


def test_the_order_never_changes() -> None:
    """A change here changes what every running cycle trains on: it needs a new identity, not new numbers."""
    assert permute(np.arange(13), 13, 7).tolist() == [2, 8, 3, 10, 1, 5, 4, 7, 6, 11, 12, 0, 9]
    far = permute(np.array([0, 1, 999_999_999]), 10**9, stream_key(1, 2, 3))
    assert far.tolist() == [96207721, 680047880, 846181627]


def test_the_streams_never_change() -> None:
    assert stream_key(1, 2, 3) == 10753486135986107649
    assert stream_key(2**70 + 5, -1) == 15212506146343009075
    # Outputs 1 and 2 of splitmix64's finaliser are known from its authors' code.
    assert mix64(np.array([0, 1, 2**63], dtype=np.uint64)).tolist() == [0, 6238072747940578789, 2720858781877447050]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32), st.integers(0, 2**32))
def test_streams_of_one_seed_differ(seed: int, first: int, second: int) -> None:
    assert (stream_key(seed, first) == stream_key(seed, second)) == (first == second)
    assert stream_key(seed, first, second) != stream_key(seed, first)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13])
def test_every_place_is_equally_likely_over_keys(size: int) -> None:
    """A run with few batches an epoch must not favour an order. Fixed keys: 800 draws, 6 sigma of a binomial."""
    draws = 800
    images = np.array([permute(np.arange(size), size, stream_key(1, 1, epoch)) for epoch in range(draws)])
    counts = np.array([np.bincount(images[:, place], minlength=size) for place in range(size)])
    expected = draws / size
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


@given(st.integers(0, 700), KEYS, st.integers(1, 40))
def test_permute_runs_is_a_bijection_that_keeps_neighbours(size: int, key: int, run: int) -> None:
    found = permute_runs(np.arange(size), size, key, run)
    assert sorted(found.tolist()) == list(range(size))
    if run == 1:
        assert found.tolist() == permute(np.arange(size), size, key).tolist()
    elif size > run:
        whole = found[: size // run * run].reshape(-1, run)
        assert ((whole - whole[:, :1]) % size == np.arange(run)).all()


def test_another_key_keeps_other_neighbours_together() -> None:
    kept = {
        tuple(sorted(row)) for key in (1, 2) for row in permute_runs(np.arange(64), 64, key, 8).reshape(-1, 8).tolist()
    }
    assert len(kept) == 16


def test_the_order_of_runs_never_changes() -> None:
    assert permute_runs(np.arange(11), 11, 7, 3).tolist() == [4, 5, 6, 1, 2, 3, 7, 8, 9, 10, 0]
