"""Figures of agreement: equal to the oracles, and nothing that is not a number passes a bar."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from pipeline.core.errors import DataError
from pipeline.evaluate.config import ParityBars, ParityConfig, ReducedBars
from pipeline.evaluate.metrics.scored_rows import ScoredRows
from pipeline.parity.compare import (
    TIE,
    TOP_K,
    Comparison,
    Curve,
    CurveFigures,
    Evaluation,
    ScoreFigures,
    VectorFigures,
    compare_curves,
    compare_evaluations,
    compare_scores,
    compare_vectors,
    judge,
    overlap_at,
    pearson,
    relative_differences,
    spearman,
)

Floats = npt.NDArray[np.float64]
numbers = st.floats(-100, 100, allow_nan=False).map(lambda value: round(value, 2))


def pairs(least: int, most: int) -> st.SearchStrategy[tuple[Floats, Floats]]:
    return st.integers(least, most).flatmap(
        lambda size: st.tuples(arrays(np.float64, size, elements=numbers), arrays(np.float64, size, elements=numbers))
    )


def rows(relevance: Floats, queries: npt.NDArray[np.int64] | None = None) -> ScoredRows:
    """Two classes of gain 0 and 1, so that the probability of the second is the score."""
    size = len(relevance)
    return ScoredRows(
        query_id=np.zeros(size, dtype=np.int64) if queries is None else queries,
        label=np.zeros(size, dtype=np.int64),
        gain=np.zeros(size),
        probabilities=np.stack([1 - relevance, relevance], axis=1),
        labels=("no", "yes"),
        label_gains=(0.0, 1.0),
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [(2.0, 2.0, 0.0), (2.0, 1.0, 0.5), (-2.0, 1.0, 1.5), (0.0, 0.0, 0.0), (0.0, 1e-9, math.inf)],
)
def test_relative_difference(a: float, b: float, expected: float) -> None:
    assert relative_differences([a], [b]).tolist() == [expected]


@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf), (math.nan, math.nan)])
def test_what_is_not_finite_never_agrees(a: float, b: float) -> None:
    assert np.isnan(relative_differences([a], [b])).all()


@given(pairs(2, 40))
def test_correlations_are_those_of_scipy(values: tuple[Floats, Floats]) -> None:
    a, b = values
    varies = min(np.ptp(a), np.ptp(b)) > 0
    assert (pearson(a, b) is None) == (spearman(a, b) is None) == (not varies)
    if varies:
        assert pearson(a, b) == pytest.approx(stats.pearsonr(a, b).statistic, abs=1e-9)
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9)


@given(pairs(TOP_K + 1, 40))
def test_overlap_is_that_of_sets_where_nothing_ties(values: tuple[Floats, Floats]) -> None:
    a, b = (np.argsort(np.argsort(one, kind="stable")).astype(float) for one in values)
    common = set(np.argsort(-a)[:TOP_K]) & set(np.argsort(-b)[:TOP_K])
    assert overlap_at(a, b) == pytest.approx(len(common) / TOP_K)
    assert overlap_at(a, a) == 1.0


def test_scores_as_good_as_the_tenth_are_no_disagreement() -> None:
    a = np.zeros(30)
    noise = np.linspace(0, TIE / 2, 30)
    assert overlap_at(a + noise, a - noise) == 1.0
    assert overlap_at(a + 10 * noise, a - 10 * noise) < 0.5
    assert math.isnan(overlap_at(np.where(np.arange(30) == 3, np.nan, a), a))


def test_evaluations_are_paired_by_step() -> None:
    a = [Evaluation(step=0, metric=0.8, loss=0.5), Evaluation(step=50, metric=0.9, loss=0.4)]
    b = [Evaluation(step=0, metric=0.8, loss=0.5), Evaluation(step=50, metric=0.891, loss=0.5)]
    first, last = compare_evaluations(a, b)
    assert (first.relative, first.loss_relative) == (0, 0)
    assert last.step == 50
    assert last.difference == pytest.approx(-0.009)
    assert last.relative == pytest.approx(0.01)
    assert last.loss_relative == pytest.approx(0.25)
    for other in ([], a[:1], [a[0], Evaluation(step=60, metric=0.9, loss=0.4)]):
        with pytest.raises(DataError, match=r"steps \[0, 50\] against"):
            compare_evaluations(a, other)
    with pytest.raises(DataError):
        compare_evaluations([], [])


def curve(losses: list[float], norms: list[float] | None = None, samples: str = "") -> Curve:
    names = tuple(samples or "abcdefgh"[: len(losses)])
    return Curve(losses=tuple(losses), grad_norms=tuple(norms or losses), samples=names)


def test_the_first_steps_have_figures_of_their_own() -> None:
    found = compare_curves(curve([1, 1, 1, 1]), curve([1, 1.1, 1, 2], [1, 1, 1.3, 1]), first_steps=2)
    assert (found.steps, found.first_steps) == (4, 2)
    assert found.first_loss == pytest.approx(0.1)
    assert (found.first_gradient, found.max_loss) == (0.0, 1.0)
    assert found.mean_loss == pytest.approx(1.1 / 4)
    few = compare_curves(curve([1, 1]), curve([1, 2]), first_steps=10)
    assert (few.first_steps, few.first_loss) == (2, 1.0)
    assert math.isnan(compare_curves(curve([1, math.nan]), curve([1, math.nan]), first_steps=2).first_loss)


def test_curves_of_other_samples_or_lengths_are_refused() -> None:
    with pytest.raises(DataError, match="step 2 was made of samples b against x"):
        compare_curves(curve([1, 1, 1]), curve([1, 1, 1], samples="axc"), first_steps=1)
    with pytest.raises(DataError, match="3 steps against 2"):
        compare_curves(curve([1, 1, 1]), curve([1, 1]), first_steps=1)
    with pytest.raises(DataError):
        compare_curves(curve([]), curve([]), first_steps=1)


def test_scores_by_hand() -> None:
    a = np.linspace(0.1, 0.9, 12)
    b = a.copy()
    b[0], b[5] = 0.15, 0.52  # the second one changes the decision
    found = compare_scores(rows(a), rows(b))
    assert (found.rows, found.ranked_queries, found.decisions) == (12, 1, 1)
    assert found.max_probability == pytest.approx(abs(b - a).max())
    assert found.mean_probability == pytest.approx(abs(b - a).sum() / 12)
    assert found.pearson == pytest.approx(stats.pearsonr(a, b).statistic)
    assert found.overlap == 1.0


def test_only_queries_with_more_rows_than_are_looked_at_are_ranked() -> None:
    queries = np.repeat([5, 3, 9], [11, 10, 4])
    order = np.random.default_rng(0).permutation(25)
    a = np.random.default_rng(1).random(25)
    b = a.copy()
    eleven = np.flatnonzero(queries == 5)
    b[eleven] = a[eleven][::-1]
    found = compare_scores(rows(a[order], queries[order]), rows(b[order], queries[order]))
    assert found.ranked_queries == 1
    assert found.overlap == pytest.approx(overlap_at(a[eleven], b[eleven]))
    assert compare_scores(rows(a[:10]), rows(b[:10])).overlap is None


def test_vectors_by_hand() -> None:
    a = np.eye(20, dtype=np.float32)
    tilted = a.copy()
    tilted[3, 4] = 1.0  # 45 degrees off
    found = compare_vectors((a, a), (a, tilted))
    assert found.rows == 20
    assert found.min_cosine == pytest.approx(math.sqrt(0.5))
    assert found.mean_cosine == pytest.approx((39 + math.sqrt(0.5)) / 40)
    assert compare_vectors((a, a), (2 * a, a)).min_cosine == pytest.approx(1.0), "the length is no difference"
    assert compare_vectors((a[:10], a[:10]), (a[:10], a[:10])).overlap is None
    assert math.isnan(compare_vectors((a, a), (a, 0 * a)).min_cosine)


SAME = Comparison(
    evaluations=compare_evaluations(
        [Evaluation(step=0, metric=0.9, loss=0.1)] * 1, [Evaluation(step=0, metric=0.9, loss=0.1)]
    ),
    curve=CurveFigures(steps=3, first_steps=3, first_loss=0, first_gradient=0, max_loss=0, mean_loss=0),
    scores=ScoreFigures(
        rows=9,
        ranked_queries=1,
        max_probability=0,
        mean_probability=0,
        decisions=0,
        pearson=1,
        spearman=1,
        overlap=1,
    ),
    vectors=VectorFigures(rows=9, min_cosine=1, mean_cosine=1, overlap=1),
)


def changed(part: str, **figures: object) -> Comparison:
    return SAME.model_copy(update={part: getattr(SAME, part).model_copy(update=figures)})


def failed(compared: Comparison, bars: ParityBars | None = None) -> list[str]:
    return [one.name for one in judge(compared, bars or ParityBars(), 0.001) if one.outcome == "fail"]


@pytest.mark.parametrize(
    ("part", "figure", "value", "check"),
    [
        ("curve", "first_loss", 2e-4, "first_losses"),
        ("curve", "first_gradient", 2e-3, "first_gradients"),
        ("scores", "max_probability", 2e-3, "probability"),
        ("scores", "mean_probability", 2e-5, "mean_probability"),
        ("scores", "pearson", 0.9999, "pearson"),
        ("scores", "spearman", 0.9999, "spearman"),
        ("scores", "overlap", 0.99, "ranking"),
        ("vectors", "min_cosine", 0.9999, "cosine"),
        ("vectors", "overlap", 0.99, "neighbours"),
    ],
)
def test_every_figure_has_a_bar_that_fails_it(part: str, figure: str, value: float, check: str) -> None:
    assert failed(SAME) == []
    assert failed(changed(part, **{figure: value})) == [check]
    assert failed(changed(part, **{figure: math.nan})) == [check], "not a number is no agreement"
    assert failed(changed(part, **{figure: value}), ReducedBars()) == []


def test_the_metric_is_held_at_every_evaluation() -> None:
    def with_metric(metric: float, loss: float = 0.1) -> Comparison:
        a = [Evaluation(step=step, metric=0.9, loss=0.1) for step in (0, 50, 100)]
        b = [a[0], Evaluation(step=50, metric=metric, loss=loss), a[2]]
        return SAME.model_copy(update={"evaluations": compare_evaluations(a, b)})

    assert failed(with_metric(0.9 * 1.0009)) == []
    assert failed(with_metric(0.9 * 1.0011)) == ["metric"]
    assert failed(with_metric(0.9 * 0.9989)) == ["metric"]
    assert failed(with_metric(math.nan)) == ["metric"]
    assert failed(with_metric(0.9, 0.1002)) == ["holdout_loss"]


def test_what_has_no_meaning_is_skipped_and_said() -> None:
    none = {"pearson": None, "spearman": None, "overlap": None}
    compared = changed("scores", **none).model_copy(update={"vectors": None})
    skipped = [one.name for one in judge(compared, ParityBars(), 0.001) if one.outcome == "skipped"]
    assert skipped == ["pearson", "spearman", "ranking", "cosine", "neighbours"]
    assert failed(compared) == []


def test_single_bars_can_be_set_and_the_others_stay() -> None:
    config = ParityConfig.model_validate({"reduced": {"min_cosine": 0.5}})
    assert config.reduced == ReducedBars(min_cosine=0.5)
    assert config.fp32 == ParityBars()
