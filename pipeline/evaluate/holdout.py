"""Scores of a model on a holdout: static shapes, split over ranks, figures on the host."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeline.backends import Backend, Batch
from pipeline.core.batching import RankShare
from pipeline.core.errors import DataError
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.loader import RowSource, evaluation_batches
from pipeline.data.shards import Arrays
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.exact import ExactTopK
from pipeline.evaluate.metrics.labels import class_figures
from pipeline.evaluate.metrics.measure import retrieval_report
from pipeline.evaluate.metrics.ranking import ndcg
from pipeline.evaluate.metrics.retrieval import Judgements
from pipeline.evaluate.products import text_hashes
from pipeline.model.relevance import RelevanceOutputs
from pipeline.parallel.gang import Gang

Score = Callable[[Mapping[str, Tensor]], RelevanceOutputs]
"""A batch of B pairs on the device to logits [B, K] and embeddings [B, D], fp32 on the device."""
_DEPTH = 10
"""Of the ranked lists: nDCG@10."""


@dataclass(frozen=True)
class HoldoutFigures:
    """What a model reaches on a holdout. `ndcg` is at 10, by expected gain; NaN without gains.

    `retrieval_ndcg` is at 10 too: every query searched, by the cosine of embeddings, in the distinct products of the
    rows that were scored; None where that was not asked for, or nothing is relevant.
    """

    rows: int
    loss: float
    accuracy: float
    macro_f1: float
    positive_f1: float
    ndcg: float
    retrieval_ndcg: float | None = None

    @property
    def combined(self) -> float | None:
        """One figure for a model that is to be good at both: the mean of macro F1 and retrieval nDCG@10."""
        return None if self.retrieval_ndcg is None else (self.macro_f1 + self.retrieval_ndcg) / 2


def evaluate_holdout(
    score: Score,
    backend: Backend,
    rows: RowSource,
    *,
    label_gains: tuple[float, ...],
    batch_size: int,
    limit: int,
    gang: Gang,
    stop: StopSignal,
    search_pad_id: int | None = None,
) -> HoldoutFigures:
    """Score at most `limit` rows and compute figures over all ranks. Raises DataError for an empty holdout.

    `search_pad_id`: when given, also search; product tokens are padded with it. Memory: 8 D bytes a row on every rank.
    """
    if not sum(rows.sizes):
        raise DataError(
            "the holdout is empty",
            expected="rows in the valid split",
            next_command="raise data.valid_fraction, or give a split column",
        )
    share = RankShare(gang.world.rank, gang.world.world_size)
    kept: list[Arrays] = []

    def batches() -> Iterator[Batch]:
        for arrays, tensors in evaluation_batches(rows, batch_size=batch_size, limit=limit, share=share):
            rows_of = {name: arrays[name] for name in ("label", "gain", "query_id", "sample_id")}
            if search_pad_id is not None:
                rows_of["text"] = text_hashes(arrays["product"], search_pad_id)
            kept.append(rows_of)
            yield tensors

    found: list[dict[str, npt.NDArray[np.float32]]] = []
    world_size = gang.world.world_size
    total = -(-min(limit, sum(rows.sizes)) // world_size)  # of this rank; the others go as fast
    unit = "rows of each rank" if world_size > 1 else "rows"
    with progress("scoring the holdout", total, unit) as advance, backend.loader(batches()) as ready:
        for batch in ready:
            stop.raise_if_set("evaluating the holdout")
            outputs = score(batch)
            host = backend.to_host([outputs.logits] if search_pad_id is None else list(outputs))
            found.append({name: part.numpy() for name, part in zip(outputs._fields, host, strict=False)})
            advance(len(kept[len(found) - 1]["label"]))
    if len(found) != len(kept):
        raise RuntimeError(f"evaluated {len(found)} of {len(kept)} batches: a loader thread ended early")
    mine = {name: np.concatenate([arrays[name] for arrays in kept]) for name in kept[0]} if kept else {}
    for name in found[0] if found else ():
        mine[name] = np.concatenate(
            [host[name][: len(arrays["label"])] for host, arrays in zip(found, kept, strict=True)]
        )
    parts: list[dict[str, npt.NDArray[Any]]] = [part for part in gang.gather(mine) if part]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(joined["sample_id"], kind="stable")  # the figures do not depend on how ranks shared the rows
    return figures({name: values[order] for name, values in joined.items()}, label_gains)


def figures(joined: dict[str, npt.NDArray[Any]], label_gains: tuple[float, ...]) -> HoldoutFigures:
    """Figures from gathered arrays: logits [N, K], label, gain, query_id, all [N].

    With retrieval also embeddings `query` and `product` [N, D], and `text` [N], equal for equal products.
    """
    logits = joined["logits"].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    label = joined["label"].astype(np.int64)
    labelled = label >= 0
    classes = class_figures(label[labelled], probabilities[labelled].argmax(axis=1), probabilities.shape[1])
    chosen = probabilities[labelled, label[labelled]]
    return HoldoutFigures(
        rows=len(label),
        loss=float(-np.log(np.maximum(chosen, 1e-30)).mean()),
        accuracy=classes.accuracy,
        macro_f1=classes.macro_f1,
        positive_f1=classes.positive_f1,
        ndcg=ndcg(joined["query_id"], joined["gain"].astype(np.float64), probabilities @ np.array(label_gains), 10),
        retrieval_ndcg=_retrieval_ndcg(joined) if "product" in joined else None,
    )


def _retrieval_ndcg(joined: dict[str, npt.NDArray[Any]]) -> float | None:
    """nDCG@10 of each query among the distinct products; None when no query has a gain, or a vector is not finite."""
    gain = joined["gain"].astype(np.float64)
    texts, first, item = np.unique(joined["text"], return_index=True, return_inverse=True)
    asked, rows = np.unique(joined["query_id"], return_index=True)
    query, product = joined["query"][rows], joined["product"][first]
    if not (gain > 0).any() or not (np.isfinite(query).all() and np.isfinite(product).all()):
        return None
    nearest = ExactTopK(_unit(query), min(_DEPTH, len(texts)))
    nearest.add(0, _unit(product))
    positive = gain > 0
    judged = Judgements(joined["query_id"][positive], item.reshape(-1)[positive].astype(np.int64), gain[positive])
    name = f"retrieval_ndcg@{_DEPTH}"
    ranked = np.full((len(asked), _DEPTH), -1, dtype=np.int64)
    ranked[:, : min(_DEPTH, len(texts))] = nearest.found()[1]
    report = retrieval_report(asked, ranked, judged, MetricsConfig(retrieval_at=(_DEPTH,)))[1]
    return report.values.get(name)


def _unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: npt.NDArray[np.float32] = (vectors / np.maximum(length, 1e-12)).astype(np.float32)
    return unit
