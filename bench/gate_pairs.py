"""Simulated pairs of models with a known difference: a large population of queries, from which holdouts are drawn."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.evaluate.config import GateConfig, MetricsConfig
from pipeline.evaluate.gate.compare import GateInput, Verdict
from pipeline.evaluate.gate.judge import Baseline, judge
from pipeline.evaluate.metrics.measure import metric_report
from pipeline.evaluate.metrics.ranking import Ranking, ndcg_by_query
from pipeline.evaluate.metrics.scored_rows import PerQuery, QueryGroups, ScoredRows, SliceColumn

LABELS, GAINS = ("irrelevant", "complement", "substitute", "exact"), (0.0, 0.01, 0.1, 1.0)
ROWS = 10  # of each query
METRICS = MetricsConfig()
SEARCHED = "retrieval_ndcg@10"
Change = Callable[[Float64s, np.random.Generator], Float64s]
"""Signal [N, K] of the incumbent to that of the candidate, both without their own noise."""


@dataclass(frozen=True, eq=False)
class Population:
    """Queries scored by both models. What the metrics say of all of them is the truth; a holdout is an even sample."""

    candidate: ScoredRows
    incumbent: ScoredRows

    @property
    def num_queries(self) -> int:
        return self.candidate.num_rows // ROWS

    def drop(self, metric: str, rows: Bools | None = None) -> float:
        """By how much the candidate is worse, in all rows or some."""
        sides = (self.candidate, self.incumbent)
        ours, theirs = (
            metric_report(one if rows is None else one.select(rows), METRICS).values[metric] for one in sides
        )
        return theirs - ours

    @cached_property
    def ndcg(self) -> tuple[Float64s, Float64s]:
        """nDCG@10 [Q] of each query, of candidate and incumbent."""
        candidate, incumbent = (
            ndcg_by_query(Ranking.of(QueryGroups.of(side.query_id), side.relevance), side.gain, 10)
            for side in (self.candidate, self.incumbent)
        )
        return candidate, incumbent

    def holdout(self, taken: Int64s) -> tuple[ScoredRows, ScoredRows]:
        """Candidate and incumbent on the queries `taken` [n], each draw a query of its own."""
        num_queries = len(taken)
        rows = (taken[:, None] * ROWS + np.arange(ROWS)).ravel()
        query = np.repeat(np.arange(num_queries), ROWS)
        return _taken(self.candidate, rows, query), _taken(self.incumbent, rows, query)

    def verdicts(
        self, config: GateConfig, num_queries: int, num_holdouts: int, seed: int, search: "Population | None" = None
    ) -> list[Verdict]:
        """What the gate says of the same two models on different holdouts; `search` as in `as_baseline`."""
        stream = np.random.default_rng([seed, num_queries])
        found = []
        for number in range(num_holdouts):
            taken = stream.integers(0, self.num_queries, num_queries)
            candidate, incumbent = self.holdout(taken)
            ours, theirs = search.searched(taken) if search else (None, None)
            verdict = judge(
                GateInput(candidate, METRICS, retrieval=ours),
                GateInput(incumbent, METRICS, retrieval=theirs),
                config,
                searched=search is not None,
                seed=seed + number,
            )
            found.append(verdict)
        return found

    def searched(self, taken: Int64s) -> tuple[PerQuery, PerQuery]:
        """nDCG@10 of the queries `taken` [n] as figures of retrieval, of candidate and incumbent."""
        candidate, incumbent = (PerQuery(np.arange(len(taken)), {SEARCHED: one[taken]}) for one in self.ndcg)
        return candidate, incumbent

    def as_baseline(
        self, search: "Population", config: GateConfig, num_queries: int, num_holdouts: int, seed: int
    ) -> list[Verdict]:
        """The same with the incumbent as a baseline of a first model; `search`: nDCG@10 of queries for retrieval."""
        stream = np.random.default_rng([seed, num_queries])
        found = []
        for number in range(num_holdouts):
            taken = stream.integers(0, self.num_queries, num_queries)
            candidate, tool = self.holdout(taken)
            ours, theirs = search.searched(taken)
            tools = [Baseline("boosting", rows=tool), Baseline("BM25", retrieval=theirs)]
            found.append(
                judge(GateInput(candidate, METRICS, retrieval=ours), None, config, baselines=tools, seed=seed + number)
            )
        return found


def population(change: Change, *, num_queries: int = 20_000, num_slices: int = 0, seed: int = 1) -> Population:
    """Two models that see the same rows with shared and own noise: they agree on most rows, as two retrainings do."""
    stream = np.random.default_rng(seed)
    rows = num_queries * ROWS
    label = stream.choice(4, rows, p=[0.2, 0.1, 0.3, 0.4]).astype(np.int64)
    signal = 1.5 * np.eye(4)[label] + stream.normal(0, 1.0, (rows, 4))
    sides = [_probabilities(one + stream.normal(0, 0.4, (rows, 4))) for one in (change(signal, stream), signal)]
    query = np.repeat(np.arange(num_queries), ROWS)
    slices: dict[str, SliceColumn] = {}
    if num_slices:
        names = tuple(f"category {number}" for number in range(num_slices))
        slices["category"] = SliceColumn(query % num_slices, names)
    gain = np.array(GAINS)[label]
    candidate, incumbent = (ScoredRows(query, label, gain, side, LABELS, GAINS, slices) for side in sides)
    return Population(candidate, incumbent)


def equal(signal: Float64s, stream: np.random.Generator) -> Float64s:
    """As good as the incumbent; only its own noise differs."""
    return signal


def evenly_worse(noise: float) -> Change:
    """Every row is seen less clearly."""
    return lambda signal, stream: signal + stream.normal(0, noise, signal.shape)


def broken_queries(share: float, noise: float = 6.0) -> Change:
    """Few queries are lost, the others are as before: the tail that a mean hides."""

    def change(signal: Float64s, stream: np.random.Generator) -> Float64s:
        lost = np.repeat(stream.random(len(signal) // ROWS) < share, ROWS)
        return signal + lost[:, None] * stream.normal(0, noise, signal.shape)

    return change


def worse_slice(num_slices: int, noise: float) -> Change:
    """The queries of the first slice are seen less clearly."""

    def change(signal: Float64s, stream: np.random.Generator) -> Float64s:
        first = np.repeat(np.arange(len(signal) // ROWS) % num_slices == 0, ROWS)
        return signal + first[:, None] * stream.normal(0, noise, signal.shape)

    return change


def _probabilities(logits: Float64s) -> Float64s:
    odds = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Float64s = odds / odds.sum(axis=1, keepdims=True)
    return probabilities


def _taken(side: ScoredRows, rows: Int64s, query: Int64s) -> ScoredRows:
    slices = {name: SliceColumn(column.codes[rows], column.names) for name, column in side.slices.items()}
    return replace(
        side,
        query_id=query,
        label=side.label[rows],
        gain=side.gain[rows],
        probabilities=side.probabilities[rows],
        slices=slices,
    )
