"""Parts put side by side: seeds of one side together, means over them, the best peer, intervals over queries."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from bench.quality.part import BM25, OURS, SPLIT_DIGITS, PartResult
from bench.results import Figure, Result, Target, figure, finish
from pipeline.evaluate.gate.compare import paired_bootstrap
from pipeline.evaluate.metrics.scored_rows import mean_over_queries

Sides = Mapping[str, list[PartResult]]
mean_figure = partial(figure, centre=statistics.fmean)


class Incomplete(Exception):
    """A table that cannot be made yet; why."""


@dataclass(frozen=True)
class Table:
    """What a result is made of."""

    bench: str
    title: str
    method: str
    figures: list[Figure]
    targets: tuple[Target, ...]
    settings: dict[str, str | int | float] = field(default_factory=dict)

    def finish(self) -> Result:
        """Judge, write, print."""
        return finish(
            self.bench,
            self.title,
            self.method,
            self.figures,
            target=self.targets[0] if self.targets else None,
            further=self.targets[1:],
            settings=self.settings,
            quick=False,
        )


def sides_of(parts: Sequence[PartResult]) -> dict[str, list[PartResult]]:
    """Seeds of one side together."""
    sides: dict[str, list[PartResult]] = defaultdict(list)
    for part in parts:
        sides[part.side].append(part)
    return dict(sides)


def values(runs: Sequence[PartResult], name: str) -> list[float]:
    """One figure of all seeds. Raises Incomplete for a seed without it."""
    for run in runs:
        if name not in run.figures:
            raise Incomplete(f"{run.name} has no {name}; run it again")
    return [run.figures[name] for run in runs]


def mean(runs: Sequence[PartResult], name: str) -> float:
    """Over seeds. Raises Incomplete."""
    return statistics.fmean(values(runs, name))


def best_peer(test: Sides, valid: Sides, metric: str) -> tuple[str, str]:
    """(The peer to beat, how it was chosen): on valid where all peers of the table were run there, else on test.

    A peer as its users have it: one with a part of ours in it (SPLIT_DIGITS) is shown beside it. Raises Incomplete
    without a peer, and when the best on valid has no part on test.
    """
    test, tried = _peers(test), _peers(valid)
    if not test:
        raise Incomplete("no peer was run on test")
    if set(test) <= set(tried):
        best = max(sorted(tried), key=lambda side: mean(tried[side], metric))
        if best not in test:
            raise Incomplete(f"the best peer on valid, {best}, was not run on test")
        return best, f"the best peer, {best}, was chosen on valid by {metric} among {len(tried)}"
    best = max(sorted(test), key=lambda side: mean(test[side], metric))
    return best, f"the best peer, {best}, was chosen on test by {metric} among {len(test)}, which favours it"


def _peers(sides: Sides) -> Sides:
    return {side: runs for side, runs in sides.items() if runs[0].part not in (OURS, BM25, SPLIT_DIGITS)}


def interval_figures(one: list[PartResult], others: Sides) -> list[Figure]:
    """95 % intervals over queries of the difference of seed means in nDCG@10. Raises Incomplete."""
    mine = mean_over_queries(_mean_by_query(one))
    found = paired_bootstrap(
        {name: (mine, mean_over_queries(_mean_by_query(runs))) for name, runs in others.items()},
        resamples=2000,
        seed=1,
        purpose="bench.quality",
    )
    made = []
    for name, difference in found.items():
        low, high = difference.interval(0.975)
        text = f"nDCG@10, mean of {one[0].side} minus mean of {name.replace('_', ' ')}: 95 % interval over queries"
        made += [figure(f"{name}_low", low, "", f"{text}, lower end")]
        made += [figure(f"{name}_high", high, "", f"{text}, upper end")]
    return made


def _mean_by_query(runs: list[PartResult]) -> npt.NDArray[np.float64]:
    if len({len(run.ndcg_by_query) for run in runs}) != 1:
        raise Incomplete(f"seeds of {runs[0].side} were asked different queries; run them again")
    average: npt.NDArray[np.float64] = np.mean([run.ndcg_by_query for run in runs], axis=0)
    return average
