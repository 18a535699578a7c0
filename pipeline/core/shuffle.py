"""Shuffle samples with keyed permutations that are computed on the fly, so that they never need to be stored.

The permutation is a Feistel network over the smallest domain with an even number of bits that holds `size` items.
Results outside [0, size) are encrypted again until they are in range ("cycle walking"). This yields a bijection of
[0, size) in O(1) memory for any size. See Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
"""

import numpy as np

from pipeline.core.arrays import Int64s, UInt64s

# With 4 rounds, one of the 5 positions that we tested deviated by 34% from a uniform distribution over 3,000 keys. With
# 8 rounds, no deviation was statistically significant.
_ROUNDS = 8
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = 2**64 - 1


def mix64(values: UInt64s) -> UInt64s:
    """Hash each element to 64 bits with the finalizer of splitmix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _MIX1
        values = (values ^ (values >> np.uint64(27))) * _MIX2
        return values ^ (values >> np.uint64(31))


def stream_key(seed: int, *parts: int) -> int:
    """Derive a 64-bit key from a seed and any number of integers, such as a purpose and an epoch."""
    key = seed & _MASK64
    for part in parts:  # this is mix64 in Python integers, which is 15 times faster than NumPy for a single value
        key = (key * int(_GOLDEN) + part + int(_GOLDEN)) & _MASK64
        key = ((key ^ (key >> 30)) * int(_MIX1)) & _MASK64
        key = ((key ^ (key >> 27)) * int(_MIX2)) & _MASK64
        key ^= key >> 31
    return key


def permute(positions: Int64s, size: int, key: int) -> Int64s:
    """Return the item at each of the given positions in a shuffled sequence of `size` items.

    Args:
        positions: int64 array of any shape with values in [0, size).
        size: number of items. Different positions always return different items.
        key: 64-bit key that selects the permutation, see `stream_key`.
    """
    if size <= 1:
        return np.zeros_like(positions)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    result = _encrypt(positions.astype(np.uint64), half_bits, key)
    outside = result >= np.uint64(size)
    while outside.any():  # the domain is less than 4 times `size`, so this takes less than 4 iterations on average
        result[outside] = _encrypt(result[outside], half_bits, key)
        outside = result >= np.uint64(size)
    return result.astype(np.int64)


def permute_runs(positions: Int64s, size: int, key: int, run: int) -> Int64s:
    """Shuffle like `permute`, but keep blocks of `run` neighboring items together and in order.

    The first block starts at an offset that depends on the key, and blocks wrap around at the end. As a result,
    different keys keep different items together. Items that don't fill a block are placed at the end.
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
