"""Texts by their token ids: equal ones are found by hash, whatever shape they are padded to; and as words again."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import tokenizers

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.order import mix64
from pipeline.data.tokenizer import Tokens, take

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
    """The texts of all parts one after the other, then those of `order` [M] (by their number)."""
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
    return tokenizers.Tokenizer.from_str(tokenizer.decode()).decode_batch(lists, skip_special_tokens=True)
