"""Each condition of the gate, on holdouts so small that a case takes milliseconds."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.core.arrays import Float64s
from pipeline.evaluate.config import DROPS, GateConfig, MetricName, MetricsConfig
from pipeline.evaluate.gate.compare import (
    Comparison,
    GateCheck,
    Outcome,
    PairedDifference,
    Side,
    Verdict,
    judge_overall,
    judge_refusal,
)
from pipeline.evaluate.gate.judge import Baseline, judge, way_out
from pipeline.evaluate.metrics.measure import Measured
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows, SliceColumn, mean_over_queries
from tests.evaluate.holdouts import holdout

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
        Side(candidate, METRICS, thresholds[0], None if ours is None else searched(ours)),
        Side(incumbent, METRICS, thresholds[1], None if theirs is None else searched(theirs)) if incumbent else None,
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


# Floors.


@pytest.mark.parametrize(
    ("metric", "bound", "outcome", "words"),
    [
        ("accuracy", 0.9, "pass", "at least 0.9 is asked"),
        ("accuracy", 1.0, "pass", "at least 1 is asked"),
        ("loss", 0.05, "fail", "at most 0.05 is needed"),
        ("loss", 0.2, "pass", "at most 0.2 is asked"),
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
        assert ("the candidate" if side == "ours" else "the incumbent") in check(missing, f"delta {NDCG}").reason


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


def test_a_refusal_for_another_reason_says_nothing_of_comparisons() -> None:
    assert "comparison" not in outcomes(verdict(rows(), floors={"accuracy": 1.1}, first_without_comparison=True))
    broken = replace(rows(), probabilities=np.full((120, 2), np.nan))
    found = verdict(broken, first_without_comparison=True)
    assert outcomes(found) == {"scores candidate": "fail"} and not found.without_comparison


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
    }[kind]()
    assert not found.promote and words in way_out(found)


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
    assert one.reason.startswith("boosting is better on accuracy: 0.6667 against 1.0000, 0.3333 worse; with 95.00%")


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


# One comparison, from its bootstrap.


def comparison(candidate: float = 0.5, incumbent: float = 0.5, metric: str = ACCURACY, **more: object) -> Comparison:
    def side(value: float) -> Measured:
        return Measured(value, mean_over_queries(np.full(100, value)))

    fields = {"allowed": 0.05, **more}
    return Comparison(MetricName.parse(metric), candidate=side(candidate), incumbent=side(incumbent), **fields)  # type: ignore[arg-type]


def difference(mean: float, spread: float, num_queries: int = 100, undefined: int = 0) -> PairedDifference:
    stream = np.random.default_rng(3)
    draws = mean + spread * stream.standard_normal(1000)
    draws[:undefined] = np.nan
    return PairedDifference(mean, draws, num_queries)


@pytest.mark.parametrize(
    ("mean", "spread", "undefined", "outcome", "words", "is_measured"),
    [
        (0.2, 0.01, 0, "pass", "with 95.0% confidence better", True),
        (0.0, 0.0, 0, "pass", "with 95.0% confidence not worse", True),
        (0.0, 0.01, 0, "pass", "at most 0.0", True),
        (-0.2, 0.01, 0, "fail", "at least 0.1", True),
        (0.0, 0.1, 0, "fail", "it takes about", True),
        (-0.06, 0.1, 0, "fail", "not shown to be at most 0.05 worse", True),
        (0.2, 0.01, 51, "fail", "not defined in enough bootstrap draws", False),
        (0.2, 0.01, 50, "pass", "better", True),
    ],
)
def test_the_burden_is_on_the_candidate(
    mean: float, spread: float, undefined: int, outcome: Outcome, words: str, is_measured: bool
) -> None:
    found = judge_overall(comparison(0.5 + mean, 0.5), difference(mean, spread, undefined=undefined), 0.95)
    assert found.outcome == outcome and words in found.reason and (found.low is not None) is is_measured
    assert (found.needed_queries is not None) is ("it takes about" in words)


@pytest.mark.parametrize(
    ("mean", "spread", "undefined", "tool", "outcome", "words"),
    [
        (
            -0.2,
            0.01,
            0,
            "",
            "fail",
            "accuracy of a=x: 0.3000 against 0.5000, 0.2000 worse; with 95.00% confidence at least",
        ),
        (-0.2, 0.3, 0, "", "warn", ", 0.05 is allowed; 100 queries do not tell it from chance"),
        (-0.04, 0.01, 0, "", "pass", ", 0.05 worse is allowed"),
        (0.2, 0.01, 960, "", "skipped", "not defined in enough bootstrap draws"),
        (-0.2, 0.01, 0, "T", "fail", "T is better on accuracy: "),
        (-0.2, 0.3, 0, "T", "warn", "T may be better on accuracy: "),
        (
            -0.04,
            0.01,
            0,
            "T",
            "pass",
            "T is not better on accuracy: 0.4600 against 0.5000, 0.0400 worse, 0.05 is allowed",
        ),
        (0.2, 0.01, 0, "T", "pass", "beats T on accuracy: 0.7000 against 0.5000, 0.2000 better"),
        (0.2, 0.01, 960, "T", "skipped", "T on accuracy: "),
    ],
)
def test_the_burden_is_on_the_refusal(
    mean: float, spread: float, undefined: int, tool: str, outcome: Outcome, words: str
) -> None:
    one = comparison(0.5 + mean, 0.5, baseline=tool, slice="" if tool else "a=x")
    found = judge_refusal(one, difference(mean, spread, undefined=undefined), 0.95)
    assert found.outcome == outcome and words in found.reason, found.reason
    strict = judge_refusal(comparison(0.7, 0.5, baseline="T", allowed=0.0), difference(0.2, 0.01), 0.95)
    assert strict.reason == "beats T on accuracy: 0.7000 against 0.5000, 0.2000 better"


def test_less_is_better_for_a_loss() -> None:
    worse = comparison(0.9, 0.5, metric="loss")
    assert judge_overall(worse, difference(0.4, 0.01), 0.95).outcome == "fail"
    assert judge_refusal(worse, difference(0.4, 0.01), 0.95).outcome == "fail"
    assert judge_overall(comparison(0.1, 0.5, metric="loss"), difference(-0.4, 0.01), 0.95).outcome == "pass"


@pytest.mark.parametrize(
    ("num_queries", "undefined", "known"), [(2, 0, True), (1, 0, False), (9, 50, True), (9, 51, False)]
)
def test_a_standard_error_takes_two_queries_and_most_of_the_draws(
    num_queries: int, undefined: int, known: bool
) -> None:
    one = difference(0.1, 0.01, num_queries, undefined)
    assert math.isnan(one.standard_error) is not known
    assert all(math.isnan(end) is not known for end in one.interval(0.95))
