"""What search with a model is worth when it is fused with BM25."""

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.fusion import Ranked, best_weight, by_rank, by_weight
from pipeline.evaluate.metrics.names import RETRIEVAL
from pipeline.evaluate.metrics.report import retrieval_report
from pipeline.evaluate.report import HybridReport
from pipeline.evaluate.retrieval import RetrievalTask


def hybrid_reports(
    task: RetrievalTask, vectors: Ranked, words: Ranked, metrics: MetricsConfig
) -> tuple[HybridReport, ...]:
    """By ranks, and by weight. The weight is chosen by nDCG on the queries for tuning alone, which are not judged.

    `vectors` and `words`: lists of all queries of the task.
    """
    judged = task.num_queries
    ours, theirs = vectors.part(0, judged), words.part(0, judged)
    ranked = HybridReport(name="rrf", retrieval=task.report(by_rank(ours, theirs), metrics)[1])
    tuning = task.tuning
    if isinstance(tuning, str):
        return ranked, HybridReport(name="weighted", missing=f"no weight was chosen: {tuning}")
    at = max((k for k in metrics.retrieval_at if k <= 10), default=min(metrics.retrieval_at))

    def quality(items: Int64s) -> float:
        per_query, _ = retrieval_report(tuning.ids, items, tuning.judged, metrics)
        return float(np.nanmean(per_query.values[f"{RETRIEVAL}ndcg@{at}"]))

    end = judged + len(tuning.ids)
    weight = best_weight(vectors.part(judged, end), words.part(judged, end), quality)
    weighted = HybridReport(
        name="weighted",
        weight=weight,
        valid_queries=len(tuning.ids),
        retrieval=task.report(by_weight(ours, theirs, weight), metrics)[1],
    )
    return ranked, weighted
