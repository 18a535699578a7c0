"""The baselines (BM25 and gradient boosting), which rank 0 scores after the models.

Their scores are stored under `baselines/` in the workspace with a key that is derived from their inputs. This allows
other candidates, attempts and cycles to reuse them as long as the data stays the same.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import JsonValue

from pipeline.core.arrays import Float64s, Int64s
from pipeline.core.batch_order import locate
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import Json, fingerprint
from pipeline.core.optional import install_command
from pipeline.core.progress import progress
from pipeline.core.shuffle import permute, stream_key
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.token_sets import TokenSetInfo, open_rows
from pipeline.evaluate.gate.judge import Baseline
from pipeline.evaluate.holdout import Holdout
from pipeline.evaluate.metrics.labels import best_threshold
from pipeline.evaluate.metrics.measure import metric_report, retrieval_report
from pipeline.evaluate.metrics.scored_rows import ScoredRows
from pipeline.evaluate.report import BaselineReport, HybridReport
from pipeline.evaluate.retrieval import ModelSearch, RetrievalTask
from pipeline.evaluate.score import by_sample_id, load_arrays, save_arrays, scored_rows
from pipeline.io.commit import read_manifest
from pipeline.retrieval.bm25 import K1, WORDS_VERSION, B, Bm25, unmatched_warning
from pipeline.retrieval.search import Ranked, best_weight, fuse_by_rank, fuse_by_weight

VERSION = 1  # Increase this when a baseline changes, so that stored scores are no longer used.
BM25, BOOSTING = "BM25", "boosting"


@dataclass(frozen=True)
class ScoredBaseline:
    """The results of a baseline: its report, the input to the gate and, for BM25 only, the ranked items."""

    report: BaselineReport
    baseline: Baseline
    ranked: Ranked | None = None


def score_baselines(search: ModelSearch, timed: Callable[[str], AbstractContextManager[None]]) -> list[ScoredBaseline]:
    """Score the enabled baselines, or load their scores if they have been stored before.

    Raises DataError if stored scores cannot be read, and Preempted on a stop signal.
    """
    config = search.settings.evaluate
    scored = []
    if config.baselines.bm25 and config.retrieval.enabled:
        with timed("bm25"):
            scored.append(_score_bm25(search, search.task))
    if config.baselines.boosting:
        with timed("boosting"):
            scored.append(_score_boosting(search))
    return scored


def _key(search: ModelSearch, name: str, inputs: dict[str, Json]) -> str:
    digest = fingerprint({"version": VERSION, **inputs})[:16]
    return f"baselines/{search.settings.data.name}/{name}-{digest}"


# BM25, and hybrid search, which combines a model with BM25.


def lexical_search(task: RetrievalTask, k: int, stop: StopSignal) -> Ranked:
    """Find the top k items for every query with BM25, in this process only. Raises Preempted on a stop signal."""

    def texts() -> Iterator[str]:
        for part in task.texts():
            stop.raise_if_set("indexing the catalogue for BM25")
            advance(len(part))
            yield from part

    def count(row: int, scores: Float64s) -> None:
        stop.raise_if_set("searching the catalogue with BM25")
        advance(1)

    with progress("indexing the catalogue for BM25", task.num_items, "items") as advance:
        index = Bm25(texts())
    queries = [text for group in task.query_groups for text in group.texts]
    with progress("searching the catalogue with BM25", len(queries), "queries") as advance:
        scores, items = index.search(queries, k, count)
    return Ranked(items, scores)


def _score_bm25(search: ModelSearch, task: RetrievalTask | str) -> ScoredBaseline:
    if isinstance(task, str):
        return ScoredBaseline(BaselineReport(name="bm25", missing=task), Baseline(BM25, missing=task))
    key = _key(search, "bm25", {**search.inputs, "k1": K1, "b": B, "words": WORDS_VERSION})
    if read_manifest(search.ctx.workspace, key) is None:
        result = search.save(task, key, lexical_search(task, max(search.metrics.retrieval_at), search.ctx.stop))
    else:
        result = search.load(task, key)
    weak = ""
    if result.ranked is not None:
        first = result.ranked.items[: len(task.queries.ids), 0]
        weak = unmatched_warning(int((first < 0).sum()), len(first), "item")
        if weak:
            search.warn(f"BM25 has no results: {weak}")
    report = BaselineReport(name="bm25", scores=key, retrieval=result.report, weak=weak)
    return ScoredBaseline(report, Baseline(BM25, retrieval=result.per_query, weak=weak), result.ranked)


def fuse(search: ModelSearch, scored: list[ScoredBaseline], vectors: Ranked | None) -> tuple[HybridReport, ...]:
    """Evaluate hybrid search, which fuses the results of a model (`vectors`) with those of BM25.

    Results are fused in two ways: by reciprocal rank, and by a weighted sum of scores. The weight is the one with the
    highest nDCG on the tuning queries, which are separate from the test queries.
    """
    lexical, task, metrics = next((each.ranked for each in scored if each.ranked), None), search.task, search.metrics
    if lexical is None or vectors is None or isinstance(task, str):
        return ()
    judged, tuning = len(task.queries.ids), task.tuning
    both = vectors.part(0, judged), lexical.part(0, judged)
    ranked = HybridReport(name="rrf", retrieval=task.report(fuse_by_rank(*both), metrics)[1])
    if tuning is None:
        reason = "hybrid search was not weighted, because the valid split has no queries to tune the weight on"
        return ranked, HybridReport(name="weighted", missing=reason)

    def quality(items: Int64s) -> float:
        per_query, _ = retrieval_report(tuning.ids, items, tuning.judged, metrics)
        return float(np.nanmean(per_query.values[search.ndcg]))

    end = judged + len(tuning.ids)
    weight = best_weight(vectors.part(judged, end), lexical.part(judged, end), quality)
    report = task.report(fuse_by_weight(*both, weight), metrics)[1]
    return ranked, HybridReport(name="weighted", weight=weight, valid_queries=len(tuning.ids), retrieval=report)


# Gradient boosting on the numeric features of prepared rows, both the lexical ones and those that the data provides.
# An encoder is only worth its cost if it beats this baseline.
#
# We fit scikit-learn's HistGradientBoostingClassifier with default settings and no early stopping on the train split.
# This takes 5 s for 100,000 rows and 3 labels, and needs memory for the features of these rows and of one block of
# scored rows.
#
# Note that we only use one thread. With two threads the trees are the same, but fitting takes 4 times as long if
# another process keeps the second core busy.

SEED = 1
MAX_ROWS = 200_000  # maximum number of training rows to fit on, sampled uniformly
KEPT = ("sample_id", "query_id", "label", "gain")
PROBABILITIES = "probabilities"
# A call to `fit` cannot be interrupted, so we fit a few rounds per call. This results in the same trees.
_ROUNDS, _ROUNDS_AT_ONCE = 100, 25
_BLOCK_ROWS = 65_536


@dataclass(frozen=True)
class Boosting:
    """A fitted classifier.

    `labels` maps its output columns to label indices, because some of the `num_labels` labels may not occur in the
    training rows. `num_rows` is the number of rows that it was fitted on.
    """

    model: Any
    labels: Int64s
    num_labels: int
    num_rows: int

    def score(self, holdout: Holdout, stop: StopSignal) -> Arrays:
        """Score a holdout. Returns the arrays in KEPT and float32 probabilities [N, K], sorted by sample_id."""
        parts: list[Arrays] = []
        with _one_thread(), progress("scoring with gradient boosting", holdout.order.total, "rows") as advance:
            for arrays in holdout.blocks((*KEPT, "numeric")):
                stop.raise_if_set("scoring with gradient boosting")
                table = np.zeros((len(arrays["label"]), self.num_labels), dtype=np.float32)
                table[:, self.labels] = self.model.predict_proba(arrays.pop("numeric"))
                parts.append({**arrays, PROBABILITIES: table})
                advance(len(table))
        return by_sample_id(parts)


def to_rows(arrays: Arrays, info: TokenSetInfo) -> ScoredRows:
    """Convert the arrays returned by `Boosting.score` to rows from which metrics can be computed."""
    return scored_rows(arrays, arrays[PROBABILITIES].astype(np.float64), info, {})


def fit(train: TokenRows, num_labels: int, max_rows: int, stop: StopSignal) -> Boosting | str:
    """Fit a classifier on at most `max_rows` training rows, which are always the same sample.

    Returns the reason as a string if the rows cannot be fitted. Raises Preempted on a stop signal.
    """
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier
    except ImportError as error:
        return f"scikit-learn cannot be imported ({error}): {install_command('sklearn')}"
    total = sum(train.sizes)
    chosen = np.arange(total, dtype=np.int64)
    if total > max_rows:
        chosen = np.sort(permute(chosen[:max_rows], total, stream_key(SEED)))
    parts: list[Arrays] = []
    for start in range(0, len(chosen), _BLOCK_ROWS):
        stop.raise_if_set("reading rows for gradient boosting")
        bucket, numbers = locate(train.sizes, chosen[start : start + _BLOCK_ROWS])
        parts.append(train.read(bucket, numbers, len(train.sizes) - 1, ("numeric", "label")))
    if not parts:
        return "the train split has no rows"
    features, label = (np.concatenate([part[name] for part in parts]) for name in ("numeric", "label"))
    if not features.shape[1]:
        return "prepared rows have no numeric features (see data.lexical and data.numeric)"
    features, label = features[label >= 0], label[label >= 0]
    if len(np.unique(label)) < 2:
        return "the train split has fewer than two labels"
    model = HistGradientBoostingClassifier(early_stopping=False, warm_start=True, random_state=SEED)
    with _one_thread(), progress("fitting gradient boosting", _ROUNDS, "rounds") as advance:
        for rounds in range(_ROUNDS_AT_ONCE, _ROUNDS + 1, _ROUNDS_AT_ONCE):
            stop.raise_if_set("fitting gradient boosting")
            model.set_params(max_iter=rounds).fit(features, label)
            advance(_ROUNDS_AT_ONCE)
    return Boosting(model, model.classes_.astype(np.int64), num_labels, len(label))


def _one_thread() -> AbstractContextManager[object]:
    from threadpoolctl import threadpool_limits  # installed with scikit-learn

    limits: AbstractContextManager[object] = threadpool_limits(1, user_api="openmp")
    return limits


def _score_boosting(search: ModelSearch) -> ScoredBaseline:
    holdout, valid, ctx, info = search.holdout, search.valid, search.ctx, search.holdout.sets[0].info
    inputs: dict[str, Json] = {
        "data": [token_set.info.fingerprint for token_set in search.sets],
        "holdout": holdout.name,
        "valid": valid if isinstance(valid, str) else valid.name,
        "rows": MAX_ROWS,
    }
    key = _key(search, "boosting", inputs)
    if read_manifest(ctx.workspace, key) is None:
        train = open_rows(ctx.workspace, search.sets, "train", ctx.scratch / "tokens")
        fitted = fit(train, len(info.labels), MAX_ROWS, ctx.stop)
        if isinstance(fitted, str):
            return ScoredBaseline(BaselineReport(name="boosting", missing=fitted), Baseline(BOOSTING, missing=fitted))
        threshold, chosen_on = None, holdout if holdout.split == "valid" else valid
        if not isinstance(chosen_on, str) and fitted.num_labels == 2:
            try:
                threshold = best_threshold(to_rows(fitted.score(chosen_on, ctx.stop), info))
            except DataError as error:
                search.warn(f"no threshold was chosen for {BOOSTING}: {error.seen}")
        arrays = fitted.score(holdout, ctx.stop)
        fields: Mapping[str, JsonValue] = {"threshold": threshold, "fitted_rows": fitted.num_rows}
        save_arrays(ctx.workspace, key, "boosting", arrays, ctx.scratch, fields)
    else:
        arrays, fields = load_arrays(ctx.workspace, key, "boosting", ctx.scratch / "boosting")
    rows, chosen = to_rows(arrays, info), fields.get("threshold")
    threshold = chosen if isinstance(chosen, float) else None
    metrics = metric_report(rows, search.settings.evaluate.metrics, threshold)
    report = BaselineReport(name="boosting", scores=key, metrics=metrics, threshold=threshold)
    return ScoredBaseline(report, Baseline(BOOSTING, rows=rows, threshold=threshold))
