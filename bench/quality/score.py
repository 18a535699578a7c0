"""One way to score every tool: the same exact search, the same metrics, the same choice of a threshold."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bench.quality.tasks import Catalogue
from pipeline.core.metrics import Judgements, MetricsConfig, retrieval_report
from pipeline.core.scored import PerQuery
from pipeline.evaluation.exact import ExactTopK

Float32s = npt.NDArray[np.float32]
Encode = Callable[[Sequence[str]], Float32s]
"""Texts to unit vectors [N, D]."""
DEPTH = 100
_WINDOW = 4096


def nearest(encode: Encode, catalogue: Catalogue) -> npt.NDArray[np.int64]:
    """The DEPTH nearest titles of each query asked, [Q, DEPTH], best first."""
    search = ExactTopK(encode(catalogue.queries), DEPTH)
    for first in range(0, len(catalogue.titles), _WINDOW):
        search.add(first, encode(catalogue.titles[first : first + _WINDOW]))
    return search.found()[1]


def retrieval(ranked: npt.NDArray[np.int64], catalogue: Catalogue) -> tuple[PerQuery, dict[str, float]]:
    """Figures of each query, and their means."""
    relevant = np.flatnonzero(np.isin(catalogue.owner, catalogue.asked)).astype(np.int64)
    judged = Judgements(catalogue.owner[relevant], relevant, np.ones(len(relevant)))
    per_query, report = retrieval_report(catalogue.asked, ranked, judged, MetricsConfig())
    return per_query, {name.removeprefix("retrieval_"): value for name, value in report.values.items()}


def best_f1_threshold(score: npt.NDArray[np.floating], positive: npt.NDArray[np.bool_]) -> float:
    """The score from which F1 is best, [N] each."""
    order = np.argsort(-score, kind="stable")
    hits = np.cumsum(positive[order])
    f1 = 2 * hits / (np.arange(1, len(order) + 1) + positive.sum())
    return float(score[order][int(np.argmax(f1))])


def f1(score: npt.NDArray[np.floating], positive: npt.NDArray[np.bool_], threshold: float) -> float:
    """F1 of the positive class, [N] each."""
    said = score >= threshold
    return float(2 * (said & positive).sum() / max(1, said.sum() + positive.sum()))
