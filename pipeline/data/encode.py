"""From token ids to fixed-shape arrays: buckets, truncation, padding. Vectorised; no loop over rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.batching import Bucket, assign_buckets
from pipeline.data.tokenizer import Tokens

CHARACTERS_PER_TOKEN = 16
"""Characters worth tokenising for each token there is room for: no text of real words needs more."""


def text_characters(buckets: Sequence[Bucket]) -> int:
    """Characters of a text worth tokenising to fill the largest bucket."""
    return CHARACTERS_PER_TOKEN * buckets[-1].product_tokens


def product_text(title: str, text: str, limit: int) -> str:
    """What the encoder reads of a product: the title, then the longer text, cut to `limit` characters."""
    return (f"{title} {text}" if text else title)[:limit]


def id_dtype(vocab_size: int) -> npt.DTypeLike:
    """uint16 when every id fits, else int32."""
    return np.uint16 if vocab_size <= 65_536 else np.int32


def pack(
    tokens: Tokens, index: Int64s, length: int, *, pad_id: int, sep_id: int, dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Texts `index` [n] as one array [n, length]: cut to `length` (the last token is then [SEP]) and padded."""
    lengths = np.minimum(tokens.lengths[index], length)
    places = np.arange(length)
    inside = places < lengths[:, None]
    packed = np.full((len(index), length), pad_id, dtype=dtype)
    packed[inside] = tokens.ids[(tokens.offsets[index][:, None] + places)[inside]]
    rows = np.flatnonzero(lengths)
    packed[rows, lengths[rows] - 1] = sep_id
    return packed


@dataclass(frozen=True)
class PairTokens:
    """Tokens of N pairs and where each goes: `bucket` [N]; `truncated` [N] bool; `num_tokens` [N] after truncation."""

    query: Tokens
    product: Tokens
    bucket: Int64s
    truncated: npt.NDArray[np.bool_]
    num_tokens: Int64s


def pair_tokens(query: Tokens, product: Tokens, buckets: Sequence[Bucket]) -> PairTokens:
    """Give every pair its bucket."""
    bucket = assign_buckets(query.lengths, product.lengths, buckets)
    query_size = np.array([shape.query_tokens for shape in buckets])[bucket]
    product_size = np.array([shape.product_tokens for shape in buckets])[bucket]
    return PairTokens(
        query,
        product,
        bucket,
        (query.lengths > query_size) | (product.lengths > product_size),
        np.minimum(query.lengths, query_size) + np.minimum(product.lengths, product_size),
    )
