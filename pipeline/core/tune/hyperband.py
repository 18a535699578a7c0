"""Which trials of a search go on: Hyperband over asynchronous successive halving. Pure.

Li et al., "Hyperband" (JMLR 2018); Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020).
Brackets, their shares and the rule of promotion are those of Optuna's HyperbandPruner, and a test holds both against
each other. Optuna's notes that a trial has passed a rung before it answers, so a trial that was killed in between and
asks again is let through. Here the answer follows from the reported values alone: asked again, it is the same.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Hyperband:
    """Rungs at `min_steps` times powers of `reduction`; at each the best 1/`reduction` of a bracket go on.

    A trial belongs to one bracket. Bracket b is first asked at rung b: the later ones give slow starters time.
    """

    min_steps: int
    max_steps: int
    reduction: int

    @property
    def rungs(self) -> tuple[int, ...]:
        """Steps at which a trial is scored, rising; the last is the end of a full trial."""
        return (*(step for step in self._powers if step < self.max_steps), self.max_steps)

    @property
    def _powers(self) -> tuple[int, ...]:
        """min_steps * reduction^k up to max_steps."""
        steps = [self.min_steps]
        while steps[-1] * self.reduction <= self.max_steps:
            steps.append(steps[-1] * self.reduction)
        return tuple(steps)

    @property
    def shares(self) -> tuple[int, ...]:
        """Of each bracket, how many trials of their sum it gets."""
        brackets = len(self._powers)
        return tuple(
            math.ceil(brackets * self.reduction ** (brackets - 1 - bracket) / (brackets - bracket))
            for bracket in range(brackets)
        )

    def bracket_of(self, study: str, number: int) -> int:
        """The bracket of a trial: by a hash, so that every worker comes to the same."""
        shares = self.shares
        place = zlib.crc32(f"{study}_{number}".encode()) % sum(shares)
        return next(bracket for bracket, end in enumerate(accumulate(shares)) if place < end)

    def is_pruned(self, bracket: int, step: int, value: float, others: Sequence[float]) -> bool:
        """Whether a trial of `bracket` ends at `step` with `value` (higher is better).

        `others`: what the other trials of the bracket had at that step, of those that have come so far.
        """
        if step not in self._powers[bracket:]:
            return False
        competing = sorted([*others, value], reverse=True)
        # The first `reduction` - 1 trials of a rung cannot be a whole share: the best of them goes on.
        last_kept = max(1, len(competing) // self.reduction)
        return value < competing[last_kept - 1]
