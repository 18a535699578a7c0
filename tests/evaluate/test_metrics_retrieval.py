"""Retrieval metrics from ranked lists against trec_eval, to 1e-9."""

import numpy as np
import numpy.typing as npt
import pytest
import pytrec_eval
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.arrays import Int64s
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.metrics.measure import retrieval_report
from pipeline.evaluate.metrics.ranking import Judgements

EXACT = 1e-9
CUTOFFS = (1, 3, 10)
CONFIG = MetricsConfig(retrieval_at=CUTOFFS)
MEASURES = {"ndcg_cut.1,3,10", "recall.1,3,10", "success.1,3,10", "recip_rank"}
GRADES = {1: 0.01, 10: 0.1, 100: 1.0}
Judged = dict[tuple[int, int], int]


def ints(values: npt.ArrayLike) -> Int64s:
    return np.array(values, dtype=np.int64)


def judgements(judged: Judged) -> Judgements:
    pairs = ints(list(judged)).reshape(-1, 2)
    gain = np.array([GRADES.get(grade, 0.0) for grade in judged.values()], dtype=np.float64)
    return Judgements(pairs[:, 0], pairs[:, 1], gain)


def by_trec_eval(lists: dict[int, list[int]], judged: Judged, least: int) -> dict[int, dict[str, float]]:
    """Measures of each query; a document is relevant from grade `least` on for all but nDCG."""
    truth = {str(query): {f"d{item}": grade for (q, item), grade in judged.items() if q == query} for query in lists}
    run = {
        str(query): {f"d{item}": float(-place) for place, item in enumerate(found)} for query, found in lists.items()
    }
    graded = pytrec_eval.RelevanceEvaluator(truth, MEASURES).evaluate(run)
    hits = pytrec_eval.RelevanceEvaluator(truth, MEASURES, relevance_level=least).evaluate(run)
    return {
        int(query): {name: (graded if name.startswith("ndcg") else hits)[query][name] for name in found}
        for query, found in hits.items()  # those with a judgement
    }


@given(
    st.dictionaries(
        st.integers(-3, 3), st.lists(st.integers(0, 14), min_size=10, max_size=10, unique=True), min_size=1
    ),
    st.dictionaries(st.tuples(st.integers(-3, 3), st.integers(0, 30)), st.sampled_from([0, 1, 10, 100]), max_size=40),
    st.sampled_from([1, 10, 100]),
)
def test_ranked_lists_are_measured_as_by_trec_eval(lists: dict[int, list[int]], judged: Judged, least: int) -> None:
    config = MetricsConfig(retrieval_at=CUTOFFS, relevant_gain=GRADES[least])
    per_query, report = retrieval_report(ints(list(lists)), ints(list(lists.values())), judgements(judged), config)
    wanted = by_trec_eval(lists, judged, least)
    assert per_query.query_id.tolist() == sorted(lists)
    for name, seen in per_query.values.items():
        word, _, k = name.removeprefix("retrieval_").partition("@")
        theirs = {"ndcg": f"ndcg_cut_{k}", "mrr": "recip_rank"}.get(word, f"{word}_{k}")
        counted = []
        for place, query in enumerate(sorted(lists)):
            grades = [grade for (q, _), grade in judged.items() if q == query]
            if any(grade >= (1 if word == "ndcg" else least) for grade in grades):
                assert seen[place] == pytest.approx(wanted[query][theirs], abs=EXACT), (name, query)
                counted.append(seen[place])
            else:
                assert np.isnan(seen[place])
        if counted:
            assert report.values[name] == pytest.approx(np.mean(counted), abs=EXACT)
        else:
            assert report.missing[name] == "no query has a relevant item in the catalogue"


def test_relevant_are_items_of_the_largest_gain_by_default() -> None:
    judged = judgements({(1, 5): 100, (1, 6): 1, (2, 7): 1})
    per_query, report = retrieval_report(ints([1, 2]), ints([[6, 5, 4], [7, 1, 2]]), judged, CONFIG)
    assert per_query.values["retrieval_mrr"].tolist() == pytest.approx([0.5, np.nan], nan_ok=True)
    assert report.values["retrieval_recall@3"] == 1.0
    assert report.missing["retrieval_recall@10"] == "only 3 items were retrieved"


def test_a_pair_judged_twice_has_its_best_gain_and_counts_once() -> None:
    judged = Judgements(ints([1, 1, 1, 1]), ints([5, 5, 5, 6]), np.array([0.0, 1.0, 0.1, 1.0]))
    _, report = retrieval_report(ints([1]), ints([[5, 9, 8]]), judged, CONFIG)
    assert report.values["retrieval_recall@3"] == 0.5


def test_short_lists_end_in_minus_one() -> None:
    judged = judgements({(1, 5): 100})
    _, report = retrieval_report(ints([1]), ints([[5, -1, -1]]), judged, CONFIG)
    assert (report.values["retrieval_ndcg@3"], report.values["retrieval_success@1"]) == (1.0, 1.0)
