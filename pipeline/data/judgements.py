"""Counts of what was judged in a partition, and what they say about the quality that can be learnt from it.

Gains are counted in hundredths: the gain that makes a positive is a setting of training, which may change later.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.batch_order import Bucket
from pipeline.core.stop import StopSignal
from pipeline.data.shards import map_safetensors
from pipeline.data.token_sets import JudgedSplit, ShardInfo, Split, TokenSetInfo

_BINS = 101
_GRID = (np.arange(_BINS) / (_BINS - 1)).astype(np.float32)


def hundredths(gain: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Return gains from 0 to 1 in hundredths, rounded down as float32 has them."""
    return np.searchsorted(_GRID, np.asarray(gain, dtype=np.float32), side="right") - 1


def count_judgements(
    folder: Path, splits: Mapping[Split, Sequence[ShardInfo]], num_labels: int, stop: StopSignal
) -> dict[Split, JudgedSplit]:
    """Count the judgements of the shards in `folder`, by split. Takes 10 bytes of memory for each query of a shard."""
    counted = {split: _count(folder, shards, num_labels, stop) for split, shards in splits.items()}
    trained = counted["train"][1] if "train" in counted else np.zeros(0, dtype=np.int64)
    return {
        split: judged
        if split == "train"
        else judged.model_copy(update={"queries_in_train": len(np.intersect1d(ids, trained, assume_unique=True))})
        for split, (judged, ids) in counted.items()
    }


def _count(folder: Path, shards: Sequence[ShardInfo], num_labels: int, stop: StopSignal) -> tuple[JudgedSplit, Int64s]:
    """Return the counts of one split and the ids of its queries."""
    gains = np.zeros((len(shards[0].rows), _BINS), dtype=np.int64)
    rows, sums = np.zeros(num_labels, dtype=np.int64), np.zeros(num_labels, dtype=np.float64)
    queries: list[tuple[Any, Any, Any]] = []
    for shard in shards:
        stop.raise_if_set("counting judgements")
        arrays = map_safetensors(folder / shard.file)
        for bucket in np.flatnonzero(shard.rows).tolist():
            gain, label, query = (np.asarray(arrays[f"b{bucket}.{name}"]) for name in ("gain", "label", "query_id"))
            bins = hundredths(gain).astype(np.uint8)
            gains[bucket] += np.bincount(bins, minlength=_BINS)
            known = label >= 0
            rows += np.bincount(label[known], minlength=num_labels)
            sums += np.bincount(label[known], weights=gain[known], minlength=num_labels)
            queries.append(_by_query(query, bins, bins))
    ids, worst, best = _by_query(*(np.concatenate(column) for column in zip(*queries, strict=True)))
    judged = JudgedSplit(
        gains=tuple(_filled(counts) for counts in gains),
        labels=tuple(rows.tolist()),
        label_gain_sums=tuple(sums.tolist()),
        query_best=_filled(np.bincount(best)),
        query_worst=_filled(np.bincount(worst)),
    )
    return judged, ids


def _by_query(ids: Int64s, low: Any, high: Any) -> tuple[Int64s, Any, Any]:
    """Return each of the ids once, ascending, with its lowest `low` and its highest `high`."""
    order = np.argsort(ids, kind="stable")
    unique, starts = np.unique(ids[order], return_index=True)
    return unique, np.minimum.reduceat(low[order], starts), np.maximum.reduceat(high[order], starts)


def _filled(counts: Int64s) -> dict[int, int]:
    return {int(place): int(counts[place]) for place in np.flatnonzero(counts)}


@dataclass(frozen=True)
class JudgementCounts:
    """Counts of one split over some partitions, at one gain of a positive. A query counts once in each partition.

    `mean_gains`: by label, None for a label without rows.
    """

    rows: int
    positives: int
    queries: int
    queries_without_positive: int
    queries_without_negative: int
    mean_gains: tuple[float | None, ...]


def judgements_of(infos: Sequence[TokenSetInfo], split: Split, positive_gain: float) -> JudgementCounts | None:
    """Add up the counts of partitions; None if none of them has any (no rows, or prepared by an earlier version)."""
    counted = [info.judged[split] for info in infos if split in info.judged]
    if not counted:
        return None
    least = int(hundredths(positive_gain))
    gains = sum((Counter(bucket) for one in counted for bucket in one.gains), Counter[int]())
    best = sum((Counter(one.query_best) for one in counted), Counter[int]())
    worst = sum((Counter(one.query_worst) for one in counted), Counter[int]())
    rows = [sum(column) for column in zip(*(one.labels for one in counted), strict=True)]
    sums = [sum(column) for column in zip(*(one.label_gain_sums for one in counted), strict=True)]
    return JudgementCounts(
        rows=gains.total(),
        positives=_at_least(gains, least),
        queries=best.total(),
        queries_without_positive=best.total() - _at_least(best, least),
        queries_without_negative=_at_least(worst, least),
        mean_gains=tuple(total / count if count else None for total, count in zip(sums, rows, strict=True)),
    )


def _at_least(counts: Mapping[int, int], least: int) -> int:
    return sum(count for gain, count in counts.items() if gain >= least)


# What in the data costs quality without failing anything.

MANY = 0.5
"""Above this share of queries a warning is given."""
_TRUNCATED = 0.05
"""Above this share of rows with a text that was cut a warning is given."""
_SAME_GAIN = 1e-6
_IN_TRAIN = 0.05
"""Above this share of queries of a holdout split that are in train a warning is given."""


def training_warnings(infos: Sequence[TokenSetInfo], positive_gain: float, *, contrastive: bool) -> dict[str, str]:
    """Return what keeps the losses from learning in the train split, by kind. `contrastive`: that loss is on."""
    judged = judgements_of(infos, "train", positive_gain)
    if judged is None:
        return {}
    found, least = dict[str, str](), f"train.loss.positive_gain {positive_gain:g}"
    if contrastive and not judged.positives:
        found["positives"] = (
            f"no row has a gain of {least} or more: the contrastive loss learns nothing; lower it, give"
            " gains (data.columns.gain), or order data.labels from worst to best"
        )
    elif contrastive and judged.queries_without_positive > MANY * judged.queries:
        found["without positive"] = (
            f"{judged.queries_without_positive:,} of {judged.queries:,} queries have no row with a gain of {least} or"
            " more: the contrastive loss learns nothing from them; lower it if their best products count as relevant"
        )
    if contrastive and judged.positives and judged.queries_without_negative > MANY * judged.queries:
        found["without negative"] = (
            f"{judged.queries_without_negative:,} of {judged.queries:,} queries have no judged negative: their"
            " negatives are other queries' products alone; trnpipe mine finds harder ones"
        )
    gains = [(name, gain) for name, gain in zip(infos[0].labels, judged.mean_gains, strict=False) if gain is not None]
    if any(worse > better + _SAME_GAIN for (_, worse), (_, better) in pairwise(gains)):
        shown = ", ".join(f"{label} {gain:.3g}" for label, gain in gains)
        found["order"] = (
            f"labels from worst to best have these mean gains: {shown}; put data.labels in the order of gains"
        )
    return found


def prepared_warnings(infos: Sequence[TokenSetInfo], positive_gain: float, *, contrastive: bool) -> list[str]:
    """Return the warnings of all prepared partitions together, whoever prepared them."""
    found, truncated, rows = list[str](), sum(info.truncated_rows for info in infos), sum(info.rows for info in infos)
    if truncated > _TRUNCATED * rows:
        found.append(
            f"{truncated:,} of {rows:,} rows ({truncated / rows:.0%}) have a text longer than the largest"
            f" bucket {Bucket.parse(infos[0].buckets[-1]).name}: the rest of it is not read; add a larger one to"
            " data.buckets"
        )
    found += training_warnings(infos, positive_gain, contrastive=contrastive).values()
    holdouts: tuple[Split, ...] = ("valid", "test")
    for split in holdouts:
        counted = [info.judged[split] for info in infos if split in info.judged]
        queries = sum(sum(one.query_best.values()) for one in counted)
        again = sum(one.queries_in_train for one in counted)
        if again > _IN_TRAIN * queries:
            found.append(
                f"{again:,} of {queries:,} queries ({again / queries:.0%}) of split {split} are in split train too:"
                " figures on them are better than on new queries; give the data a split column that keeps queries"
                " apart, or --evaluate.leak warn"
            )
    return found
