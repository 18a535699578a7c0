"""Which texts share a batch or a row, so that little of it is padding. Pure: lengths in, places out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Int64s


@dataclass(frozen=True)
class Packing:
    """N texts in R rows of static lengths.

    `bucket` [R]: index of each row's length, the longest rows first. Text i is in row `row[i]`, from token `start[i]`
    on, as text number `slot[i]` of that row; all [N].
    """

    bucket: Int64s
    row: Int64s
    start: Int64s
    slot: Int64s


def pack_rows(lengths: Int64s, row_lengths: Sequence[int], texts_per_row: Sequence[int]) -> Packing:
    """Put whole texts into rows, best fit with the longest first.

    Args:
        lengths: tokens of each text [N], each at least 1 and at most the longest row.
        row_lengths: ascending. A row is as short as its longest text allows.
        texts_per_row: the most texts of a row of each length.
    Only the number of texts of each length matters, so rows that look alike are made together.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= row_lengths[-1]:
        raise ValueError(f"texts of {lengths.min()} to {lengths.max()} tokens for rows of {row_lengths[-1]}")
    order = np.argsort(lengths, kind="stable")
    counts = np.bincount(lengths, minlength=1)
    taken = np.concatenate([[0], np.cumsum(counts)])  # first text of each length in `order` that has no row yet
    row, start, slot = (np.zeros(len(lengths), dtype=np.int64) for _ in range(3))
    bucket: list[Int64s] = []
    num_rows = 0
    while counts.any():
        kind = int(np.searchsorted(row_lengths, np.flatnonzero(counts)[-1]))
        pattern = _fill(counts, row_lengths[kind], texts_per_row[kind])
        sizes, repeats = np.unique(pattern, return_counts=True)
        num_alike = int((counts[sizes] // repeats).min())
        place = 0
        for number, size in enumerate(pattern):
            texts = order[taken[size] : taken[size] + num_alike]
            row[texts], start[texts], slot[texts] = num_rows + np.arange(num_alike), place, number
            taken[size] += num_alike
            counts[size] -= num_alike
            place += size
        bucket.append(np.full(num_alike, kind, dtype=np.int64))
        num_rows += num_alike
    return Packing(np.concatenate(bucket) if bucket else np.zeros(0, dtype=np.int64), row, start, slot)


def _fill(counts: Int64s, room: int, most: int) -> list[int]:
    """Lengths of the texts of one row: the longest left, then again and again the longest that still fits."""
    left, pattern = counts.copy(), list[int]()
    while room and len(pattern) < most:
        fitting = np.flatnonzero(left[: room + 1])
        if not len(fitting):
            break
        size = int(fitting[-1])
        num = min(int(left[size]), room // size, most - len(pattern))
        pattern += [size] * num
        left[size] -= num
        room -= num * size
    return pattern


def batches_by_length(lengths: Int64s, tokens: int) -> Iterator[Int64s]:
    """Texts in batches of at most `tokens` tokens, the longest first; a text longer than that has one for itself."""
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    first = 0
    while first < len(order):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + tokens, side="right")))
        yield order[first:last]
        first = last
