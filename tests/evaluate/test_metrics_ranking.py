"""Ranking metrics against trec_eval, to 1e-9.

trec_eval breaks ties by document name; ours are the mean over all orders of tied rows. So trec_eval is asked for every
order of the ties, as a query of its own, and averaged. Its gains are whole numbers, which nDCG does not depend on.
"""

from collections.abc import Iterator
from itertools import chain, permutations, product

import numpy as np
import pytest
import pytrec_eval
from hypothesis import given

from pipeline.core.arrays import Float64s, Int64s
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.metrics import measure
from pipeline.evaluate.metrics.measure import metric_report
from pipeline.evaluate.metrics.scored_rows import ScoredRows
from tests.evaluate.holdouts import holdout, holdouts

EXACT = 1e-9
CUTOFFS = (1, 2, 5, 100)
CONFIG = MetricsConfig(ndcg_at=CUTOFFS)
MEASURES = {f"{word}.1,2,5,100" for word in ("ndcg_cut", "recall", "P")} | {"recip_rank"}
TREC = {"ndcg": "ndcg_cut", "recall": "recall", "precision": "P"}
NAMES = {f"{ours}@{k}": f"{theirs}_{k}" for ours, theirs in TREC.items() for k in CUTOFFS} | {"mrr": "recip_rank"}


@pytest.fixture(scope="module", autouse=True)
def _reported_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "RECALL_AT", CUTOFFS)
        patch.setattr(measure, "PRECISION_AT", CUTOFFS)
        yield


def orders(score: Float64s) -> list[list[int]]:
    """Every order of rows by falling score."""
    ties = [np.flatnonzero(score == one).tolist() for one in sorted(set(score.tolist()), reverse=True)]
    return [list(chain.from_iterable(one)) for one in product(*map(permutations, ties))]


def by_trec_eval(score: Float64s, grade: Int64s) -> dict[str, float]:
    """The mean of each measure over all orders of the ties of one query."""
    runs, truth = {}, {}
    for number, order in enumerate(orders(score)):
        runs[f"q{number}"] = {f"d{row}": float(len(order) - place) for place, row in enumerate(order)}
        truth[f"q{number}"] = {f"d{row}": int(grade[row]) for row in range(len(order))}
    found = pytrec_eval.RelevanceEvaluator(truth, MEASURES).evaluate(runs).values()
    return {name: float(np.mean([one[name] for one in found])) for name in NAMES.values()}


def expected(rows: ScoredRows) -> dict[str, float]:
    """What trec_eval gives, over the queries for which a measure means something."""
    kept: dict[str, list[float]] = {name: [] for name in NAMES}
    for query in np.unique(rows.query_id):
        mine = rows.query_id == query
        score, gain = rows.relevance[mine], rows.gain[mine]
        relevant = (rows.label[mine] == len(rows.labels) - 1).astype(np.int64)
        graded, hits = by_trec_eval(score, np.rint(gain * 100).astype(np.int64)), by_trec_eval(score, relevant)
        for ours, theirs in NAMES.items():
            if ours.startswith("ndcg"):
                kept[ours] += [graded[theirs]] if gain.any() else []
            else:
                kept[ours] += [hits[theirs]] if relevant.any() else []
    return {name: float(np.mean(values)) for name, values in kept.items() if values}


@given(holdouts(max_rows=12))
def test_ranks_are_those_of_trec_eval(rows: ScoredRows) -> None:
    if max(np.unique(rows.query_id, return_counts=True)[1]) > 6:
        return  # 720 orders at most
    report, wanted = metric_report(rows, CONFIG), expected(rows)
    for name in NAMES:
        if name in wanted:
            assert report.values[name] == pytest.approx(wanted[name], abs=EXACT), name
        else:
            missing = "no query has a row with a gain" if name.startswith("ndcg") else "no query has a relevant row"
            assert report.missing[name] == missing


@pytest.mark.parametrize("place", range(4))
def test_a_model_that_knows_nothing_gains_nothing_from_the_order_of_the_input(place: int) -> None:
    """All scores equal: the place of the one relevant row does not matter, and ranks are those of chance."""
    label = [1 if row == place else 0 for row in range(4)]
    values = metric_report(holdout([7] * 4, label, [[0.5, 0.5]] * 4), CONFIG).values
    assert values["ndcg@100"] == pytest.approx(np.mean(1 / np.log2([2, 3, 4, 5])), abs=EXACT)
    assert values["mrr"] == pytest.approx(np.mean([1, 1 / 2, 1 / 3, 1 / 4]), abs=EXACT)
    assert (values["recall@1"], values["recall@2"], values["precision@2"]) == (0.25, 0.5, 0.25)


def test_relevant_is_the_best_label_or_a_gain() -> None:
    rows = holdout([1, 1, 1], [1, 2, 0], [[0.1, 0.1, 0.8], [0.1, 0.8, 0.1], [0.8, 0.1, 0.1]])
    assert metric_report(rows, CONFIG).values["mrr"] == 0.5  # the second row, by label
    assert metric_report(rows, MetricsConfig(relevant_gain=0.25)).values["mrr"] == 1.0
    assert "mrr" in metric_report(rows, MetricsConfig(relevant_gain=1.5)).missing


def test_a_gain_that_was_stored_as_float32_reaches_its_own_bound() -> None:
    gain = float(np.float32(0.7))
    assert gain < 0.7
    rows = holdout([1, 1], [0, 0], [[0.1, 0.9], [0.9, 0.1]], gain=[gain, 0.0])
    assert metric_report(rows, MetricsConfig(relevant_gain=0.7)).values["mrr"] == 1.0


def test_without_gains_of_labels_nothing_can_be_ranked() -> None:
    rows = holdout([1, 1], [1, 0], [[0.1, 0.9], [0.9, 0.1]], gain=[1.0, 0.0])
    unknown = ScoredRows(rows.query_id, rows.label, rows.gain, rows.probabilities, rows.labels, (0.0, 0.0))
    report = metric_report(unknown, CONFIG)
    assert all("same gain" in report.missing[name] for name in NAMES)
    assert report.values["accuracy"] == 1.0
