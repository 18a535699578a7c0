"""Hybrid search of a task: what is reported, and from which queries the weight comes."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens
from pipeline.evaluate.baselines import ScoredBaseline, fuse, lexical_search
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.gate.judge import Baseline
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.report import BaselineReport, HybridReport
from pipeline.evaluate.retrieval import RetrievalQueries, RetrievalTask
from pipeline.retrieval.search import Ranked

METRICS = MetricsConfig(retrieval_at=(1, 3))
TEXTS = ["red shoe", "blue shoe", "red hat", "green hat", "blue coat"]
NO_TOKENS = Tokens(np.zeros(0, dtype=np.int32), np.zeros(3, dtype=np.int64))


def queries(ids: Sequence[int], texts: list[str], relevant: Sequence[int]) -> RetrievalQueries:
    judged = Judgements(np.array(ids), np.array(relevant), np.ones(len(ids)))
    return RetrievalQueries(np.array(ids), NO_TOKENS, texts, judged)


def task_of(tuning: RetrievalQueries | None) -> RetrievalTask:
    judged = queries([1, 2], ["red", "hat blue"], [0, 3])
    return RetrievalTask(judged, tuning, len(TEXTS), lambda mine: iter(()), lambda: iter([TEXTS[:2], TEXTS[2:]]))


VECTORS = Ranked(np.array([[2, 0, 1], [3, 2, 1], [4, 1, 0], [4, 3, 1]]), np.array([[9.0, 8, 2]] * 4))


def fused(task: RetrievalTask, vectors: Ranked = VECTORS) -> tuple[HybridReport, ...]:
    words = ScoredBaseline(BaselineReport(name="bm25"), Baseline("BM25"), lexical_search(task, 3, StopSignal()))
    search = SimpleNamespace(task=task, metrics=METRICS, ndcg="retrieval_ndcg@3")
    return fuse(search, [words], vectors)  # type: ignore[arg-type]


def test_words_are_searched_for_all_queries() -> None:
    task = task_of(queries([7, 8], ["green coat", ""], [3, 4]))
    found = lexical_search(task, 3, StopSignal())
    assert found.items.tolist() == [[0, 2, -1], [1, 2, 3], [3, 4, -1], [-1, -1, -1]]
    assert task.report(found.items, METRICS)[1].num_queries == 2


def test_the_weight_is_chosen_by_other_queries_than_those_judged() -> None:
    task = task_of(queries([7, 8], ["green coat", "green hat"], [4, 4]))  # the vectors are right, words are not
    ranked, weighted = fused(task)
    assert (ranked.name, ranked.weight, weighted.name) == ("rrf", None, "weighted")
    assert weighted.valid_queries == 2 and weighted.weight is not None and weighted.weight > 0.5
    other = replace(task, queries=queries([1, 2], ["red", "hat blue"], [1, 4]))
    assert fused(other)[1].weight == weighted.weight
    found = fused(replace(task, tuning=queries([7, 8], ["green coat", "green hat"], [3, 3])))[1].weight
    assert found is not None and found < weighted.weight
    assert ranked.retrieval is not None and ranked.retrieval.values["retrieval_mrr"] == 0.75
    assert ranked.retrieval.num_queries == 2


def test_without_valid_queries_there_is_no_weight() -> None:
    ranked, weighted = fused(task_of(None), VECTORS.part(0, 2))
    assert ranked.retrieval is not None and weighted.retrieval is None and weighted.weight is None
    assert weighted.missing.startswith("hybrid search was not weighted")
