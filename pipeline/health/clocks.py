"""Clocks of nodes, compared by what must have happened before what, not by when something arrived.

In each round every node notes its time and then waits until all have done so. Its time in the next round is therefore
later, in truth, than everybody's in this one: with a, b the times of two nodes in a round and A, B those in the next,
their clocks are between b - A and B - a apart. However slow a node or the network is, this accuses no right clock; the
uncertainty is that of the shortest round, which over gloo takes a millisecond or less.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from pipeline.core.format import format_duration
from pipeline.health.verdict import CheckResult, Verdict

NAME = "clock"
ROUNDS = 10

Stamps = Mapping[int, float]
"""Seconds since 1970 by node, each on its own clock."""


@dataclass(frozen=True)
class Skew:
    """A clock is ahead of another by something between these two; negative: behind."""

    low_s: float
    high_s: float

    @property
    def ahead_s(self) -> float:
        """The best guess."""
        return (self.low_s + self.high_s) / 2

    @property
    def uncertainty_s(self) -> float:
        """The guess is wrong by this at most."""
        return abs(self.high_s - self.low_s) / 2

    @property
    def certain_s(self) -> float:
        """Ahead (or, negative, behind) by this at least; 0: maybe not at all."""
        return max(self.low_s, 0.0) or min(self.high_s, 0.0)


def skew(stamps: Sequence[Stamps], one: int, other: int) -> Skew:
    """How far the clock of `other` is ahead of that of `one`. `stamps`: two rounds or more."""
    bounds = [(now[other] - then[one], then[other] - now[one]) for now, then in pairwise(stamps)]
    return Skew(max(low for low, _ in bounds), min(high for _, high in bounds))


def clock_faults(stamps: Sequence[Stamps], max_skew_s: float) -> dict[int, CheckResult]:
    """What is to be said of the nodes whose clocks are surely more than `max_skew_s` from another's.

    `stamps`: one for each round, of the same nodes. Blamed is who disagrees with most, of equals the highest rank.
    """
    certain = {
        pair: found
        for pair in combinations(sorted(stamps[0]), 2)
        if abs((found := skew(stamps, *pair)).certain_s) > max_skew_s
    }
    faults: dict[int, CheckResult] = {}
    while certain:
        counts = Counter(node for pair in certain for node in pair)
        worst = max(counts, key=lambda node: (counts[node], node))
        other = next(one if two == worst else two for one, two in certain if worst in (one, two))
        faults[worst] = _result(Verdict.RETRY, skew(stamps, other, worst), other, max_skew_s)
        certain = {pair: found for pair, found in certain.items() if worst not in pair}
    return faults


def judge_clock(stamps: Sequence[Stamps], node: int, max_skew_s: float) -> CheckResult | None:
    """What `node` says of its own clock against that of the lowest node, who says nothing unless it is at fault."""
    fault, first = clock_faults(stamps, max_skew_s).get(node), min(stamps[0])
    if fault is not None or node == first:
        return fault
    return _result(Verdict.PASS, skew(stamps, first, node), first, max_skew_s)


def _result(verdict: Verdict, found: Skew, other: int, max_skew_s: float) -> CheckResult:
    order = "behind" if found.ahead_s < 0 else "ahead of"
    return CheckResult(
        NAME,
        verdict,
        f"{abs(found.ahead_s):.3g} s {order} node {other}, give or take {found.uncertainty_s:.2g} s",
        f"at most {format_duration(max_skew_s)} apart",
        "chronyc tracking on that machine",
        {"clock_ahead_s": round(found.ahead_s, 6), "uncertainty_s": round(found.uncertainty_s, 6)},
    )
