"""Counts of what was judged in a partition, read from its staged shards before they are committed.

Nothing here depends on the settings of training: gains are counted in hundredths, so that whoever asks later may choose
which gain makes a positive. Memory does not grow with the rows: queries are counted a range of ids at a time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.stop import StopSignal
from pipeline.data.shards import map_safetensors
from pipeline.data.tokens import JudgedSplit, ShardInfo, Split, TokenSetInfo

Bins = npt.NDArray[np.uint8]

_STEPS = 100
_GRID = (np.arange(_STEPS + 1) / _STEPS).astype(np.float32)
_ROWS_AT_ONCE = 2_000_000
"""Rows whose queries are held at a time: about 60 MB."""
_IDS = 2**63
"""Query ids are hashes, spread evenly below this (core/fingerprint.hash63)."""


def hundredths(gain: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Gains from 0 to 1 in hundredths, rounded down, as float32 has them."""
    return np.searchsorted(_GRID, np.asarray(gain, dtype=np.float32), side="right") - 1


def count_judgements(
    folder: Path, splits: Mapping[Split, Sequence[ShardInfo]], num_labels: int, stop: StopSignal
) -> dict[Split, JudgedSplit]:
    """Of the shards in `folder`. The same shards give the same counts, to the bit."""
    return {split: _count(folder, shards, num_labels, stop) for split, shards in splits.items()}


def _count(folder: Path, shards: Sequence[ShardInfo], num_labels: int, stop: StopSignal) -> JudgedSplit:
    num_buckets = len(shards[0].rows)
    gains = np.zeros((num_buckets, _STEPS + 1), dtype=np.int64)
    rows, sums = np.zeros(num_labels, dtype=np.int64), np.zeros(num_labels, dtype=np.float64)
    for bucket, arrays in _buckets(folder, shards, stop):
        gain, label = np.asarray(arrays["gain"]), np.asarray(arrays["label"])
        gains[bucket] += np.bincount(hundredths(gain), minlength=_STEPS + 1)
        known = label >= 0
        rows += np.bincount(label[known], minlength=num_labels)
        sums += np.bincount(label[known], weights=gain[known], minlength=num_labels)
    best, worst = np.zeros((2, _STEPS + 1), dtype=np.int64)
    passes = -(-int(gains.sum()) // _ROWS_AT_ONCE)
    for number in range(passes):
        first, last = number * _IDS // passes, (number + 1) * _IDS // passes - 1
        _, low, high = _by_query(_queries(folder, shards, first, last, stop))
        best += np.bincount(high, minlength=_STEPS + 1)
        worst += np.bincount(low, minlength=_STEPS + 1)
    return JudgedSplit(
        gains=tuple(_filled(counts) for counts in gains),
        labels=tuple(rows.tolist()),
        label_gain_sums=tuple(sums.tolist()),
        query_best=_filled(best),
        query_worst=_filled(worst),
    )


def _buckets(folder: Path, shards: Sequence[ShardInfo], stop: StopSignal) -> Iterator[tuple[int, dict[str, Any]]]:
    """The arrays of each bucket of each shard, mapped."""
    for shard in shards:
        stop.raise_if_set("counting judgements")
        arrays = map_safetensors(folder / shard.file)
        for bucket, count in enumerate(shard.rows):
            if count:
                yield bucket, {name: arrays[f"b{bucket}.{name}"] for name in ("query_id", "label", "gain")}


def _queries(
    folder: Path, shards: Sequence[ShardInfo], first: int, last: int, stop: StopSignal
) -> Iterator[tuple[Int64s, Bins, Bins]]:
    """Queries with an id from `first` to `last`, of one bucket of one shard after the other."""
    for _, arrays in _buckets(folder, shards, stop):
        ids = np.asarray(arrays["query_id"])
        chosen = (ids >= first) & (ids <= last)
        bins = hundredths(arrays["gain"][chosen]).astype(np.uint8)
        yield _by_query([(ids[chosen], bins, bins)])


def _by_query(pieces: Iterable[tuple[Int64s, Bins, Bins]]) -> tuple[Int64s, Bins, Bins]:
    """(ids, lowest, highest) of each query once."""
    columns = list(zip(*pieces, strict=True))
    ids, low, high = (np.concatenate(column) for column in columns)
    if not len(ids):
        return ids, low, high
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    return ids[starts], np.minimum.reduceat(low[order], starts), np.maximum.reduceat(high[order], starts)


def _filled(counts: Int64s) -> dict[int, int]:
    return {int(place): int(counts[place]) for place in np.flatnonzero(counts)}


@dataclass(frozen=True)
class Judgements:
    """Counts of one split over some partitions, at one gain of a positive. A query counts once in each partition.

    By bucket: rows and positives. By label, from worst to best: rows, and the mean gain or None.
    """

    rows: tuple[int, ...]
    positives: tuple[int, ...]
    queries: int
    queries_without_positive: int
    queries_without_negative: int
    labels: tuple[int, ...]
    mean_gains: tuple[float | None, ...]


def judgements_of(infos: Sequence[TokenSetInfo], split: Split, positive_gain: float) -> Judgements | None:
    """None when nothing of that split was counted (prepared by an earlier version, or no rows)."""
    counted = [info.judged[split] for info in infos if split in info.judged]
    if not counted:
        return None
    least = int(hundredths(positive_gain))
    labels = [sum(column) for column in zip(*(one.labels for one in counted), strict=True)]
    sums = [sum(column) for column in zip(*(one.label_gain_sums for one in counted), strict=True)]
    best, worst = Counter[int](), Counter[int]()
    for one in counted:
        best.update(one.query_best)
        worst.update(one.query_worst)
    buckets = [[one.gains[bucket] for one in counted] for bucket in range(len(counted[0].gains))]
    return Judgements(
        rows=tuple(sum(_from(gains, 0) for gains in bucket) for bucket in buckets),
        positives=tuple(sum(_from(gains, least) for gains in bucket) for bucket in buckets),
        queries=best.total(),
        queries_without_positive=best.total() - _from(best, least),
        queries_without_negative=_from(worst, least),
        labels=tuple(labels),
        mean_gains=tuple(total / count if count else None for total, count in zip(sums, labels, strict=True)),
    )


def _from(counts: Mapping[int, int], least: int) -> int:
    """All of at least so many hundredths."""
    return sum(count for gain, count in counts.items() if gain >= least)
