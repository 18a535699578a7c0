"""The distinct products of prepared data, each known by its tokens: a catalogue without a catalogue file.

Memory: 20 bytes for each row of the data while it is looked through, then 32 for each distinct product.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import tokenizers

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.progress import progress
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.data.tokenizer import Tokens, take

# Texts by their token ids: equal ones are found by hash, whatever shape they are padded to; and as words again.

_PLACE = np.uint64(32)


def text_hashes(padded: npt.NDArray[np.integer], pad_id: int) -> UInt64s:
    """Token ids [N, T] padded on the right -> hashes [N], the same for any T. 64 bits: two texts in 10^19 collide."""
    tokens = padded.astype(np.uint64)
    places = np.arange(padded.shape[1], dtype=np.uint64) << _PLACE
    terms = np.where(padded == pad_id, np.uint64(0), mix64(tokens | places))
    return mix64(terms.sum(axis=1, dtype=np.uint64))


def to_tokens(padded: npt.NDArray[np.integer], pad_id: int) -> Tokens:
    """Token ids [N, T] padded on the right, back to back."""
    inside = padded != pad_id
    offsets = np.concatenate([[0], np.cumsum(inside.sum(axis=1))]).astype(np.int64)
    return Tokens(padded[inside].astype(np.int32), offsets)


def join_tokens(parts: Sequence[Tokens], order: Int64s | None = None) -> Tokens:
    """Join the texts of all parts, or those of `order` [M] (by their number)."""
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)])
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *(part.ids for part in parts)])
    joined = Tokens(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return joined if order is None else take(joined, order)


def decoded(tokens: Tokens, tokenizer: bytes) -> list[str]:
    """Texts [N] of token ids, by a tokenizer.json: pieces of words are joined again.

    Lost: what was cut off to fit the largest bucket, characters that are no token, and what the tokenizer's normaliser
    takes away (case and accents of the one trained here). Punctuation stands between spaces.
    """
    ids = tokens.ids.tolist()
    lists = [ids[start:end] for start, end in pairwise(tokens.offsets.tolist())]
    return _tokenizer(tokenizer).decode_batch(lists, skip_special_tokens=True)


@lru_cache(maxsize=1)  # reading a vocabulary takes as long as decoding thousands of texts
def _tokenizer(text: bytes) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(text.decode())


@dataclass(frozen=True)
class Products:
    """N items, numbered by where they occur first. `hashes` [N] ascending with the `items` [N] they belong to."""

    sources: Sequence[TokenRows]
    where: Int64s
    """[N, 3]: source, bucket and row of each item."""
    hashes: UInt64s
    items: Int64s
    num_distinct: int
    """Before the limit."""

    def __len__(self) -> int:
        return len(self.where)

    def numbers_of(self, hashes: UInt64s) -> Int64s:
        """Item numbers [M] of text hashes [M], -1 for those that are no item."""
        if not len(self.hashes):
            return np.full(len(hashes), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[places] == hashes, self.items[places], -1)

    def windows(self, rows: int, mine: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]:
        """Items in order, `rows` at a time: (number of the first, tokens); only windows whose number is `mine`."""
        for number, first in enumerate(range(0, len(self), rows)):
            if mine(number):
                yield first, self.tokens(first, first + rows)

    def tokens(self, start: int, stop: int) -> Tokens:
        where, parts = self.where[start:stop], []
        starts = np.flatnonzero(np.any(np.diff(where[:, :2], axis=0, prepend=-1), axis=1))
        for first, last in zip(starts, [*starts[1:], len(where)], strict=True):
            source, bucket = self.sources[where[first, 0]], int(where[first, 1])
            numbers = where[first:last, 2]
            arrays = source.read(np.full(len(numbers), bucket), numbers, bucket, ("product",))
            parts.append(to_tokens(arrays["product"], source.pad_id))
        return join_tokens(parts)


def distinct_products(sources: Sequence[TokenRows], wanted: UInt64s, max_items: int, stop: StopSignal) -> Products:
    """Look through all rows. Above `max_items` the products `wanted` (hashes) stay, and an even sample of the rest."""
    hashes: list[UInt64s] = [np.zeros(0, dtype=np.uint64)]
    where: list[Int64s] = [np.zeros((0, 3), dtype=np.int64)]
    total = sum(sum(rows.sizes) for rows in sources)
    with progress("looking for distinct products", total, "rows") as advance:
        for number, rows in enumerate(sources):
            for bucket, numbers in rows.blocks():
                stop.raise_if_set("looking for distinct products")
                arrays = rows.read(np.full(len(numbers), bucket), numbers, bucket, ("product",))
                found, first = np.unique(text_hashes(arrays["product"], rows.pad_id), return_index=True)
                hashes.append(found)
                place = np.full((len(found), 3), (number, bucket, 0), dtype=np.int64)
                place[:, 2] = numbers[first]
                where.append(place)
                advance(len(numbers))
    every, first = np.unique(np.concatenate(hashes), return_index=True)  # blocks come in order: the first place of each
    places = np.concatenate(where)[first]
    num_distinct = len(every)
    if num_distinct > max_items:
        is_wanted = np.isin(every, wanted)
        sampled = np.lexsort((mix64(every), ~is_wanted))[: max(max_items, int(is_wanted.sum()))]
        every, places = every[np.sort(sampled)], places[np.sort(sampled)]
    in_order = np.lexsort((places[:, 2], places[:, 1], places[:, 0]))
    items = np.empty(len(every), dtype=np.int64)
    items[in_order] = np.arange(len(every))
    return Products(sources, places[in_order], every, items, num_distinct)
