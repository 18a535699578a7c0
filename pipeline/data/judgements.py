"""Counts of what was judged in a partition, and what they say about the quality that can be learnt from it.

They are read from its staged shards before these are committed.

Nothing here depends on the settings of training: gains are counted in hundredths, so that whoever asks later may choose
which gain makes a positive. Memory does not grow with the rows: queries are counted a range of ids at a time.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.batch_order import Bucket
from pipeline.core.record import Record
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.shards import map_safetensors
from pipeline.data.token_sets import JudgedSplit, ShardInfo, Split, TokenSetInfo

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


class BucketCounts(Record):
    """Counts of the rows of one bucket of one shard."""

    bucket: int
    gains: dict[int, int] = Field(description="Rows by gain in hundredths")
    labels: tuple[int, ...]
    label_gain_sums: tuple[float, ...]


class Queries(NamedTuple):
    """Some queries, each once, ascending, with the lowest and the highest gain of their rows."""

    ids: Int64s
    low: Bins
    high: Bins


Pieces = Callable[[int, int], Iterable[Queries]]
"""Queries of a split with ids from one number up to another, in pieces; a query may be in several."""


def count_judgements(
    folder: Path, splits: Mapping[Split, Sequence[ShardInfo]], num_labels: int, stop: StopSignal
) -> dict[Split, JudgedSplit]:
    """Of the shards in `folder`. The same shards give the same counts, to the bit."""

    def queries_in(shards: Sequence[ShardInfo]) -> Pieces:
        return lambda first, last: _queries(folder, shards, first, last, stop)

    return {
        split: add_up(
            bucket_counts(folder, shards, num_labels, stop),
            queries_in(shards),
            trained=queries_in(splits.get("train", ()) if split != "train" else ()),
            num_buckets=len(shards[0].rows),
            num_labels=num_labels,
        )
        for split, shards in splits.items()
    }


def bucket_counts(
    folder: Path, shards: Sequence[ShardInfo], num_labels: int, stop: StopSignal
) -> Iterator[BucketCounts]:
    """Of each bucket of each shard in turn."""
    for bucket, arrays in _buckets(folder, shards, stop):
        gain, label = np.asarray(arrays["gain"]), np.asarray(arrays["label"])
        known = label >= 0
        yield BucketCounts(
            bucket=bucket,
            gains=_filled(np.bincount(hundredths(gain), minlength=_STEPS + 1)),
            labels=tuple(np.bincount(label[known], minlength=num_labels).tolist()),
            label_gain_sums=tuple(np.bincount(label[known], weights=gain[known], minlength=num_labels).tolist()),
        )


def queries_of(folder: Path, shard: ShardInfo, stop: StopSignal) -> Queries:
    """Those of one shard."""
    return _by_query(_queries(folder, [shard], 0, _IDS - 1, stop))


def add_up(
    counts: Iterable[BucketCounts],
    queries: Pieces,
    *,
    trained: Pieces,
    num_queries: int | None = None,
    num_buckets: int,
    num_labels: int,
) -> JudgedSplit:
    """The counts of a split of those of its shards, in their order.

    `queries`: of the split. `trained`: of the train split, where this is another one. `num_queries`: in all pieces of
    the split together (None: at most one a row); it bounds memory, and changes nothing else.
    """
    gains = np.zeros((num_buckets, _STEPS + 1), dtype=np.int64)
    rows, sums = np.zeros(num_labels, dtype=np.int64), np.zeros(num_labels, dtype=np.float64)
    for one in counts:
        gains[one.bucket, list(one.gains)] += list(one.gains.values())
        rows += np.array(one.labels, dtype=np.int64)
        sums += np.array(one.label_gain_sums, dtype=np.float64)
    best, worst = np.zeros((2, _STEPS + 1), dtype=np.int64)
    in_train = 0
    passes = -(-(int(gains.sum()) if num_queries is None else num_queries) // _ROWS_AT_ONCE)
    for number in range(passes):
        first, last = number * _IDS // passes, (number + 1) * _IDS // passes - 1
        ids, low, high = _by_query(queries(first, last))
        best += np.bincount(high, minlength=_STEPS + 1)
        worst += np.bincount(low, minlength=_STEPS + 1)
        is_trained = np.zeros(len(ids), dtype=np.bool_)
        for piece in trained(first, last):
            places = ids.searchsorted(piece.ids)
            places = places[places < len(ids)]
            is_trained[places[ids[places] == piece.ids[: len(places)]]] = True  # both ascend, so the rest is behind
        in_train += int(is_trained.sum())
    return JudgedSplit(
        gains=tuple(_filled(one) for one in gains),
        labels=tuple(rows.tolist()),
        label_gain_sums=tuple(sums.tolist()),
        query_best=_filled(best),
        query_worst=_filled(worst),
        queries_in_train=in_train,
    )


def _queries(folder: Path, shards: Sequence[ShardInfo], first: int, last: int, stop: StopSignal) -> Iterator[Queries]:
    """Of one bucket of one shard after the other."""
    for _, arrays in _buckets(folder, shards, stop):
        ids = np.asarray(arrays["query_id"])
        chosen = (ids >= first) & (ids <= last)
        bins = hundredths(arrays["gain"][chosen]).astype(np.uint8)
        yield _by_query([Queries(ids[chosen], bins, bins)])


def _buckets(folder: Path, shards: Sequence[ShardInfo], stop: StopSignal) -> Iterator[tuple[int, dict[str, Any]]]:
    """The arrays of each bucket of each shard, mapped."""
    for shard in shards:
        stop.raise_if_set("counting judgements")
        arrays = map_safetensors(folder / shard.file)
        for bucket, count in enumerate(shard.rows):
            if count:
                yield bucket, {name: arrays[f"b{bucket}.{name}"] for name in ("query_id", "label", "gain")}


def count_texts_of_several_ids(
    folder: Path, splits: Mapping[Split, Sequence[ShardInfo]], pad_id: int, stop: StopSignal
) -> int:
    """Query texts, as the model reads them, whose rows have more than one query id. 16 bytes of memory a query.

    Those that may have been cut are not compared.
    """
    pairs = [(np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.int64))]
    for shard in (shard for shards in splits.values() for shard in shards):
        stop.raise_if_set("counting queries")
        arrays = map_safetensors(folder / shard.file)
        for bucket in (bucket for bucket, count in enumerate(shard.rows) if count):
            ids = np.asarray(arrays[f"b{bucket}.query_id"])
            tokens = np.asarray(arrays[f"b{bucket}.query"]).astype(np.uint64)
            weights = mix64(np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
            if bucket == len(shard.rows) - 1:
                is_whole = tokens[:, -1] == pad_id
                ids, tokens = ids[is_whole], tokens[is_whole]
            tokens = np.where(tokens == pad_id, np.uint64(0), tokens + np.uint64(1))  # in any bucket the same sum
            texts = (tokens * weights).sum(axis=1, dtype=np.uint64)
            pairs.append(_distinct(texts, ids))
    texts, _ = _distinct(*(np.concatenate(column) for column in zip(*pairs, strict=True)))
    _, num_ids = np.unique(texts, return_counts=True)
    return int((num_ids > 1).sum())


def _distinct(texts: UInt64s, ids: Int64s) -> tuple[UInt64s, Int64s]:
    """Each pair once."""
    order = np.lexsort((ids, texts))
    texts, ids = texts[order], ids[order]
    is_new = np.ones(len(ids), dtype=np.bool_)
    is_new[1:] = (texts[1:] != texts[:-1]) | (ids[1:] != ids[:-1])
    return texts[is_new], ids[is_new]


def _by_query(pieces: Iterable[Queries]) -> Queries:
    """(ids, lowest, highest) of each query once."""
    columns = list(zip(*pieces, strict=True))
    if not columns:
        return Queries(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint8), np.zeros(0, dtype=np.uint8))
    ids, low, high = (np.concatenate(column) for column in columns)
    if not len(ids):
        return Queries(ids, low, high)
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
    return Queries(ids[starts], np.minimum.reduceat(low[order], starts), np.maximum.reduceat(high[order], starts))


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


# What in the data costs quality without failing anything: one wording for `prepare` and `train`, with counts.

MANY = 0.5
"""Of queries: above this share a warning says so."""
_EXPECTED = 3.0
"""Positives that a bucket's rows would have at the usual share: with fewer, none is chance (e^-3 = 5 %)."""
_TRUNCATED = 0.05
"""Of rows: above this share of rows with a text that was cut a warning says so."""
_RARE = 0.001
"""Of training rows: a label with fewer is nearly absent."""
_POINTS, _TIMES, _SIGMA = 0.05, 2.0, 3.0
"""Shares of a label in train and valid differ much: by so much or so many times, and so many standard errors."""
_SAME_GAIN = 1e-6
_IN_TRAIN = 0.05
"""Of the queries of a holdout split: above this share of trained ones a warning says so."""


def about_positives(judged: Judgements, buckets: Sequence[Bucket], positive_gain: float) -> dict[str, str]:
    """What keeps the contrastive loss from learning. Warnings by kind."""
    rows, positives, queries = judged.rows, judged.positives, judged.queries
    without_positive, without_negative = judged.queries_without_positive, judged.queries_without_negative
    least = f"train.loss.positive_gain {positive_gain:g}"
    if not sum(positives):
        return {
            "positives": f"no row has a gain of {least} or more: the contrastive loss learns nothing; lower it, give"
            " gains (data.columns.gain), or order data.labels from worst to best"
        }
    found = {}
    usual = sum(positives) / sum(rows)
    empty = [place for place, count in enumerate(rows) if not positives[place] and count * usual >= _EXPECTED]
    if empty:
        shown = ", ".join(f"{rows[place]:,} in bucket {buckets[place].name}" for place in empty)
        found["buckets"] = f"rows without a gain of {least} or more among them: {shown}; no positive is so long"
    if without_positive > MANY * queries:
        found["without positive"] = (
            f"{without_positive:,} of {queries:,} queries have no row with a gain of {least} or more: the contrastive"
            " loss learns nothing from them; lower it if their best products count as relevant"
        )
    if without_negative > MANY * queries:
        found["without negative"] = (
            f"{without_negative:,} of {queries:,} queries have no judged negative: their negatives are other queries'"
            " products alone; trnpipe mine finds harder ones"
        )
    return found


def about_labels(labels: Sequence[str], train: Judgements, valid: Judgements | None) -> dict[str, str]:
    """Labels that hardly occur, or not as often where the model is chosen. Warnings by kind."""
    found, total = {}, sum(train.labels)
    rare = [(label, count) for label, count in zip(labels, train.labels, strict=True) if count < _RARE * total]
    if rare:
        shown = ", ".join(f"{label} {count:,}" for label, count in rare)
        found["rare labels"] = (
            f"labels with hardly any of the {total:,} training rows: {shown}; no grade is learnt from so few:"
            " merge them with another, or take them out of data.labels and of the data"
        )
    if valid is None:
        return found
    odd, num_valid = [], sum(valid.labels)
    for label, in_train, in_valid in zip(labels, train.labels, valid.labels, strict=True):
        one, other = in_train / max(1, total), in_valid / max(1, num_valid)
        # Much, and not by chance. Rows of a query are judged alike, so a query counts as one draw.
        together = (in_train + in_valid) / max(1, total + num_valid)
        error = math.sqrt(together * (1.0 - together) * (1.0 / max(1, train.queries) + 1.0 / max(1, valid.queries)))
        is_much = abs(one - other) > _POINTS or max(one, other) > _TIMES * min(one, other)
        if is_much and abs(one - other) > _SIGMA * error:
            odd.append(f"{label} {one:.1%} and {other:.1%}")
    if odd:
        found["shares"] = (
            f"shares of labels in train ({total:,} rows) and valid ({sum(valid.labels):,} rows) differ:"
            f" {', '.join(odd)}; valid names the best checkpoint and the thresholds, so split both in the same way"
        )
    return found


def about_leak(infos: Sequence[TokenSetInfo]) -> dict[str, str]:
    """Queries that are in train and in a holdout split of the same partition. Warnings by kind."""
    found = {}
    for split in ("valid", "test"):
        counted = [info.judged[split] for info in infos if split in info.judged]
        queries = sum(sum(one.query_best.values()) for one in counted)
        again = sum(one.queries_in_train for one in counted)
        if again > _IN_TRAIN * queries:
            found[f"leak to {split}"] = (
                f"{again:,} of {queries:,} queries ({again / queries:.0%}) of split {split} are in split train too:"
                " figures on them are better than on new queries, and evaluate refuses to judge by more of them than"
                " evaluate.max_leak_share; give the data a split column that keeps queries apart, or"
                " --evaluate.leak warn"
            )
    if ambiguous := sum(info.texts_of_several_ids for info in infos):
        found["several ids"] = (
            f"{ambiguous:,} query text(s) have several query ids: their rows may be in train and in a holdout split;"
            " give each query one id, or the data a split column"
        )
    return found


def prepared_warnings(infos: Sequence[TokenSetInfo], positive_gain: float, *, contrastive: bool) -> list[str]:
    """Warnings of all prepared partitions together, then what is wrong with the newest day alone.

    A function of what is committed: the same whoever prepared it, in however many tries. `contrastive`: that loss is
    on.
    """
    found = _warnings(infos, positive_gain, contrastive)
    lines = list(found.values())
    newest = max(infos, key=lambda info: info.watermark)
    if newest.watermark and len(infos) > 1:
        alone = _warnings([newest], positive_gain, contrastive)
        lines += [f"{newest.partition}: {text}" for kind, text in alone.items() if kind not in found]
    return lines


def _warnings(infos: Sequence[TokenSetInfo], positive_gain: float, contrastive: bool) -> dict[str, str]:
    found, truncated, rows = {}, sum(info.truncated_rows for info in infos), sum(info.rows for info in infos)
    if truncated > _TRUNCATED * rows:
        largest = Bucket.parse(infos[0].buckets[-1])
        found["truncated"] = (
            f"{truncated:,} of {rows:,} rows ({truncated / rows:.0%}) have a text longer than the largest"
            f" bucket {largest.name}: the rest of it is not read; add a larger one to data.buckets"
        )
    train, valid = (judgements_of(infos, split, positive_gain) for split in ("train", "valid"))
    found |= training_warnings(infos, positive_gain, contrastive=contrastive) | about_leak(infos)
    return found if train is None else found | about_labels(infos[0].labels, train, valid)


def training_warnings(infos: Sequence[TokenSetInfo], positive_gain: float, *, contrastive: bool) -> dict[str, str]:
    """What keeps the losses from learning, in the train split of some partitions. Warnings by kind."""
    judged = judgements_of(infos, "train", positive_gain)
    if judged is None:
        return {}
    buckets = [Bucket.parse(name) for name in infos[0].buckets]
    found = about_positives(judged, buckets, positive_gain) if contrastive else {}
    gains = [(name, gain) for name, gain in zip(infos[0].labels, judged.mean_gains, strict=False) if gain is not None]
    if any(worse > better + _SAME_GAIN for (_, worse), (_, better) in pairwise(gains)):
        shown = ", ".join(f"{label} {gain:.3g}" for label, gain in gains)
        found["order"] = (
            f"labels from worst to best have these mean gains: {shown}; put data.labels in the order of gains"
        )
    return found
