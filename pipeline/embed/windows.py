"""A window of tokens to the batches a device takes. Depends on the window alone: so do its vectors.

Texts of a row do not see each other (TextEncoder.rows). So a few static shapes fit any catalogue with little padding:
2.5 % of the tokens of 35,311 real titles in rows of 128 or 512 (`python -m bench.embed`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from pipeline.backends import Batch
from pipeline.core.arrays import Int64s
from pipeline.data.tokenizer import Tokens, take
from pipeline.embed.texts import cut_tokens

# Which texts share a batch or a row, so that little of it is padding. Pure: lengths in, places out.


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


_TOKENS_PER_TEXT = 4  # texts shorter than this on average leave room in their row


@dataclass(frozen=True)
class RowShape:
    """One static shape: `rows` rows of `length` tokens, each of at most `texts` texts."""

    rows: int
    length: int
    texts: int

    def blank(self) -> Batch:
        names = ("tokens", "positions", "segments")
        return {name: torch.zeros(self.rows, self.length, dtype=torch.int32) for name in names}


def row_shapes(buckets: Sequence[int], tokens: int, *, packed: bool = True) -> tuple[RowShape, ...]:
    """The shape of each bucket, `tokens` tokens or a little less; unless `packed`, with one text a row."""
    most = _TOKENS_PER_TEXT if packed else tokens
    return tuple(RowShape(tokens // length, length, max(1, length // most)) for length in buckets)


_STEP = 64
"""Tokens of a batch without static shape are a multiple of this: kernels are made for each number of them."""


@dataclass(frozen=True)
class HostBatch:
    """One batch before it goes to the device.

    `texts` [n]: which text of the window each vector is of; `places` [n]: where it is among the vectors that come back;
    `lengths` [n]: tokens of each, in the order in which they lie in the batch.
    """

    tensors: Batch
    texts: Int64s
    places: Int64s
    lengths: Int64s

    @property
    def num_slots(self) -> int:
        """Tokens of the batch, padding included."""
        return next(iter(self.tensors.values())).numel()


@dataclass(frozen=True)
class Distinct:
    """The different texts of a window; text i of the window is number `place[i]` of them."""

    tokens: Tokens
    place: Int64s


def distinct_texts(window: Tokens, limit: int, sep_id: int) -> Distinct:
    """Texts cut to `limit` tokens, equal ones once. One in eight of 35,311 real offers has the title of another."""
    lengths = window.lengths
    if not lengths.all():
        raise ValueError(f"text {int(lengths.argmin())} of a window has no token, not even [CLS]")
    tokens = cut_tokens(window, limit, sep_id) if lengths.max(initial=0) > limit else window
    data, numbers = tokens.ids.tobytes(), dict[bytes, int]()
    bounds = (tokens.offsets * tokens.ids.itemsize).tolist()
    place = np.fromiter(
        (numbers.setdefault(data[start:end], len(numbers)) for start, end in pairwise(bounds)),
        dtype=np.int64,
        count=len(bounds) - 1,
    )
    if len(numbers) == len(place):
        return Distinct(tokens, place)
    return Distinct(take(tokens, np.unique(place, return_index=True)[1]), place)


def row_batches(tokens: Tokens, shapes: Sequence[RowShape], pad_id: int) -> Iterator[HostBatch]:
    """Batches of static shapes: rows of several texts each, the last batch of a shape filled with empty rows."""
    lengths = tokens.lengths
    packing = pack_rows(lengths, [shape.length for shape in shapes], [shape.texts for shape in shapes])
    order = np.argsort(packing.row, kind="stable")
    for kind, shape in enumerate(shapes):
        rows = np.flatnonzero(packing.bucket == kind)
        for first in range(0, len(rows), shape.rows):
            low, high = rows[first], rows[min(first + shape.rows, len(rows)) - 1]
            texts = order[
                np.searchsorted(packing.row, low, sorter=order) : np.searchsorted(
                    packing.row, high, side="right", sorter=order
                )
            ]
            row, size = packing.row[texts] - low, lengths[texts]
            ends = np.cumsum(size)
            inside = np.arange(ends[-1]) - np.repeat(ends - size, size)  # 0, 1, 2, ... for each text anew
            target = np.repeat(row * shape.length + packing.start[texts], size) + inside
            batch: Batch = {}
            for name, empty, values in (
                ("tokens", pad_id, take(tokens, texts).ids),
                ("positions", 0, inside),
                ("segments", 0, np.repeat(packing.slot[texts] + 1, size)),
            ):
                flat = np.full(shape.rows * shape.length, empty, dtype=np.int32)
                flat[target] = values
                batch[name] = torch.from_numpy(flat.reshape(shape.rows, shape.length))
            yield HostBatch(batch, texts, row * shape.texts + packing.slot[texts], size)


def flat_batches(tokens: Tokens, budget: int, pad_id: int) -> Iterator[HostBatch]:
    """Batches of about `budget` tokens back to back, `ids` [S], with the longest texts first."""
    for texts in batches_by_length(tokens.lengths, budget):
        ids = take(tokens, texts).ids
        padded = np.full(-(-len(ids) // _STEP) * _STEP, pad_id, dtype=np.int32)
        padded[: len(ids)] = ids
        batch = {"ids": torch.from_numpy(padded)}
        yield HostBatch(batch, texts, np.arange(len(texts)), tokens.lengths[texts])
