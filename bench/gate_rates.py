"""How often the gate is wrong, on simulated pairs of models whose difference is known."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gate_pairs import SEARCHED, Population, broken_queries, equal, evenly_worse, population, worse_slice
from bench.results import Figure, Result, Target, figure, finish
from pipeline.evaluate.config import GateConfig
from pipeline.evaluate.gate.compare import Verdict

NAME = "gate_rates"
TITLE = "The gate: promoting a model that is worse by just what is allowed, at 95 % confidence"
METHOD = """
20,000 simulated queries of 10 rows and 4 grades, scored by two models that share most of their noise; metrics of all of
them are the truth. Holdouts are drawn from them with replacement and judged as in trnpipe evaluate (2,000 bootstrap
draws). False acceptance: the share of holdouts on which a candidate is promoted whose true drop is exactly the one
allowed, the hardest case; the figure that is judged is the worst of three kinds of drop at 500 queries. The bound is
the 5 % that is stated, and 2 standard errors of 1,000 holdouts. False refusal: the share on which a candidate that is
as good is refused, with the default settings; the nDCG@10 of further such pairs stands for that of search. Baselines:
the same pairs, the incumbent in the place of boosting and (the further pairs) of BM25, in three comparisons; the share
on which a first model is refused.
"""
TARGET = Target(figure="false_acceptance", comparison="<=", value=0.065)
NUM_SLICES = 10
LOST = 0.03  # share of queries


@dataclass(frozen=True)
class Size:
    """How much is simulated."""

    holdouts: int
    large_holdouts: int
    queries: int


FULL, QUICK = Size(1000, 400, 20_000), Size(20, 4, 2_000)


def promoted(verdicts: Sequence[Verdict]) -> float:
    return float(np.mean([verdict.promote for verdict in verdicts]))


def at_the_bound(models: Population, metric: str, num_queries: int, size: Size, *, times: float = 1.0) -> float:
    """Share of holdouts on which a candidate passes that is worse by `times` what is allowed."""
    config = GateConfig(drops={metric: models.drop(metric) / times}, slice_drops={})
    return promoted(models.verdicts(config, num_queries, size.holdouts, seed=2))


def acceptance(size: Size) -> list[Figure]:
    """Candidates that are worse."""
    even = population(evenly_worse(0.5), num_queries=size.queries)
    lost = population(broken_queries(LOST), num_queries=size.queries)
    cases = {
        "ndcg_even_500": (even, "ndcg@10", 500, "nDCG@10, every query a little worse, 500 queries"),
        "ndcg_lost_500": (lost, "ndcg@10", 500, "nDCG@10, 3 % of the queries lost, 500 queries"),
        "f1_even_500": (even, "macro_f1", 500, "macro F1, every query a little worse, 500 queries"),
        "ndcg_even_100": (even, "ndcg@10", 100, "nDCG@10, every query a little worse, 100 queries"),
        "ndcg_lost_100": (lost, "ndcg@10", 100, "nDCG@10, 3 % of the queries lost, 100 queries"),
    }
    figures = [
        _share(name, at_the_bound(models, metric, queries, size), f"false acceptance: {text}")
        for name, (models, metric, queries, text) in cases.items()
    ]
    worst = max(one.value for one in figures if one.name.endswith("_500"))
    twice = at_the_bound(even, "ndcg@10", 500, size, times=2.0)
    return [
        _share("false_acceptance", worst, "the worst of three kinds of drop, 500 queries"),
        *figures,
        _share("twice", twice, "promoted: worse by twice what is allowed, nDCG@10, 500 queries"),
    ]


def one_slice(size: Size) -> list[Figure]:
    """A candidate that is as good but for one slice in ten, default settings."""
    models = population(worse_slice(NUM_SLICES, 1.5), num_queries=size.queries, num_slices=NUM_SLICES)
    drop = models.drop("ndcg@10", models.candidate.slices["category"].codes == 0)
    slices_only = GateConfig(drops={}, slice_drops={"ndcg@10": 0.02})
    share = promoted(models.verdicts(slices_only, 1500, size.holdouts, seed=3))
    return [
        figure("slice_drop", drop, "nDCG@10", "true drop in the one slice that is worse"),
        _share("one_lost_slice", share, "promoted: 1 of 10 slices of 150 queries worse by that, 0.02 allowed"),
    ]


def refusal(size: Size) -> list[Figure]:
    """Candidates that are as good, and the worst case of the slices."""
    models, search = (population(equal, num_queries=size.queries, seed=seed) for seed in (1, 2))
    figures = []
    for queries, holdouts in ((500, size.holdouts), (1500, size.holdouts), (5000, size.large_holdouts)):
        refused = 1 - promoted(models.verdicts(GateConfig(), queries, holdouts, seed=4, search=search))
        figures.append(
            _share(f"equal_{queries}", refused, f"false refusal: as good, {queries:,} queries, default gate")
        )
    models = population(equal, num_queries=size.queries, num_slices=NUM_SLICES)
    config = GateConfig(drops={})
    refused = 1 - promoted(models.verdicts(config, 1000, size.holdouts, seed=5))
    figures.append(_share("slices_equal", refused, "false refusal by a slice: as good, 10 slices of 100 queries"))
    models = population(evenly_worse(0.5), num_queries=size.queries, num_slices=NUM_SLICES)
    codes = models.candidate.slices["category"].codes
    allowed = max(models.drop("ndcg@10", codes == code) for code in range(NUM_SLICES))
    config = GateConfig(drops={}, slice_drops={"ndcg@10": allowed})
    refused = 1 - promoted(models.verdicts(config, 1000, size.holdouts, seed=6))
    text = "false refusal by a slice: every slice worse by just what is allowed"
    return [*figures, _share("slices_at_the_bound", refused, text)]


def against_baselines(size: Size) -> list[Figure]:
    """A first model held against baselines: worse than each by just what is allowed, as good, and worse."""
    figures = []
    for queries, change, name, text in (
        (500, evenly_worse(0.5), "at_the_bound_500", "worse by just what is allowed, 500 queries"),
        (100, evenly_worse(0.5), "at_the_bound_100", "the same, 100 queries"),
        (500, broken_queries(LOST), "at_the_bound_lost_500", "the same, in 3 % of the queries, 500 queries"),
        (500, equal, "equal_500", "as good, default gate, 500 queries"),
    ):
        models, search = (population(change, num_queries=size.queries, seed=seed) for seed in (1, 2))
        drops = {metric: models.drop(metric) for metric in ("ndcg@10", "macro_f1")}
        drops |= {SEARCHED: float(np.nanmean(search.ndcg[1]) - np.nanmean(search.ndcg[0]))}
        config = GateConfig() if change is equal else GateConfig(baseline_drops=drops)
        refused = 1 - promoted(models.as_baseline(search, config, queries, size.holdouts, seed=7))
        figures.append(_share(f"baselines_{name}", refused, f"false refusal by a baseline: {text}"))
    models, search = (population(evenly_worse(0.6), num_queries=size.queries, seed=seed) for seed in (1, 2))
    drop = models.drop("ndcg@10")
    figures.append(figure("baselines_drop", drop, "nDCG@10", "true drop against a baseline that is better"))
    for queries in (75, 500):
        refused = 1 - promoted(models.as_baseline(search, GateConfig(), queries, size.holdouts, seed=8))
        text = f"refused: every baseline is better by about that, {queries} queries"
        figures.append(_share(f"baselines_better_{queries}", refused, text))
    return figures


def _share(name: str, value: float, text: str) -> Figure:
    return figure(name, value, "share", text)


def run(*, quick: bool) -> Result:
    """All simulations, about 15 minutes of one core."""
    size = QUICK if quick else FULL
    figures = [*acceptance(size), *one_slice(size), *refusal(size), *against_baselines(size)]
    settings: dict[str, str | int | float] = {"holdouts": size.holdouts, "holdouts_of_5000": size.large_holdouts}
    return finish(NAME, TITLE, METHOD, figures, quick=quick, target=TARGET, settings=settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few holdouts: proves that the script works")
    run(quick=parser.parse_args().quick)
