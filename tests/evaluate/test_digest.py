"""What pages draw of scores: bins and counts that add up, and the rows that are named."""

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.data.tokenizer import Tokens
from pipeline.evaluate.metrics.labels import NUM_BINS
from pipeline.evaluate.metrics.measure import MetricReport
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows
from pipeline.evaluate.report import MAX_TEXT, SCORE_BINS, Example, find_examples, model_digest, query_changes
from pipeline.evaluate.retrieval import RetrievalQueries, RetrievalResult, RetrievalTask, moved_queries
from pipeline.retrieval.search import Ranked

LABELS = ("bad", "good")


def rows(*probabilities: float, label: tuple[int, ...]) -> ScoredRows:
    """`probabilities`: of the label good."""
    good = np.array(probabilities, dtype=np.float64)
    return ScoredRows(
        query_id=np.zeros(len(good), dtype=np.int64),
        label=np.array(label, dtype=np.int64),
        gain=np.maximum(np.array(label), 0).astype(np.float64),
        probabilities=np.stack([1 - good, good], axis=1),
        labels=LABELS,
        label_gains=(0.0, 1.0),
    )


def test_bins_and_counts_add_up() -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(-1, 2, 500)
    good = rng.random(500)
    good[7], label[7] = np.nan, 1
    found = model_digest("abc", rows(*good, label=tuple(label.tolist())))
    usable = (label >= 0) & ~np.isnan(good)
    assert (found.rows, found.unusable) == (usable.sum(), 1)
    assert sum(one.rows for one in found.reliability) == found.rows and len(found.reliability) == NUM_BINS
    right = (good[usable] > 0.5) == (label[usable] == 1)
    assert np.isclose(sum(one.rows * (one.right or 0) for one in found.reliability), right.sum(), atol=1e-3)
    assert all(one.low < one.confidence <= one.high for one in found.reliability if one.confidence is not None)
    assert sum(found.confusion[i][i] for i in range(2)) == right.sum()
    assert [sum(row) for row in found.scores] == [int(((label == i) & usable).sum()) for i in range(2)]
    assert all(len(row) == SCORE_BINS for row in found.scores)


def test_the_worst_and_the_changed_rows() -> None:
    label = (1, 1, 0, 1, 0, -1)
    ours = rows(0.1, 0.3, 0.2, 0.9, 0.8, 0.5, label=label)
    theirs = rows(0.9, 0.2, 0.1, 0.2, 0.7, 0.5, label=label)

    def numbered(numbers: Int64s) -> dict[int, tuple[str, str]]:
        return {row: (f"q{row}", "p" * 500) for row in numbers.tolist()}

    def alike(numbers: Int64s) -> dict[int, tuple[str, str]]:
        return {row: ("q", "p") for row in numbers.tolist()}

    def told(found: tuple[Example, ...]) -> list[tuple[str, str]]:
        return [(one.kind, one.query) for one in found]

    found, num_lost, num_won = find_examples(ours, theirs, 2, numbered)
    assert told(found) == [("worst", "q0"), ("worst", "q4"), ("lost", "q0"), ("won", "q3")], "two of three are wrong"
    assert (num_lost, num_won) == (1, 1)
    first = found[0]
    assert (first.label, first.candidate, first.incumbent) == ("good", "bad", "good")
    assert len(first.product) == 160 and first.product.endswith("…")
    twice, _, _ = find_examples(ours, theirs, 9, alike)
    kinds = [(one.kind, one.label) for one in twice]
    assert kinds == [("worst", "good"), ("worst", "bad"), ("lost", "good"), ("won", "good")], "each text once"
    assert find_examples(ours, theirs, 0, numbered) == ((), 1, 1), "no rows, and the counts all the same"
    alone, num_lost, num_won = find_examples(ours, None, 5, numbered)
    assert told(alone) == [("worst", "q0"), ("worst", "q4"), ("worst", "q1")]
    assert (num_lost, num_won) == (None, None)


def test_queries_that_changed() -> None:
    ids = np.arange(4)
    ours = PerQuery(ids, {"ndcg@10": np.array([1.0, 0.5, np.nan, 0.2])})
    theirs = PerQuery(ids, {"ndcg@10": np.array([0.5, 0.5, 1.0, 0.4]), "mrr": np.ones(4)})
    (found,) = query_changes(ours, theirs)
    assert (found.metric, found.better, found.equal, found.worse) == ("ndcg@10", 1, 1, 1)
    assert query_changes(ours, None) == ()


def test_queries_that_moved_most_with_what_both_models_found() -> None:
    ids = np.array([3, 5, 7, 9])
    judged = Judgements(np.array([3, 3, 5, 9]), np.array([0, 0, 1, -1]), np.array([0.1, 1.0, 0.0, 1.0]))
    texts = ["red shoes", "a" * 500, "nothing", "green"]
    tokens = Tokens(np.zeros(0, dtype=np.int32), np.zeros(5, dtype=np.int64))
    task = RetrievalTask(
        RetrievalQueries(ids, tokens, texts, judged),
        None,
        3,
        lambda wanted: iter(()),
        lambda: iter([["p0", "p1"], ["p2"]]),
    )

    def result(values: list[float], items: list[list[int]]) -> RetrievalResult:
        report = MetricReport(values={}, missing={}, num_rows=0, num_queries=4)
        found = Ranked(np.array(items), np.zeros((4, 2), dtype=np.float32))
        return RetrievalResult(PerQuery(ids, {"m": np.array(values)}), report, found)

    ours = result([0.9, 0.1, np.nan, 0.6], [[0, 1], [2, -1], [0, 1], [2, 0]])
    theirs = result([0.2, 0.8, np.nan, 0.5], [[1, 0], [1, 2], [0, 1], [0, 2]])
    won, less, lost = moved_queries(task, ours, theirs, "m", 2)
    assert [(one.query, one.before, one.now, one.lost) for one in (won, less)] == [
        ("red shoes", 0.2, 0.9, False),
        ("green", 0.5, 0.6, False),
    ]
    assert [(one.text, one.gain) for one in won.found_now] == [("p0", 1.0), ("p1", None)], "the best gain of a pair"
    assert [(one.text, one.gain) for one in won.found_before] == [("p1", None), ("p0", 1.0)]
    assert (lost.lost, len(lost.query), [(one.text, one.gain) for one in lost.found_before]) == (
        True,
        MAX_TEXT,
        [("p1", 0.0), ("p2", None)],
    )
    assert [one.text for one in lost.found_now] == ["p2"], "a list may be short"
    assert [one.query for one in moved_queries(task, ours, theirs, "m", 1)] == ["red shoes", lost.query]
    assert moved_queries(task, ours, ours, "m", 2) == moved_queries(task, ours, theirs, "other", 2) == []
    assert moved_queries(task, ours, theirs, "m", 0) == [], "report.examples = 0 shows no texts"
