"""Keyed permutations of samples that are computed on the fly and never stored.

A Feistel network over the smallest even-bit domain that holds `size`, cycle-walked back into range (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002): a bijection of [0, size) in O(1) memory for any size.
"""

import numpy as np

from pipeline.core.arrays import Int64s, UInt64s

_ROUNDS = 8  # with 4, one of 5 positions was 34% off uniform over 3,000 keys, with 8 within chance
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = 2**64 - 1


def mix64(values: UInt64s) -> UInt64s:
    """Return an elementwise 64-bit hash, the finaliser of splitmix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _MIX1
        values = (values ^ (values >> np.uint64(27))) * _MIX2
        return values ^ (values >> np.uint64(31))


def stream_key(seed: int, *parts: int) -> int:
    """Return a 64-bit key for one use of a seed: (seed, purpose, epoch, ...)."""
    key = seed & _MASK64
    for part in parts:  # mix64 with Python integers, which is 15 times faster for a single value
        key = (key * int(_GOLDEN) + part + int(_GOLDEN)) & _MASK64
        key = ((key ^ (key >> 30)) * int(_MIX1)) & _MASK64
        key = ((key ^ (key >> 27)) * int(_MIX2)) & _MASK64
        key ^= key >> 31
    return key


def permute(positions: Int64s, size: int, key: int) -> Int64s:
    """Return the item at each position of a shuffled sequence of `size` items.

    Args:
        positions: int64 of any shape, each in [0, size).
        size: number of items. All positions map one to one onto [0, size).
        key: 64-bit key, see `stream_key`.
    """
    if size <= 1:
        return np.zeros_like(positions)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    result = _encrypt(positions.astype(np.uint64), half_bits, key)
    outside = result >= np.uint64(size)
    while outside.any():  # the domain is under 4 x size, so each walk takes under 4 rounds on average
        result[outside] = _encrypt(result[outside], half_bits, key)
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def permute_runs(positions: Int64s, size: int, key: int, run: int) -> Int64s:
    """Permute runs of `run` neighbouring items, which stay in order. O(1) memory.

    The first run starts at an item that the key selects, and the sequence wraps around, so that another key keeps other
    items together. Items that do not fill a run are last.
    """
    if run == 1 or size <= run:
        return permute(positions, size, key)
    runs = size // run
    run_index, offset = np.divmod(positions, run)
    is_full = run_index < runs
    run_index[is_full] = permute(run_index[is_full], runs, key)
    result: Int64s = (run_index * run + offset + stream_key(key, size) % size) % size
    return result


def _encrypt(values: UInt64s, half_bits: int, key: int) -> UInt64s:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    with np.errstate(over="ignore"):
        for round_index in range(_ROUNDS):
            round_key = np.uint64(stream_key(key, round_index))
            left, right = right, left ^ (mix64(right * _GOLDEN + round_key) & mask)
    return (left << shift) | right
