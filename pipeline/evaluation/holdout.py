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
from pipeline.core.metrics import class_figures, ndcg
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.loader import RowSource, evaluation_batches
from pipeline.data.shards import Arrays
from pipeline.parallel.gang import Gang

Score = Callable[[Mapping[str, Tensor]], Tensor]
"""A batch on the device to logits [B, K] on the device."""


@dataclass(frozen=True)
class HoldoutFigures:
    """What a model reaches on a holdout. `ndcg` is at 10, by expected gain; NaN without gains."""

    rows: int
    loss: float
    accuracy: float
    macro_f1: float
    positive_f1: float
    ndcg: float


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
) -> HoldoutFigures:
    """Score at most `limit` rows and compute figures over all ranks. Raises DataError for an empty holdout."""
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
            kept.append({name: arrays[name] for name in ("label", "gain", "query_id", "sample_id")})
            yield tensors

    logits: list[npt.NDArray[np.float32]] = []
    world_size = gang.world.world_size
    total = -(-min(limit, sum(rows.sizes)) // world_size)  # of this rank; the others go as fast
    unit = "rows of each rank" if world_size > 1 else "rows"
    with progress("scoring the holdout", total, unit) as advance, backend.loader(batches()) as ready:
        for batch in ready:
            stop.raise_if_set("evaluating the holdout")
            (host,) = backend.to_host([score(batch)])
            logits.append(host.numpy())
            advance(len(kept[len(logits) - 1]["label"]))
    if len(logits) != len(kept):
        raise RuntimeError(f"evaluated {len(logits)} of {len(kept)} batches: a loader thread ended early")
    mine = {name: np.concatenate([arrays[name] for arrays in kept]) for name in kept[0]} if kept else {}
    if kept:
        mine["logits"] = np.concatenate(
            [host[: len(arrays["label"])] for host, arrays in zip(logits, kept, strict=True)]
        )
    parts: list[dict[str, npt.NDArray[Any]]] = [part for part in gang.gather(mine) if part]
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    order = np.argsort(joined["sample_id"], kind="stable")  # the figures do not depend on how ranks shared the rows
    return figures({name: values[order] for name, values in joined.items()}, label_gains)


def figures(joined: dict[str, npt.NDArray[Any]], label_gains: tuple[float, ...]) -> HoldoutFigures:
    """Figures from gathered arrays: logits [N, K], label, gain, query_id, all [N]."""
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
    )
