"""Buckets: the few static shapes a run may use. One global batch belongs to one bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import ConfigError


@dataclass(frozen=True, order=True)
class Bucket:
    """One static shape: tokens per query and tokens per product (special tokens included)."""

    query_tokens: int
    product_tokens: int

    @property
    def name(self) -> str:
        return f"{self.query_tokens}x{self.product_tokens}"

    @staticmethod
    def parse(text: str) -> "Bucket":
        """Read `16x32` (query x product) or `32` (both)."""
        parts = text.lower().split("x")
        if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
            raise ConfigError(f"bucket {text!r}", expected="QUERYxPRODUCT tokens such as 16x32")
        sizes = [int(part) for part in parts]
        return Bucket(sizes[0], sizes[-1])


def check_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Order buckets from small to large and require each to fit in the next.

    The nesting lets samples left over from one bucket ride in the next larger one. Raises ConfigError.
    """
    ordered = tuple(sorted(set(buckets)))
    if not ordered or ordered[0].query_tokens < 3 or ordered[0].product_tokens < 3:
        raise ConfigError(
            f"buckets {[b.name for b in ordered]}", expected="at least one bucket, of 3 tokens or more a side"
        )
    for small, large in pairwise(ordered):
        if small.product_tokens > large.product_tokens:
            raise ConfigError(
                f"buckets {small.name} and {large.name} are not nested",
                expected="every bucket at least as long as the one before it on both sides",
            )
    return ordered


def assign_buckets(
    query_lengths: npt.NDArray[np.int64], product_lengths: npt.NDArray[np.int64], buckets: Sequence[Bucket]
) -> npt.NDArray[np.int64]:
    """The index of the smallest bucket that holds both texts; the largest (truncating) when none does.

    Shapes: lengths [N] -> [N]. `buckets` as returned by `check_buckets`.
    """
    query_index = np.searchsorted([b.query_tokens for b in buckets], query_lengths, side="left")
    product_index = np.searchsorted([b.product_tokens for b in buckets], product_lengths, side="left")
    return np.minimum(np.maximum(query_index, product_index), len(buckets) - 1)


def row_lengths(buckets: Sequence[Bucket], products: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Lengths of the rows of training, ascending. A row holds a query and `products` products, one after the other.

    The last length holds the largest bucket's texts in full. `wanted`: those before it; none: one for each bucket, for
    texts that fill five eighths of it (titles fill a little less), in multiples of 8.
    """
    full = [bucket.query_tokens + products * bucket.product_tokens for bucket in buckets]
    shorter = wanted or [-(-size * 5 // 64) * 8 for size in full]
    return (*sorted({length for length in shorter if length < full[-1]}), full[-1])
