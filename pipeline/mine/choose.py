"""Choose the hard negatives of a query among its best products. Pure.

The margins are those of Moreira et al., "NV-Retriever: Improving text embedding models with effective hard-negative
mining" (2024): what scores about as high as a positive is likely one that nobody has judged.
"""

from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.mine.config import MineConfig

NONE = -1


@dataclass(frozen=True)
class JudgedItems:
    """Judged items of Q queries back to back, ascending: those of query q are `items[offsets[q]:offsets[q + 1]]`."""

    offsets: Int64s
    items: Int64s
    positive: Bools

    def part(self, start: int, stop: int) -> "JudgedItems":
        first, last = self.offsets[start], self.offsets[stop]
        return JudgedItems(self.offsets[start : stop + 1] - first, self.items[first:last], self.positive[first:last])

    @property
    def query(self) -> Int64s:
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def holds(self, items: Int64s) -> Bools:
        """For items [Q, k] of the queries: which are judged."""
        if not len(self.items):
            return np.zeros(items.shape, dtype=np.bool_)
        width = int(max(self.items.max(), items.max(initial=0))) + 1
        known = self.query * width + self.items
        asked = np.arange(len(items))[:, None] * width + items
        places = np.minimum(np.searchsorted(known, asked), len(known) - 1)
        found: Bools = (known[places] == asked) & (items != NONE)
        return found


@dataclass(frozen=True)
class Candidates:
    """The best items of Q queries, best first: scores [Q, k] and items [Q, k], NONE after the last one.

    `best_positive` [Q]: the highest score of a positive of the query.
    """

    scores: Float64s
    items: Int64s
    best_positive: Float64s


@dataclass(frozen=True)
class Counts:
    """How many queries were mined for, how many negatives they got, and what was left out.

    `judged`: products that are judged; `above_margin`: likely positives; `nothing_found`: queries that share no word
    with any product, of a search by words.
    """

    queries: int = 0
    negatives: int = 0
    judged: int = 0
    above_margin: int = 0
    nothing_found: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def choose_negatives(found: Candidates, judged: JudgedItems, config: MineConfig) -> tuple[Int64s, Counts]:
    """Choose the items [Q, negatives_per_query] of each query, best first, NONE after the last one."""
    real = found.items != NONE
    is_judged = judged.holds(found.items)
    ceiling = np.full(len(found.items), np.inf)  # the highest score of a negative, [Q]
    if config.relative_margin is not None:
        ceiling = found.best_positive - config.relative_margin * np.abs(found.best_positive)
    above = real & ~is_judged & (found.scores > ceiling[:, None])
    kept = real & ~is_judged & ~above
    kept &= np.cumsum(kept, axis=1) <= config.negatives_per_query
    negatives = np.full((len(found.items), config.negatives_per_query), NONE, dtype=np.int64)
    query, place = np.nonzero(kept)
    negatives[query, (np.cumsum(kept, axis=1) - 1)[query, place]] = found.items[query, place]
    counts = (len(negatives), kept, is_judged, above, ~real.any(axis=1))
    return negatives, Counts(*(int(np.sum(count)) for count in counts))
