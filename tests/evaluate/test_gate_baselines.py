"""The gate against simple tools: who is refused, who is warned of, and what is said."""

from dataclasses import replace

import numpy as np
import pytest

from bench.gate_pairs import METRICS, Population, equal, evenly_worse, population
from pipeline.core.arrays import Float64s
from pipeline.evaluate.config import GateConfig
from pipeline.evaluate.gate.compare import GateCheck, Side, Verdict
from pipeline.evaluate.gate.judge import Baseline, judge
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows

QUERIES = 1000
NDCG = "retrieval_ndcg@10"


@pytest.fixture(scope="module")
def uneven() -> Population:
    """The first of the two sees every row less clearly."""
    return population(evenly_worse(1.0), num_queries=QUERIES)


@pytest.fixture(scope="module")
def alike() -> Population:
    return population(equal, num_queries=QUERIES)


def verdict(
    candidate: ScoredRows,
    *baselines: Baseline,
    incumbent: ScoredRows | None = None,
    found: PerQuery | None = None,
    config: GateConfig | None = None,
) -> Verdict:
    config = config or GateConfig()
    return judge(
        Side(candidate, METRICS, retrieval=found),
        Side(incumbent, METRICS) if incumbent else None,
        config,
        searched=found is not None,
        baselines=baselines,
        seed=1,
    )


def against(found: Verdict) -> dict[str, GateCheck]:
    return {check.name.removeprefix("baseline "): check for check in found.checks if check.kind == "baseline"}


def figures(values: Float64s) -> PerQuery:
    return PerQuery(np.arange(len(values)), {NDCG: values})


def test_a_model_that_is_better_or_as_good_passes(uneven: Population, alike: Population) -> None:
    found = verdict(uneven.incumbent, Baseline("boosting", rows=uneven.candidate))
    assert found.promote
    assert {check.outcome for check in against(found).values()} == {"pass"}
    assert against(found)["boosting ndcg@10"].reason.startswith("beats boosting on ndcg@10: ")
    assert verdict(alike.candidate, Baseline("boosting", rows=alike.incumbent)).promote
    same = verdict(alike.candidate, Baseline("boosting", rows=alike.candidate))
    assert against(same)["boosting macro_f1"].reason.startswith("boosting is not better on macro_f1: ")


def test_retrieval_is_compared_query_by_query(alike: Population) -> None:
    stream = np.random.default_rng(3)
    ours = np.clip(stream.normal(0.5, 0.3, 200), 0, 1)
    worse = verdict(alike.candidate, Baseline("BM25", retrieval=figures(ours + 0.02)), found=figures(ours))
    check = against(worse)[f"BM25 {NDCG}"]
    assert check.outcome == "fail" and check.num_queries == 200, "2 points in each query are no chance"
    assert check.reason.startswith(f"BM25 is better on {NDCG}: ")
    shuffled = verdict(
        alike.candidate, Baseline("BM25", retrieval=figures(stream.permutation(ours + 0.02))), found=figures(ours)
    )
    check = against(shuffled)[f"BM25 {NDCG}"]
    assert check.outcome == "warn" and check.reason.startswith(f"BM25 may be better on {NDCG}: ")
    assert "200 queries do not tell it from chance" in check.reason
    assert shuffled.promote
    allowed = GateConfig(baseline_drops={NDCG: 0.03})
    passed = verdict(
        alike.candidate, Baseline("BM25", retrieval=figures(ours + 0.02)), found=figures(ours), config=allowed
    )
    assert against(passed)[f"BM25 {NDCG}"].outcome == "pass"


def test_bonferroni_counts_what_is_compared(alike: Population) -> None:
    ours = np.full(100, 0.5)
    tools = [Baseline("boosting", rows=alike.incumbent), Baseline("BM25", retrieval=figures(ours))]
    found = verdict(alike.candidate, *tools, found=figures(ours))
    assert len(against(found)) == 3
    assert found.baseline_confidence == pytest.approx(1 - 0.05 / 3)


def test_a_candidate_without_the_figure_does_not_get_away(alike: Population) -> None:
    found = verdict(alike.candidate, Baseline("BM25", retrieval=figures(np.full(90, 0.7))))
    check = against(found)[f"BM25 {NDCG}"]
    assert check.outcome == "fail" and not found.promote
    assert check.reason == (
        f"{NDCG} against BM25: the candidate has none (retrieval was not evaluated), BM25 has 0.7000"
    )


def test_two_labels_are_compared_at_their_thresholds() -> None:
    stream = np.random.default_rng(5)
    label = stream.integers(0, 2, 1500)
    query = np.repeat(np.arange(300), 5)

    def scored(noise: float) -> ScoredRows:
        match = 1 / (1 + np.exp(-(4 * (label - 0.5) + stream.normal(0, noise, 1500))))
        table = np.stack([1 - match, match], axis=1)
        return ScoredRows(query, label, label.astype(float), table, ("non_match", "match"), (0.0, 1.0))

    config = GateConfig(baseline_drops={"f1": 0.0})
    tool = Baseline("boosting", rows=scored(0.5), threshold=0.5)
    found = judge(Side(scored(4.0), METRICS, 0.5), None, config, baselines=[tool])
    assert against(found)["boosting f1"].outcome == "fail"
    without = judge(Side(scored(4.0), METRICS), None, config, baselines=[replace(tool, threshold=None)])
    assert against(without)["boosting f1"].outcome == "skipped", "neither has one"
    assert not without.promote
    untold = judge(Side(scored(4.0), METRICS, 0.5), None, config, baselines=[replace(tool, threshold=None)])
    assert against(untold)["boosting f1"].reason == (
        "f1 against boosting: cannot be computed for boosting: no threshold was chosen on the valid split"
    )


@pytest.mark.parametrize(("ours", "theirs", "outcome"), [(0.5, 0.1, "warn"), (0.1, 0.5, "fail"), (0.3, 0.3, "warn")])
def test_a_search_by_words_that_finds_nothing_is_no_pass(
    alike: Population, ours: float, theirs: float, outcome: str
) -> None:
    """It refuses where it is better all the same, and beating it alone promotes nothing."""
    weak = Baseline(
        "BM25", retrieval=figures(np.full(100, theirs)), weak="60 of 100 queries share no word with any item"
    )
    found = verdict(alike.candidate, weak, found=figures(np.full(100, ours)))
    assert against(found)[f"BM25 {NDCG}"].outcome == outcome and not found.promote
    if outcome == "warn":
        assert "60 of 100 queries share no word with any item" in " ".join(found.reasons)
        assert next(check for check in found.checks if check.kind == "comparison").outcome == "fail"
        both = verdict(
            alike.candidate, weak, Baseline("boosting", rows=alike.incumbent), found=figures(np.full(100, ours))
        )
        assert both.promote and not both.without_comparison
    strong = verdict(alike.candidate, replace(weak, weak=""), found=figures(np.full(100, ours)))
    assert strong.promote is (outcome == "warn")
