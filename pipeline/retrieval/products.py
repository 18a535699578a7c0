"""Collect the distinct products in prepared data, so that they can be searched without a separate catalogue file.

Products are considered equal if they have the same tokens. Collecting them needs 20 bytes of memory for each row of the
data, and the result takes 32 bytes for each distinct product.
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
from pipeline.data.shards import TokenRows, text_hashes
from pipeline.data.tokenizer import Tokens, take

# Helpers for texts that are represented by token ids.


def to_tokens(padded: npt.NDArray[np.integer], pad_id: int) -> Tokens:
    """Convert padded token ids [N, T] to `Tokens`, which removes the padding."""
    is_token = padded != pad_id
    offsets = np.concatenate([[0], np.cumsum(is_token.sum(axis=1))]).astype(np.int64)
    return Tokens(padded[is_token].astype(np.int32), offsets)


def join_tokens(parts: Sequence[Tokens], order: Int64s | None = None) -> Tokens:
    """Concatenate texts. If `order` is given, only return the texts with these indices, in this order."""
    lengths = np.concatenate([np.zeros(0, dtype=np.int64), *(part.lengths for part in parts)])
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *(part.ids for part in parts)])
    joined = Tokens(ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return joined if order is None else take(joined, order)


def decode_tokens(tokens: Tokens, tokenizer: bytes) -> list[str]:
    """Convert token ids back to texts, using a tokenizer.json.

    Note that the original text cannot be fully restored. Truncated text, characters that are not in the vocabulary, and
    everything that the normaliser removes (such as case) is lost.
    """
    ids = tokens.ids.tolist()
    lists = [ids[start:end] for start, end in pairwise(tokens.offsets.tolist())]
    return _tokenizer(tokenizer).decode_batch(lists, skip_special_tokens=True)


@lru_cache(maxsize=1)  # loading a vocabulary takes as long as decoding thousands of texts
def _tokenizer(text: bytes) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(text.decode())


@dataclass(frozen=True)
class Products:
    """N distinct products, which are called items and are numbered in the order of their first occurrence.

    Args:
        sources: The rows that contain the products.
        location: The source, bucket and row [N, 3] of each item.
        hashes: The text hashes [N] of all items, sorted.
        items: The item number [N] that belongs to each hash.
        num_distinct: Number of distinct products before the number of items was limited.
    """

    sources: Sequence[TokenRows]
    location: Int64s
    hashes: UInt64s
    items: Int64s
    num_distinct: int

    def __len__(self) -> int:
        return len(self.location)

    def item_numbers(self, hashes: UInt64s) -> Int64s:
        """Look up the item numbers of text hashes. The number of an unknown text is -1."""
        if not len(self.hashes):
            return np.full(len(hashes), -1, dtype=np.int64)
        indices = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        return np.where(self.hashes[indices] == hashes, self.items[indices], -1)

    def windows(self, rows: int, select: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]:
        """Iterate over windows of `rows` items, yielding the number of the first item and the tokens of the window.

        Windows are skipped unless `select` returns True for the index of the window.
        """
        for number, first in enumerate(range(0, len(self), rows)):
            if select(number):
                yield first, self.tokens(first, first + rows)

    def tokens(self, start: int, stop: int) -> Tokens:
        location, parts = self.location[start:stop], []
        for number in np.unique(location[:, 0]).tolist():  # items are in the order of the sources
            source, (_, buckets, rows) = self.sources[number], location[location[:, 0] == number].T
            arrays = source.read(buckets, rows, len(source.buckets) - 1, ("product",))
            parts.append(to_tokens(arrays["product"], source.pad_id))
        return join_tokens(parts)


def distinct_products(sources: Sequence[TokenRows], required: UInt64s, max_items: int, stop: StopSignal) -> Products:
    """Collect the distinct products of all rows.

    If there are more than `max_items` products, only the `required` ones and a random sample of the others are kept.
    """
    block_hashes: list[UInt64s] = [np.zeros(0, dtype=np.uint64)]
    block_locations: list[Int64s] = [np.zeros((0, 3), dtype=np.int64)]
    total = sum(sum(rows.sizes) for rows in sources)
    with progress("looking for distinct products", total, "rows") as advance:
        for number, rows in enumerate(sources):
            for bucket, numbers in rows.blocks():
                stop.raise_if_set("looking for distinct products")
                arrays = rows.read(np.full(len(numbers), bucket), numbers, bucket, ("product",))
                unique, first = np.unique(text_hashes(arrays["product"], rows.pad_id), return_index=True)
                block_hashes.append(unique)
                location = np.full((len(unique), 3), (number, bucket, 0), dtype=np.int64)
                location[:, 2] = numbers[first]
                block_locations.append(location)
                advance(len(numbers))
    # The blocks are in row order, so the first index of a hash corresponds to its first occurrence.
    hashes, first = np.unique(np.concatenate(block_hashes), return_index=True)
    locations = np.concatenate(block_locations)[first]
    num_distinct = len(hashes)
    if num_distinct > max_items:
        is_required = np.isin(hashes, required)
        sampled = np.sort(np.lexsort((mix64(hashes), ~is_required))[: max(max_items, int(is_required.sum()))])
        hashes, locations = hashes[sampled], locations[sampled]
    order = np.lexsort((locations[:, 2], locations[:, 1], locations[:, 0]))
    items = np.empty(len(hashes), dtype=np.int64)
    items[order] = np.arange(len(hashes))
    return Products(sources, locations[order], hashes, items, num_distinct)
