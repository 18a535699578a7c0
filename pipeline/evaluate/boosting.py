"""Gradient boosting on the numeric features of prepared rows (the lexical ones, and those of the data): what a model
must beat to be worth an encoder.

scikit-learn's HistGradientBoostingClassifier with its default settings and no early stopping, fitted on rows of the
train split. Time: 5 s for 100,000 rows and 3 labels. Memory: the features of those rows, and of one block of the rows
that are scored.

One thread: two take 4 times as long where another process has the second core, and give the same trees.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.core.batching import locate
from pipeline.core.order import permute, stream_key
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.tokens import TokenSetInfo
from pipeline.evaluate.holdout_rows import Holdout
from pipeline.evaluate.scored import ScoredRows

SEED = 1
KEPT = ("sample_id", "query_id", "label", "gain")
PROBABILITIES = "probabilities"
_ROUNDS, _ROUNDS_AT_ONCE = 100, 25  # a fit cannot be interrupted; one that goes on gives the same trees
_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class Boosting:
    """A fitted model, and which of K labels its columns are."""

    model: Any
    labels: Int64s
    num_labels: int
    num_rows: int
    """It was fitted on."""

    def score(self, holdout: Holdout, stop: StopSignal) -> Arrays:
        """Arrays of the rows that are scored, by ascending sample_id: KEPT and probabilities float32 [N, K]."""
        parts: list[Arrays] = []
        with _one_thread(), progress("scoring with gradient boosting", holdout.order.total, "rows") as advance:
            for arrays in holdout.blocks((*KEPT, "numeric")):
                stop.raise_if_set("scoring with gradient boosting")
                table = np.zeros((len(arrays["label"]), self.num_labels), dtype=np.float32)
                table[:, self.labels] = self.model.predict_proba(arrays.pop("numeric"))
                parts.append({**arrays, PROBABILITIES: table})
                advance(len(table))
        every = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        order = np.argsort(every["sample_id"], kind="stable")
        return {name: values[order] for name, values in every.items()}


def to_rows(arrays: Arrays, info: TokenSetInfo) -> ScoredRows:
    """What `score` gave, as metrics read it. `info`: of the data."""
    return ScoredRows(
        arrays["query_id"].astype(np.int64),
        arrays["label"].astype(np.int64),
        arrays["gain"].astype(np.float64),
        arrays[PROBABILITIES].astype(np.float64),
        info.labels,
        info.label_gains,
    )


def fit(train: TokenRows, num_labels: int, max_rows: int, stop: StopSignal) -> Boosting | str:
    """Fit on at most `max_rows` rows, the same ones each time; or why that cannot be. Raises Preempted."""
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier
    except ImportError as error:
        return f"scikit-learn cannot be imported ({error}): pip install 'trnpipe[baselines]'"
    rows = _some_rows(train, max_rows, stop)
    if not rows or not rows["numeric"].shape[1]:
        return "prepared rows have no numeric feature (data.lexical, data.numeric)" if rows else "no row of split train"
    labelled = rows["label"] >= 0
    features, label = rows["numeric"][labelled], rows["label"][labelled]
    if len(np.unique(label)) < 2:
        return "the train split has rows of fewer than two labels"
    model = HistGradientBoostingClassifier(early_stopping=False, warm_start=True, random_state=SEED)
    with _one_thread(), progress("fitting gradient boosting", _ROUNDS, "rounds") as advance:
        for rounds in range(_ROUNDS_AT_ONCE, _ROUNDS + 1, _ROUNDS_AT_ONCE):
            stop.raise_if_set("fitting gradient boosting")
            model.set_params(max_iter=rounds).fit(features, label)
            advance(_ROUNDS_AT_ONCE)
    return Boosting(model, model.classes_.astype(np.int64), num_labels, len(label))


def _one_thread() -> AbstractContextManager[object]:
    from threadpoolctl import threadpool_limits  # comes with scikit-learn

    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="openmp")
    return limits


def _some_rows(train: TokenRows, max_rows: int, stop: StopSignal) -> Arrays:
    """`numeric` [n, F] and `label` [n] of at most `max_rows` rows; nothing when there are none."""
    total = sum(train.sizes)
    chosen = np.arange(total, dtype=np.int64)
    if total > max_rows:
        chosen = np.sort(permute(chosen[:max_rows], total, stream_key(SEED)))
    parts: list[Arrays] = []
    for start in range(0, len(chosen), _BLOCK_ROWS):
        stop.raise_if_set("reading rows for gradient boosting")
        bucket, numbers = locate(train.sizes, chosen[start : start + _BLOCK_ROWS])
        parts.append(train.read(bucket, numbers, len(train.sizes) - 1, ("numeric", "label")))
    return {name: np.concatenate([part[name] for part in parts]) for name in ("numeric", "label")} if parts else {}
