"""The gate: seeded candidates get the right verdict, for the right reason."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bench.gate_pairs import METRICS, Population, equal, evenly_worse, population, worse_slice
from pipeline.core.arrays import Bools
from pipeline.core.errors import DataError
from pipeline.evaluate.config import GateConfig, MetricsConfig
from pipeline.evaluate.gate.compare import GateCheck, Side, Verdict
from pipeline.evaluate.gate.judge import judge
from pipeline.evaluate.metrics.scored_rows import ScoredRows, SliceColumn
from tests.evaluate.holdouts import holdout, holdouts

QUERIES = 2000
NUM_SLICES = 10


@pytest.fixture(scope="module")
def alike() -> Population:
    """Two models that are equally good."""
    return population(equal, num_queries=QUERIES, num_slices=NUM_SLICES)


@pytest.fixture(scope="module")
def uneven() -> Population:
    """The candidate sees every row less clearly."""
    return population(evenly_worse(1.0), num_queries=QUERIES, num_slices=NUM_SLICES)


def verdict(
    candidate: ScoredRows, incumbent: ScoredRows | None, config: GateConfig | None = None, seed: int = 1
) -> Verdict:
    theirs = None if incumbent is None else Side(incumbent, METRICS)
    return judge(Side(candidate, METRICS), theirs, config or GateConfig(), searched=False, seed=seed)


def outcomes(found: Verdict) -> dict[str, str]:
    return {check.name: check.outcome for check in found.checks}


def check_of(found: Verdict, name: str) -> GateCheck:
    return next(check for check in found.checks if check.name == name)


def changed(rows: ScoredRows, where: Bools, probabilities: npt.ArrayLike) -> ScoredRows:
    """The same rows with other probabilities in some of them."""
    table = rows.probabilities.copy()
    table[where] = np.asarray(probabilities)
    return replace(rows, probabilities=table)


def test_a_better_candidate_is_promoted(uneven: Population) -> None:
    found = verdict(uneven.incumbent, uneven.candidate)
    assert found.promote
    assert set(outcomes(found).values()) == {"pass", "skipped"}
    assert outcomes(found)["search"] == "skipped" and not found.without_comparison
    assert "better" in check_of(found, "delta ndcg@10").reason


def test_an_equal_candidate_is_promoted(alike: Population) -> None:
    found = verdict(alike.candidate, alike.incumbent)
    assert found.promote, found.lines()
    low = check_of(found, "delta ndcg@10").low
    assert low is not None
    assert -0.01 < low < 0


def test_a_candidate_worse_everywhere_is_refused(uneven: Population) -> None:
    found = verdict(uneven.candidate, uneven.incumbent)
    assert not found.promote
    assert outcomes(found)["delta ndcg@10"] == outcomes(found)["delta macro_f1"] == "fail"
    assert any("with 95.0% confidence at least" in reason for reason in found.reasons)
    assert found.lines()[0].startswith("refuse: ")


def test_a_candidate_worse_in_one_slice_is_refused() -> None:
    models = population(worse_slice(NUM_SLICES, 1.5), num_queries=QUERIES, num_slices=NUM_SLICES)
    config = GateConfig(drops={"ndcg@10": 0.02}, slice_drops={"ndcg@10": 0.02})
    found = verdict(models.candidate, models.incumbent, config)
    assert outcomes(found)["delta ndcg@10"] == "pass"  # over all rows it is not worse by more than allowed
    failed = [check for check in found.checks if check.outcome == "fail"]
    assert [check.slice for check in failed] == ["category=category 0"]
    assert found.slice_confidence == pytest.approx(1 - 0.05 / NUM_SLICES)
    assert found.reasons == (failed[0].reason,)


def tiny(rows: ScoredRows, num_queries: int) -> ScoredRows:
    """The first queries become a slice of a column of their own."""
    codes = np.where(rows.query_id < num_queries, 0, 1)
    return replace(rows, slices={"shop": SliceColumn(codes, ("corner shop", "others"))})


@pytest.mark.parametrize("queries", [1, 10, 49])
def test_luck_on_a_tiny_slice_does_not_promote(uneven: Population, queries: int) -> None:
    """Perfect on few queries, worse on all others."""
    lucky = tiny(uneven.candidate, queries)
    lucky = changed(lucky, lucky.query_id < queries, np.eye(4)[lucky.label[lucky.query_id < queries]])
    found = verdict(lucky, uneven.incumbent)
    assert not found.promote
    assert outcomes(found)["slice shop"] == "skipped"
    assert "1 slice has fewer than 50 queries" in check_of(found, "slice shop").reason
    assert not [check for check in found.checks if check.slice == "shop=corner shop"]


@pytest.mark.parametrize("queries", [1, 10])
def test_bad_luck_on_a_tiny_slice_does_not_refuse(alike: Population, queries: int) -> None:
    unlucky = tiny(alike.candidate, queries)
    unlucky = changed(unlucky, unlucky.query_id < queries, [0.97, 0.01, 0.01, 0.01])
    assert verdict(unlucky, alike.incumbent).promote


def test_a_slice_of_few_queries_that_is_large_enough_is_not_refused_by_chance(alike: Population) -> None:
    """60 queries of which 2 are turned upside down, within what chance does: to know, not to refuse."""
    rows = tiny(alike.candidate, 60)
    lost = rows.query_id < 2
    worse = changed(rows, lost, np.eye(4)[3 - rows.label[lost]])
    found = verdict(worse, alike.incumbent, GateConfig(slice_drops={"ndcg@10": 0.005}))
    assert found.promote, found.lines()
    assert outcomes(found)["slice ndcg@10 shop=corner shop"] == "warn"
    assert "do not tell it from chance" in " ".join(found.reasons)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite_are_refused(alike: Population, bad: float) -> None:
    for broken_side in ("candidate", "incumbent"):
        sides = {"candidate": alike.candidate, "incumbent": alike.incumbent}
        where = np.zeros(alike.candidate.num_rows, dtype=bool)
        where[7] = True
        sides[broken_side] = changed(sides[broken_side], where, bad)
        found = verdict(sides["candidate"], sides["incumbent"])
        assert not found.promote
        assert found.reasons == (f"1 of 20,000 rows have NaN or infinite scores of the {broken_side}",)


def test_too_few_queries_promote_nothing(alike: Population) -> None:
    few = alike.candidate.query_id < 49
    found = verdict(alike.incumbent.select(few), alike.incumbent.select(few))  # even the very same model
    assert not found.promote
    assert "not enough test queries: 49, at least 50 needed" in found.reasons[0]
    assert {(check.num_queries, check.needed_queries) for check in found.checks if check.kind == "delta"} == {(49, 50)}


def test_lines_for_people_name_what_matters_and_count_the_rest(alike: Population, uneven: Population) -> None:
    lines = verdict(alike.candidate, alike.incumbent).lines()
    assert lines[0] == "promote: 22 checks passed, 1 not applicable (2,000 queries, 20,000 rows)"
    assert lines[-1] == "  pass    20 comparisons of slices"
    assert len(lines) == 5
    refused = verdict(uneven.candidate, uneven.incumbent)
    lines = refused.lines()
    failed = [check for check in refused.checks if check.outcome == "fail"]
    assert lines[0].startswith(f"refuse: {len(failed)} failed, ")
    assert lines[1 : len(failed) + 1] == [f"  fail    {check.reason}" for check in failed]


def test_a_candidate_that_loses_a_metric_in_a_slice_is_to_be_known() -> None:
    """It calls nothing a match there, so that it has no precision."""
    query = range(120)
    incumbent = holdout(query, [1, 0] * 60, [[0.1, 0.9], [0.9, 0.1]] * 60)
    incumbent = replace(incumbent, slices={"a": SliceColumn(np.arange(120) // 60, ("x", "y"))})
    candidate = changed(incumbent, np.arange(120) < 60, [0.6, 0.4])
    config = GateConfig(drops={"accuracy": 0.9}, slice_drops={"precision": 0.1})
    ours, theirs = Side(candidate, METRICS, 0.5), Side(incumbent, METRICS, 0.5)
    found = judge(ours, theirs, config)
    assert outcomes(found)["slice precision a=x"] == "warn"
    assert outcomes(found)["slice precision a=y"] == "pass"
    both = judge(ours, ours, config)
    assert outcomes(both)["slice precision a=x"] == "skipped"


def test_nothing_compared_is_said() -> None:
    rows = holdout(range(60), [1] * 60, [[0.2, 0.8]] * 60)
    found = verdict(rows, rows, GateConfig(drops={}, slice_drops={}))
    assert outcomes(found) == {"incumbent": "warn", "comparison": "warn"}
    assert found.promote and found.without_comparison
    assert "gate.drops is empty" in found.reasons[0]
    floor = verdict(rows, rows, GateConfig(drops={}, slice_drops={}, floors={"accuracy": 0.1}))
    assert floor.promote and not floor.without_comparison


def test_each_model_has_its_own_threshold() -> None:
    label, score = [1, 0] * 40, np.tile([0.6, 0.2], 40)
    rows = holdout(range(80), label, np.stack([1 - score, score], axis=1).tolist())
    config = GateConfig(drops={"f1": 0.1}, slice_drops={})

    def promoted(ours: float | None, theirs: float | None) -> bool:
        return judge(Side(rows, METRICS, ours), Side(rows, METRICS, theirs), config).promote

    assert promoted(0.4, 0.5)
    assert promoted(0.4, 0.1)
    assert not promoted(0.1, 0.4)
    assert not promoted(None, 0.4)


def differently(rows: ScoredRows) -> Mapping[str, ScoredRows]:
    return {
        "query_id": replace(rows, query_id=rows.query_id + 1),
        "label": replace(rows, label=(rows.label + 1) % 4),
        "gain": replace(rows, gain=rows.gain + 0.5),
        "rows": rows.select(rows.query_id > 0),
        "labels": replace(rows, labels=("a", "b", "c", "d")),
    }


@pytest.mark.parametrize("what", ["query_id", "label", "gain", "rows", "labels"])
def test_scores_of_another_holdout_are_an_error(alike: Population, what: str) -> None:
    with pytest.raises(DataError, match="not scored on the same holdout"):
        verdict(alike.candidate, differently(alike.incumbent)[what])


def test_the_same_input_gives_the_same_verdict_and_goes_through_json(alike: Population) -> None:
    first, second = (verdict(alike.candidate, alike.incumbent, seed=3) for _ in range(2))
    assert first == second
    assert Verdict.model_validate_json(first.model_dump_json()) == first
    assert verdict(alike.candidate, alike.incumbent, seed=4) != first


@given(holdouts(), st.data())
def test_any_holdout_gets_a_verdict_with_reasons(rows: ScoredRows, data: st.DataObject) -> None:
    size = rows.num_rows
    other = replace(rows, probabilities=np.roll(rows.probabilities, data.draw(st.integers(0, size)), axis=0))
    codes = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size)), dtype=np.int64)
    rows = replace(rows, slices={"column": SliceColumn(codes, ("a", "b", "c"))})
    names = ["ndcg@10", "macro_f1", "mrr", "ece", "loss", "f1:exact", "roc_auc"]
    config = GateConfig(
        floors={"accuracy": 0.5}, drops=dict.fromkeys(names, 0.05), slice_drops=dict.fromkeys(names, 0.1),
        min_queries=2, min_slice_queries=2, resamples=200,
    )  # fmt: skip
    found = judge(Side(rows, MetricsConfig(), 0.5), Side(other, MetricsConfig(), 0.5), config)
    assert found.promote is all(check.outcome != "fail" for check in found.checks)
    assert all(check.reason for check in found.checks)
    assert len({check.name for check in found.checks}) == len(found.checks)
    assert Verdict.model_validate_json(found.model_dump_json()) == found  # no NaN anywhere
    assert "nan" not in " ".join(found.lines()).lower().split()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("floors", {"ndgc@10": 0.5}),
        ("floors", {"accuracy": float("nan")}),
        ("drops", {"accuracy": -0.1}),
        ("drops", {"accuracy": float("inf")}),
        ("slice_drops", {"retrieval_mrr": 0.1}),
        ("confidence", 1.0),
        ("confidence", 0.4),
        ("resamples", 10),
        ("min_queries", 1),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ValidationError):
        GateConfig.model_validate({setting: value})
