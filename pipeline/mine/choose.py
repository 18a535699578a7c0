"""Which of a query's best products become its hard negatives. Pure.

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
    """Of Q queries the best items, best first: scores [Q, k] and items [Q, k], NONE where there are fewer.

    `best_positive` [Q]: the highest score of a positive of the query.
    """

    scores: Float64s
    items: Int64s
    best_positive: Float64s


@dataclass(frozen=True)
class Counts:
    """What became of the best products."""

    queries: int = 0
    negatives: int = 0
    judged: int = 0
    """Left out because they are judged."""
    passed_over: int = 0
    """Left out by skip_top."""
    above_margin: int = 0
    """Left out as likely positives."""
    nothing_found: int = 0
    """Queries for which nothing was found at all, as by a search by words that they share with no product."""

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def choose_negatives(found: Candidates, judged: JudgedItems, config: MineConfig) -> tuple[Int64s, Counts]:
    """Items [Q, negatives_per_query], best first, NONE behind the last."""
    real = found.items != NONE
    is_judged = judged.holds(found.items)
    unjudged = real & ~is_judged
    passed = unjudged & (np.cumsum(unjudged, axis=1) <= config.skip_top)
    ceiling, best = np.full(len(found.items), np.inf), found.best_positive  # the highest score of a negative, [Q]
    if config.relative_margin is not None:
        ceiling = np.minimum(ceiling, best - config.relative_margin * np.abs(best))
    if config.absolute_margin is not None:
        ceiling = np.minimum(ceiling, best - config.absolute_margin)
    above = unjudged & ~passed & (found.scores > ceiling[:, None])
    left = unjudged & ~passed & ~above
    left &= np.cumsum(left, axis=1) <= config.negatives_per_query
    negatives = np.full((len(found.items), config.negatives_per_query), NONE, dtype=np.int64)
    query, place = np.nonzero(left)
    negatives[query, (np.cumsum(left, axis=1) - 1)[query, place]] = found.items[query, place]
    counts = (len(negatives), left, is_judged, passed, above, ~real.any(axis=1))
    return negatives, Counts(*(int(np.sum(count)) for count in counts))
