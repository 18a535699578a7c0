"""The gate: each rule on holdouts so small that a case takes milliseconds, and seeded candidates of known quality."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from bench.gate_pairs import Change, equal, evenly_worse, population, worse_slice
from pipeline.core.arrays import Bools, Float64s
from pipeline.core.errors import DataError
from pipeline.evaluate.config import DROPS, GateConfig, MetricName, MetricsConfig
from pipeline.evaluate.gate.compare import (
    Comparison,
    GateCheck,
    GateInput,
    Outcome,
    PairedDifference,
    Verdict,
    judge_overall,
    judge_refusal,
)
from pipeline.evaluate.gate.judge import Baseline, judge, nothing_compared, refusal_advice
from pipeline.evaluate.metrics.measure import Measured
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows, SliceColumn, mean_over_queries
from tests.evaluate.holdouts import holdout, holdouts

METRICS = MetricsConfig()
NDCG, ACCURACY = "retrieval_ndcg@10", "accuracy"


def rows(num_queries: int = 60, wrong: Sequence[int] = (), slices: Sequence[str] = ()) -> ScoredRows:
    """Two rows a query, right but for the queries that are `wrong`; `slices`: the value of each query, or ''."""
    query = [number for number in range(num_queries) for _ in "ab"]
    right = [[0.1, 0.9], [0.9, 0.1]]
    weights = [row for number in range(num_queries) for row in (right[::-1] if number in wrong else right)]
    found = holdout(query, [1, 0] * num_queries, weights)
    if not slices:
        return found
    names = tuple(dict.fromkeys(name for name in slices if name))
    codes = np.array([names.index(name) if name else -1 for name in slices for _ in "ab"])
    return replace(found, slices={"a": SliceColumn(codes, names)})


def searched(values: Sequence[float] | Float64s) -> PerQuery:
    return PerQuery(np.arange(len(values)), {NDCG: np.array(values, dtype=np.float64)})


def verdict(
    candidate: ScoredRows, incumbent: ScoredRows | None = None, *baselines: Baseline, **settings: Any
) -> Verdict:
    """`ours`, `theirs`: figures of retrieval by query; all other settings are of the gate, by default with no drops."""
    ours, theirs = settings.pop("ours", None), settings.pop("theirs", None)
    search = settings.pop("searched", ours is not None)
    warnings, thresholds = settings.pop("warnings", ()), settings.pop("thresholds", (None, None))
    config = GateConfig.model_validate({"drops": {}, "slice_drops": {}, "resamples": 200, **settings})
    return judge(
        GateInput(candidate, METRICS, thresholds[0], None if ours is None else searched(ours)),
        GateInput(incumbent, METRICS, thresholds[1], None if theirs is None else searched(theirs))
        if incumbent
        else None,
        config,
        searched=bool(search),
        baselines=baselines,
        warnings=warnings,
        seed=1,
    )


def check(found: Verdict, name: str) -> GateCheck:
    return next(one for one in found.checks if one.name == name)


def outcomes(found: Verdict) -> dict[str, str]:
    return {one.name: one.outcome for one in found.checks}


def changed(models: ScoredRows, where: Bools, probabilities: Any) -> ScoredRows:
    """The same rows with other probabilities in some of them."""
    table = models.probabilities.copy()
    table[where] = np.asarray(probabilities)
    return replace(models, probabilities=table)


# Candidates of known quality.


@pytest.mark.parametrize(
    ("change", "swapped", "promote"),
    [(evenly_worse(1.0), True, True), (equal, False, True), (evenly_worse(1.0), False, False)],
    ids=["better", "equal", "worse"],
)
def test_a_candidate_is_promoted_if_it_is_shown_not_to_be_worse(change: Change, swapped: bool, promote: bool) -> None:
    models = population(change, num_queries=2000, num_slices=10)
    pair = [models.candidate, models.incumbent][:: -1 if swapped else 1]
    found = judge(GateInput(pair[0], METRICS), GateInput(pair[1], METRICS), GateConfig(), searched=False)
    assert found.promote is promote and not found.without_comparison
    assert (outcomes(found)["delta ndcg@10"] == "pass") is (outcomes(found)["delta macro_f1"] == "pass") is promote
    assert found == judge(GateInput(pair[0], METRICS), GateInput(pair[1], METRICS), GateConfig(), searched=False)
    lines, failed = found.lines(), [one for one in found.checks if one.outcome == "fail"]
    assert lines[0].startswith("promote: 22 checks passed, " if promote else f"refuse: {len(failed)} failed, ")
    assert lines[1 : len(failed) + 1] == [f"  fail    {one.reason}" for one in failed]
    if promote:
        assert lines[-1] == "  pass    20 slice comparisons" and len(lines) == 5


def test_a_candidate_worse_in_one_slice_is_refused() -> None:
    models = population(worse_slice(10, 1.5), num_queries=2000, num_slices=10)
    drops = {"drops": {"ndcg@10": 0.02}, "slice_drops": {"ndcg@10": 0.02}}
    found = verdict(models.candidate, models.incumbent, **drops)
    assert outcomes(found)["delta ndcg@10"] == "pass"  # over all rows it is not worse by more than allowed
    failed = [one for one in found.checks if one.outcome == "fail"]
    assert [one.slice for one in failed] == ["category=category 0"] and found.reasons == (failed[0].reason,)
    assert found.slice_confidence == pytest.approx(1 - 0.05 / 10)


# Floors.


@pytest.mark.parametrize(
    ("metric", "bound", "outcome", "words"),
    [
        ("accuracy", 0.9, "pass", "at least 0.9 required"),
        ("accuracy", 1.0, "pass", "at least 1 required"),
        ("loss", 0.05, "fail", "at most 0.05 required"),
        ("loss", 0.2, "pass", "at most 0.2 required"),
        ("f1:exakt", 0.1, "fail", "cannot be computed"),
    ],
)
def test_a_floor(metric: str, bound: float, outcome: str, words: str) -> None:
    found = check(verdict(rows(), floors={metric: bound}), f"floor {metric}")
    assert found.outcome == outcome and words in found.reason and found.judges is (outcome == "pass")
    computed = "cannot" not in words
    assert (found.num_queries, found.candidate is None) == ((60, False) if computed else (None, True))
    assert found.needed_queries is None


@pytest.mark.parametrize(("queries", "needed"), [(59, 60), (60, None), (61, None)])
def test_a_floor_of_few_queries(queries: int, needed: int | None) -> None:
    found = verdict(rows(queries), floors={"accuracy": 0.1}, min_queries=60)
    assert check(found, "floor accuracy").needed_queries == needed and found.promote is (needed is None)


# Slices.


def test_the_confidence_is_shared_by_all_comparisons_of_slices_not_by_slices_alone() -> None:
    """Two metrics in three slices are six comparisons; one that cannot be made is none."""
    names = ["x", "y", "z"] * 60
    models = rows(180, slices=names), rows(180, slices=names)
    found = verdict(*models, slice_drops={"ndcg@10": 0.1, "accuracy": 0.1})
    compared = [one for one in found.checks if one.kind == "slice" and one.low is not None]
    assert len(compared) == 6 and found.slice_confidence == pytest.approx(1 - 0.05 / 6)
    found = verdict(*models, slice_drops={"ndcg@10": 0.1, "accuracy": 0.1, "f1:exakt": 0.1})
    assert found.slice_confidence == pytest.approx(1 - 0.05 / 6)
    assert outcomes(found)["slice f1:exakt a=x"] == "skipped"
    assert verdict(*models).slice_confidence == 0.95 == verdict(models[0]).slice_confidence


def test_rows_without_a_value_are_in_no_slice() -> None:
    names = [""] * 60 + ["x"] * 60
    found = verdict(rows(120, range(60), names), rows(120, slices=names), slice_drops={"accuracy": 0.1})
    assert [(one.slice, one.outcome) for one in found.checks if one.kind == "slice"] == [("a=x", "pass")]


def test_a_slice_in_which_few_queries_bear_on_a_metric_is_skipped() -> None:
    names, graded = ["x"] * 60 + ["y"] * 60, np.arange(240) >= 60
    both = [replace(rows(120, slices=names), gain=np.where(graded, np.tile([1.0, 0.0], 120), 0.0))] * 2
    found = verdict(*both, slice_drops={"ndcg@10": 0.1})  # type: ignore[arg-type]
    assert outcomes(found)["slice ndcg@10 a=x"] == "skipped" and outcomes(found)["slice ndcg@10 a=y"] == "pass"
    assert check(found, "slice ndcg@10 a=x").num_queries == 30


@pytest.mark.parametrize("few", [1, 10, 49])
def test_luck_on_a_small_slice_neither_promotes_nor_refuses(few: int) -> None:
    names = ["corner shop"] * few + ["others"] * (150 - few)
    right, settings = rows(150, slices=names), {"drops": {"accuracy": 0.35}, "slice_drops": {"accuracy": 0.1}}
    lucky = verdict(rows(150, range(few, 150), names), right, **settings)
    assert not lucky.promote and outcomes(lucky)["slice a"] == "skipped"
    assert "1 slice has fewer than 50 queries" in check(lucky, "slice a").reason
    assert not [one for one in lucky.checks if one.slice == "a=corner shop"]
    assert verdict(rows(150, range(few), names), right, **settings).promote is (few < 49)


def test_a_candidate_that_loses_a_metric_in_a_slice_is_to_be_known() -> None:
    """It calls nothing a match there, so that it has no precision."""
    incumbent = holdout(range(120), [1, 0] * 60, [[0.1, 0.9], [0.9, 0.1]] * 60)
    incumbent = replace(incumbent, slices={"a": SliceColumn(np.arange(120) // 60, ("x", "y"))})
    candidate = changed(incumbent, np.arange(120) < 60, [0.6, 0.4])
    settings: dict[str, Any] = {"slice_drops": {"precision": 0.1}, "thresholds": (0.5, 0.5)}
    found = outcomes(verdict(candidate, incumbent, **settings))
    assert (found["slice precision a=x"], found["slice precision a=y"]) == ("warn", "pass")
    assert outcomes(verdict(candidate, candidate, **settings))["slice precision a=x"] == "skipped"


# The incumbent.


@pytest.mark.parametrize(
    ("wrong", "outcome"), [((), "pass"), (range(30), "fail"), (range(6), "fail")], ids=["better", "worse", "not shown"]
)
def test_over_all_rows(wrong: Sequence[int], outcome: str) -> None:
    found = verdict(rows(wrong=wrong), rows(), drops={"accuracy": 0.05, "loss": 9.0})
    assert outcomes(found)["delta accuracy"] == outcome and outcomes(found)["delta loss"] == "pass"
    assert found.promote is (outcome == "pass") and not found.without_comparison


def test_search_is_compared_with_production_by_default() -> None:
    """Better pairs do not make up for worse vectors."""
    settings: dict[str, Any] = {"drops": DROPS}
    better: dict[str, Any] = {"ours": np.full(60, 0.7), "theirs": np.full(60, 0.7)}
    worse: dict[str, Any] = {"ours": np.full(60, 0.5), "theirs": np.full(60, 0.7)}
    assert GateConfig().drops == DROPS and NDCG in DROPS
    assert verdict(rows(), rows(), **settings, **better).promote
    found = verdict(rows(), rows(), **settings, **worse)
    assert not found.promote and outcomes(found)[f"delta {NDCG}"] == "fail"
    for side in ("ours", "theirs"):  # a side whose vectors could not be searched
        missing = verdict(rows(), rows(), **settings, **{**better, side: None, "searched": True})
        assert outcomes(missing)[f"delta {NDCG}"] == "fail" and not missing.promote
        assert ("the candidate" if side == "ours" else "the production model") in check(missing, f"delta {NDCG}").reason


@pytest.mark.parametrize(
    ("drops", "is_searched", "compared", "note"),
    [
        (DROPS, True, True, None),
        (DROPS, False, False, "skipped"),
        ({"accuracy": 0.1}, True, False, "warn"),
        ({"accuracy": 0.1}, False, False, "skipped"),
        ({NDCG: 0.1}, True, True, None),
        ({NDCG: 0.1}, False, True, None),  # asked for by name: refused as it is not there
        ({}, True, False, None),
    ],
)
def test_when_search_is_compared_and_what_is_said_when_not(
    drops: dict[str, float], is_searched: bool, compared: bool, note: str | None
) -> None:
    both: dict[str, Any] = {"ours": np.full(60, 0.7), "theirs": np.full(60, 0.7)} if is_searched else {}
    found = verdict(rows(), rows(), drops=drops, searched=is_searched, **both)
    assert (f"delta {NDCG}" in outcomes(found)) is compared
    assert outcomes(found).get("search") == note
    assert found.promote is not (drops == {NDCG: 0.1} and not is_searched)
    assert "search" not in outcomes(verdict(rows(), floors={"accuracy": 0.1}, drops=drops, searched=is_searched))


def test_a_first_model_with_too_few_queries_says_so_once() -> None:
    against = [
        GateCheck(
            name=tool,
            kind="baseline",
            outcome="skipped",
            reason="long",
            baseline=tool,
            num_queries=17,
            needed_queries=50,
        )
        for tool in ("BM25", "boosting", "boosting")
    ]
    check = nothing_compared(against, GateConfig(), first=True)
    assert check.reason == (
        "nothing to compare with: no production model, no gate.floors,"
        " not enough test queries to compare with BM25 and boosting: 17, at least 50 needed"
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["candidate", "incumbent"])
def test_scores_that_are_not_finite_are_refused(bad: float, side: str) -> None:
    sides = {"candidate": rows(), "incumbent": rows()}
    sides[side] = changed(rows(), np.arange(120) == 7, bad)
    found = verdict(sides["candidate"], sides["incumbent"], drops={"accuracy": 0.1})
    assert not found.promote and found.reasons == (f"1 of 120 rows have NaN or infinite scores of the {side}",)


def test_too_few_queries_promote_nothing() -> None:
    found = verdict(rows(49), rows(49), drops={"accuracy": 0.1, "loss": 1.0})  # even the very same model
    assert not found.promote and "not enough test queries: 49, at least 50 needed" in found.reasons[0]
    assert {(one.num_queries, one.needed_queries) for one in found.checks if one.kind == "delta"} == {(49, 50)}


def test_nothing_compared_is_said() -> None:
    found = verdict(rows(), rows())
    assert outcomes(found) == {"incumbent": "warn", "comparison": "warn"}
    assert found.promote and found.without_comparison and "gate.drops is empty" in found.reasons[0]
    floor = verdict(rows(), rows(), floors={"accuracy": 0.1})
    assert floor.promote and not floor.without_comparison


@pytest.mark.parametrize(
    ("ours", "theirs", "promote"), [(0.4, 0.5, True), (0.4, 0.1, True), (0.1, 0.4, False), (None, 0.4, False)]
)
def test_each_model_has_its_own_threshold(ours: float | None, theirs: float | None, promote: bool) -> None:
    score = np.tile([0.6, 0.2], 40)
    models = holdout(range(80), [1, 0] * 40, np.stack([1 - score, score], axis=1).tolist())
    assert verdict(models, models, drops={"f1": 0.1}, thresholds=(ours, theirs)).promote is promote


@pytest.mark.parametrize(
    "change",
    [
        lambda one: replace(one, query_id=one.query_id + 1),
        lambda one: replace(one, label=1 - one.label),
        lambda one: replace(one, gain=one.gain + 0.5),
        lambda one: one.select(one.query_id > 0),
        lambda one: replace(one, labels=("a", "b")),
    ],
)
def test_scores_of_another_holdout_are_an_error(change: Any) -> None:
    with pytest.raises(DataError, match="not scored on the same test split"):
        verdict(rows(), change(rows()))


# A first model.


def boosting(wrong: Sequence[int] = range(20), num_queries: int = 60) -> Baseline:
    return Baseline("boosting", rows=rows(num_queries, wrong))


UNJUDGED: dict[str, tuple[Baseline, ...]] = {
    "none": (),
    "skipped": (Baseline("boosting", missing="scikit-learn is not installed"),),
    "few": (boosting(num_queries=49),),
}


@pytest.mark.parametrize("kind", UNJUDGED)
@pytest.mark.parametrize("allowed", [False, True])
def test_a_first_model_that_nothing_could_judge(kind: str, allowed: bool) -> None:
    num_queries = 49 if kind == "few" else 60
    found = verdict(rows(num_queries), None, *UNJUDGED[kind], first_without_comparison=allowed)
    assert found.promote is found.without_comparison is allowed
    assert check(found, "comparison").outcome == ("warn" if allowed else "fail")
    assert found.reasons == (check(found, "comparison").reason,), "what was skipped is in it"
    assert ("promoted WITHOUT a comparison" in found.reasons[0]) is allowed
    assert found.lines()[0].startswith("promote WITHOUT a comparison: " if allowed else "refuse: 1 failed")
    needed = (49, 50) if kind == "few" else (None, None)
    assert (check(found, "comparison").num_queries, check(found, "comparison").needed_queries) == needed


@pytest.mark.parametrize("allowed", [False, True])
def test_one_comparison_is_enough(allowed: bool) -> None:
    tools = (Baseline("BM25", missing="why"), boosting())
    found = verdict(rows(), None, *tools, first_without_comparison=allowed, baseline_drops={"accuracy": 0.0})
    assert found.promote and not found.without_comparison and "comparison" not in outcomes(found)
    assert found.lines()[0].startswith("promote: 1 check passed, 2 not applicable (60 queries, 120 rows)")


def test_doubts_about_the_holdout_are_in_the_verdict() -> None:
    found = verdict(rows(), None, boosting(), warnings=("half of it was trained on", "the rest too"))
    assert [one.reason for one in found.checks if one.kind == "holdout"] == [
        "half of it was trained on",
        "the rest too",
    ]
    assert "half of it was trained on" in found.reasons and found.promote
    assert verdict(rows(), warnings=("all of it was trained on",)).without_comparison is False, "a doubt judges nothing"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nothing judged it", "--gate.first-without-comparison"),
        ("broken incumbent", "registry rollback"),
        ("incumbent without search", "registry rollback"),
        ("candidate without search", "train again"),
        ("worse", "train again"),
        ("few", "the advice"),
        ("metric of no label", "correct --gate.drops"),
        ("beaten by boosting", "start from published weights"),
    ],
)
def test_the_way_out_fits_the_reason(kind: str, words: str) -> None:
    broken = replace(rows(), probabilities=np.full((120, 2), np.nan))
    search: dict[str, Any] = {"drops": {NDCG: 0.1}, "searched": True}
    found = {
        "nothing judged it": lambda: verdict(rows()),
        "broken incumbent": lambda: verdict(rows(), broken),
        "incumbent without search": lambda: verdict(rows(), rows(), **search, ours=np.full(60, 0.5)),
        "candidate without search": lambda: verdict(rows(), rows(), **search, theirs=np.full(60, 0.5)),
        "worse": lambda: verdict(rows(wrong=range(20)), rows(), drops={"accuracy": 0.0}),
        "few": lambda: verdict(rows()).model_copy(update={"advice": "the advice"}),
        "metric of no label": lambda: verdict(rows(), rows(), drops={"f1:relevnt": 0.1}),
        "beaten by boosting": lambda: verdict(rows(wrong=range(40)), None, boosting()),
    }[kind]()
    assert not found.promote and words in refusal_advice(found, from_published_weights=False)
    assert "published" not in refusal_advice(found, from_published_weights=True)


# Baselines.


@pytest.mark.parametrize(
    ("first", "action", "outcome"),
    [(True, "refuse", "fail"), (True, "warn", "warn"), (False, "refuse", "fail"), (False, "warn", "warn")],
)
def test_a_better_baseline(first: bool, action: str, outcome: str) -> None:
    incumbent = None if first else rows(wrong=range(20))
    settings: dict[str, Any] = {
        "first_baselines" if first else "baselines": action,
        "baseline_drops": {"accuracy": 0.0},
    }
    found = verdict(rows(wrong=range(20)), incumbent, boosting(()), drops={"accuracy": 0.1}, **settings)
    one = check(found, "baseline boosting accuracy")
    assert one.outcome == outcome and one.baseline_value == 1.0 and one.incumbent is None and one.judges
    assert one.reason.startswith("boosting is better on accuracy: 0.6667 vs 1.0000 (0.3333 worse), at least ")


def test_metrics_that_only_one_side_or_neither_has() -> None:
    drops = {"f1": 0.0, "f1:exakt": 0.0, NDCG: 0.0}
    found = verdict(rows(), None, boosting(), Baseline("BM25", retrieval=searched([0.5] * 60)), baseline_drops=drops)
    assert {name: one for name, one in outcomes(found).items() if name.startswith("baseline")} == {
        "baseline boosting f1": "skipped",  # no threshold on either side
        "baseline boosting f1:exakt": "skipped",
        f"baseline BM25 {NDCG}": "fail",  # the candidate has none
    }
    four = holdout([1, 1, 2, 2], [0, 3, 1, 2], np.eye(4)[[0, 3, 1, 2]].tolist())
    found = verdict(four, None, Baseline("boosting", rows=four), baseline_drops={"f1": 0.0, "accuracy": 0.0})
    assert "baseline boosting f1" not in outcomes(found), "f1 is of two labels"
    assert outcomes(found)["baseline boosting accuracy"] == "skipped", "few queries"


def test_a_baseline_of_few_queries_counts_as_no_comparison_for_the_confidence() -> None:
    found = verdict(
        rows(),
        None,
        boosting(),
        Baseline("BM25", retrieval=searched([0.1] * 49)),
        ours=[0.5] * 49,
        baseline_drops={"accuracy": 0.0, NDCG: 0.0},
    )
    assert outcomes(found)[f"baseline BM25 {NDCG}"] == "skipped" and found.baseline_confidence == 0.95


def test_the_confidence_is_shared_by_all_comparisons_with_baselines() -> None:
    tools = [boosting(), Baseline("BM25", retrieval=searched([0.5] * 60))]
    drops = {"accuracy": 0.0, "loss": 0.0, NDCG: 0.0}
    found = verdict(rows(), None, *tools, ours=[0.5] * 60, baseline_drops=drops)
    assert found.baseline_confidence == pytest.approx(1 - 0.05 / 3)


@pytest.mark.parametrize(("ours", "theirs", "outcome"), [(0.5, 0.1, "warn"), (0.1, 0.5, "fail"), (0.3, 0.3, "warn")])
def test_a_search_by_words_that_finds_nothing_is_no_pass(ours: float, theirs: float, outcome: str) -> None:
    """It refuses where it is better all the same, and beating it alone promotes nothing."""
    weak = Baseline(
        "BM25", retrieval=searched([theirs] * 60), weak="60 of 100 queries have no word in common with any item"
    )
    settings: dict[str, Any] = {"ours": [ours] * 60, "baseline_drops": {NDCG: 0.0, "accuracy": 0.0}}
    found = verdict(rows(), None, weak, **settings)
    assert outcomes(found)[f"baseline BM25 {NDCG}"] == outcome and not found.promote
    if outcome == "warn":
        assert weak.weak in " ".join(found.reasons) and outcomes(found)["comparison"] == "fail"
        both = verdict(rows(), None, weak, boosting(), **settings)
        assert both.promote and not both.without_comparison
    assert verdict(rows(), None, replace(weak, weak=""), **settings).promote is (outcome == "warn")


# One comparison, from its bootstrap.


def comparison(candidate: float = 0.5, incumbent: float = 0.5, metric: str = ACCURACY, **more: object) -> Comparison:
    def side(value: float) -> Measured:
        return Measured(value, mean_over_queries(np.full(100, value)))

    fields = {"allowed": 0.05, **more}
    return Comparison(MetricName.parse(metric), candidate=side(candidate), reference=side(incumbent), **fields)  # type: ignore[arg-type]


def difference(mean: float, spread: float, num_queries: int = 100, undefined: int = 0) -> PairedDifference:
    stream = np.random.default_rng(3)
    draws = mean + spread * stream.standard_normal(1000)
    draws[:undefined] = np.nan
    return PairedDifference(mean, draws, num_queries)


@pytest.mark.parametrize(
    ("mean", "spread", "undefined", "outcome", "words", "is_measured"),
    [
        (0.2, 0.01, 0, "pass", "better with 95.0% confidence", True),
        (0.0, 0.0, 0, "pass", "not worse with 95.0% confidence", True),
        (0.0, 0.01, 0, "pass", "at most 0.0", True),
        (-0.2, 0.01, 0, "fail", "at least 0.1", True),
        (0.0, 0.1, 0, "fail", "takes about", True),
        (-0.06, 0.1, 0, "fail", "0.05 worse is allowed", True),
        (0.2, 0.01, 51, "fail", "undefined in too many bootstrap resamples", False),
        (0.2, 0.01, 50, "pass", "better", True),
    ],
)
def test_the_burden_is_on_the_candidate(
    mean: float, spread: float, undefined: int, outcome: Outcome, words: str, is_measured: bool
) -> None:
    found = judge_overall(comparison(0.5 + mean, 0.5), difference(mean, spread, undefined=undefined), 0.95)
    assert found.outcome == outcome and words in found.reason and (found.low is not None) is is_measured
    assert (found.needed_queries is not None) is (outcome == "fail" and mean == 0.0)


@pytest.mark.parametrize(
    ("mean", "spread", "undefined", "tool", "outcome", "words"),
    [
        (-0.2, 0.01, 0, "", "fail", "accuracy of a=x: 0.3000 vs 0.5000 (0.2000 worse, up to 0.05 worse is allowed), "),
        (-0.2, 0.3, 0, "", "warn", ", not statistically significant with 100 queries"),
        (-0.04, 0.01, 0, "", "pass", ", up to 0.05 worse is allowed)"),
        (0.2, 0.01, 960, "", "skipped", "undefined in too many bootstrap resamples"),
        (-0.2, 0.01, 0, "T", "fail", "T is better on accuracy: "),
        (-0.2, 0.3, 0, "T", "warn", "T may be better on accuracy: "),
        (-0.04, 0.01, 0, "T", "pass", "T is not better on accuracy: 0.4600 vs 0.5000 (0.0400 worse, up to 0.05 "),
        (0.2, 0.01, 0, "T", "pass", "beats T on accuracy: 0.7000 vs 0.5000 (0.2000 better"),
        (0.2, 0.01, 960, "T", "skipped", "T on accuracy: "),
    ],
)
def test_the_burden_is_on_the_refusal(
    mean: float, spread: float, undefined: int, tool: str, outcome: Outcome, words: str
) -> None:
    one = comparison(0.5 + mean, 0.5, baseline=tool, slice="" if tool else "a=x")
    found = judge_refusal(one, difference(mean, spread, undefined=undefined), 0.95)
    assert found.outcome == outcome and words in found.reason, found.reason


def test_less_is_better_for_a_loss() -> None:
    worse = comparison(0.9, 0.5, metric="loss")
    assert judge_overall(worse, difference(0.4, 0.01), 0.95).outcome == "fail"
    assert judge_refusal(worse, difference(0.4, 0.01), 0.95).outcome == "fail"
    assert judge_overall(comparison(0.1, 0.5, metric="loss"), difference(-0.4, 0.01), 0.95).outcome == "pass"


@given(holdouts(), st.data())
def test_any_holdout_gets_a_verdict_with_reasons(models: ScoredRows, data: st.DataObject) -> None:
    size = models.num_rows
    other = replace(models, probabilities=np.roll(models.probabilities, data.draw(st.integers(0, size)), axis=0))
    codes = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=size, max_size=size)), dtype=np.int64)
    models = replace(models, slices={"column": SliceColumn(codes, ("a", "b", "c"))})
    names = ["ndcg@10", "macro_f1", "mrr", "ece", "loss", "f1:exact", "roc_auc"]
    drops = {"drops": dict.fromkeys(names, 0.05), "slice_drops": dict.fromkeys(names, 0.1)}
    least = {"min_queries": 2, "min_slice_queries": 2}
    found = verdict(models, other, floors={"accuracy": 0.5}, thresholds=(0.5, 0.5), **drops, **least)
    assert found.promote is all(check.outcome != "fail" for check in found.checks)
    assert all(check.reason for check in found.checks)
    assert len({check.name for check in found.checks}) == len(found.checks)
    assert Verdict.model_validate_json(found.model_dump_json()) == found  # no NaN anywhere
    assert "nan" not in " ".join(found.lines()).lower().split()


@pytest.mark.parametrize(
    "setting",
    [
        {"floors": {"ndgc@10": 0.5}},
        {"floors": {"accuracy": float("nan")}},
        {"drops": {"accuracy": -0.1}},
        {"slice_drops": {"retrieval_mrr": 0.1}},
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        GateConfig.model_validate(setting)
