"""The share of wrong verdicts, on fewer holdouts than `python -m bench.gate_rates` and with bounds it cannot miss."""

import pytest

from bench.gate_pairs import SEARCHED, Change, Population, broken_queries, equal, evenly_worse, population
from bench.gate_rates import promoted
from pipeline.evaluate.config import GateConfig

HOLDOUTS = 150
QUERIES = 200
AT_MOST = 0.05 + 3 * (0.05 * 0.95 / HOLDOUTS) ** 0.5
"""The 5 % that is stated, and 3 standard errors."""


def share_promoted(models: Population, config: GateConfig, queries: int = QUERIES) -> float:
    return promoted(models.verdicts(config.model_copy(update={"resamples": 500}), queries, HOLDOUTS, seed=7))


@pytest.mark.parametrize(
    ("metric", "change"),
    [
        ("ndcg@10", evenly_worse(0.5)),
        ("macro_f1", broken_queries(0.05)),
        pytest.param("ndcg@10", broken_queries(0.05), marks=pytest.mark.thorough),
        pytest.param("macro_f1", evenly_worse(0.5), marks=pytest.mark.thorough),
    ],
)
def test_a_candidate_worse_by_what_is_allowed_passes_in_at_most_5_percent(metric: str, change: Change) -> None:
    models = population(change, num_queries=5_000)
    assert share_promoted(models, GateConfig(drops={metric: models.drop(metric)}, slice_drops={})) <= AT_MOST


def test_a_candidate_worse_by_twice_what_is_allowed_hardly_ever_passes() -> None:
    models = population(evenly_worse(0.8), num_queries=5_000)
    config = GateConfig(drops={"ndcg@10": models.drop("ndcg@10") / 2}, slice_drops={})
    assert share_promoted(models, config) <= 0.02


def test_an_equal_candidate_passes_when_the_holdout_can_show_it() -> None:
    models = population(equal, num_queries=5_000)
    assert share_promoted(models, GateConfig(drops={"ndcg@10": 0.02}, slice_drops={})) >= 0.9


def test_an_equal_candidate_is_hardly_ever_refused_for_a_slice() -> None:
    """Every slice is worse by just what is allowed, the hardest case; all of them together err in 5 %."""
    models = population(evenly_worse(0.5), num_queries=5_000, num_slices=3)
    codes = models.candidate.slices["category"].codes
    allowed = max(models.drop("ndcg@10", codes == code) for code in range(3))
    assert share_promoted(models, GateConfig(drops={}, slice_drops={"ndcg@10": allowed})) >= 1 - AT_MOST


def test_a_candidate_no_worse_than_its_baselines_is_hardly_ever_refused() -> None:
    """Worse than each by just what is allowed, the hardest case; all comparisons together err in 5 %."""
    models, search = (population(evenly_worse(0.5), num_queries=5_000, seed=seed) for seed in (1, 2))
    drops = {metric: models.drop(metric) for metric in ("ndcg@10", "macro_f1")}
    drops |= {SEARCHED: float(search.ndcg[1].mean() - search.ndcg[0].mean())}
    config = GateConfig(baseline_drops=drops, resamples=500)
    assert promoted(models.as_baseline(search, config, QUERIES, HOLDOUTS, seed=7)) >= 1 - AT_MOST


def test_a_candidate_that_baselines_beat_is_refused() -> None:
    models = population(evenly_worse(1.5), num_queries=5_000)
    config = GateConfig(resamples=500)
    assert promoted(models.as_baseline(models, config, QUERIES, 40, seed=8)) <= 0.05
