"""A window of tokens to the batches a device takes. Depends on the window alone: so do its vectors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from pipeline.backends import Batch
from pipeline.core.arrays import Int64s
from pipeline.data.tokenizer import Tokens, take
from pipeline.embed.packing import batches_by_length, pack_rows
from pipeline.embed.program import RowShape
from pipeline.embed.texts import cut_tokens

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
            row = packing.row[texts] - low
            start = row * shape.length + packing.start[texts]
            inside = _within(lengths[texts])
            target = np.repeat(start, lengths[texts]) + inside
            yield HostBatch(
                {
                    "tokens": _filled(shape, pad_id, target, take(tokens, texts).ids),
                    "positions": _filled(shape, 0, target, inside),
                    "segments": _filled(shape, 0, target, np.repeat(packing.slot[texts] + 1, lengths[texts])),
                },
                texts,
                row * shape.texts + packing.slot[texts],
                lengths[texts],
            )


def flat_batches(tokens: Tokens, budget: int, pad_id: int) -> Iterator[HostBatch]:
    """Batches of about `budget` tokens back to back, `ids` [S], with the longest texts first."""
    for texts in batches_by_length(tokens.lengths, budget):
        ids = take(tokens, texts).ids
        padded = np.full(-(-len(ids) // _STEP) * _STEP, pad_id, dtype=np.int32)
        padded[: len(ids)] = ids
        batch = {"ids": torch.from_numpy(padded)}
        yield HostBatch(batch, texts, np.arange(len(texts)), tokens.lengths[texts])


def _within(lengths: Int64s) -> Int64s:
    """0, 1, 2, ... for each text anew. [n] -> [sum]."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def _filled(shape: RowShape, empty: int, target: Int64s, values: npt.NDArray[np.integer]) -> torch.Tensor:
    """int32 [rows, length]: `values` at the flat places `target`, `empty` elsewhere."""
    flat = np.full(shape.rows * shape.length, empty, dtype=np.int32)
    flat[target] = values
    return torch.from_numpy(flat.reshape(shape.rows, shape.length))
