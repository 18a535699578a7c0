"""One way to score every tool: the same exact search, the same metrics, the same choice of a threshold."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bench.quality.tasks import Catalogue
from pipeline.core.arrays import Float32s
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.metrics.measure import retrieval_report
from pipeline.evaluate.metrics.ranking import Judgements
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows
from pipeline.retrieval.search import ExactTopK

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


def of_cosines(cosine: Float32s, positive: npt.NDArray[np.bool_]) -> ScoredRows:
    """Pairs that a bi-encoder has compared, [N] each, as rows of a model of two labels: -1 to 1 becomes 0 to 1."""
    match = np.clip((1.0 + cosine.astype(np.float64)) / 2, 0.0, 1.0)
    rows, gain = np.arange(len(match), dtype=np.int64), positive.astype(np.float64)
    probabilities = np.stack([1.0 - match, match], axis=1)
    return ScoredRows(rows, positive.astype(np.int64), gain, probabilities, ("other", "match"), (0.0, 1.0))
