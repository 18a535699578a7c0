"""Count the judgements in a partition, and warn about problems in the data that would limit model quality.

Judgements are counted for every hundredth of gain, because the minimum gain of a positive is a training setting that
may change after the data has been prepared.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s
from pipeline.core.batch_order import Bucket
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import JudgedSplit, Split, TokenSetInfo
from pipeline.data.trained_items import FIELDS, TrainedItems

_BINS = 101
_GRID = (np.arange(_BINS) / (_BINS - 1)).astype(np.float32)


def hundredths(gain: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Convert gains in [0, 1] to hundredths, rounding down. Gains are compared as float32."""
    return np.searchsorted(_GRID, np.asarray(gain, dtype=np.float32), side="right") - 1


def count_judgements(rows: Mapping[Split, TokenRows], num_labels: int, stop: StopSignal) -> dict[Split, JudgedSplit]:
    """Count the judgements in each split of a partition, and the items that the others share with train.

    This needs about 100 bytes of memory for each validation and test row.
    """
    items = {s: TrainedItems(each.read_blocks(FIELDS), each.pad_id) for s, each in rows.items() if s != "train"}
    for arrays in rows["train"].read_blocks(FIELDS) if items and "train" in rows else ():
        stop.raise_if_set("counting judgements")
        for each in items.values():
            each.mark(arrays, rows["train"].pad_id)
    shared: dict[Split, dict[str, int]] = {
        split: {
            "queries_in_train": int(each.query_ids.trained.sum()),
            "products": len(each.product_ids.values),
            "products_in_train": int(each.product_ids.trained.sum()),
            "rows_new_product": int((each.parts % 2).sum()),  # query or neither
        }
        for split, each in items.items()
    }
    return {s: _count(each, num_labels, stop).model_copy(update=shared.get(s, {})) for s, each in rows.items()}


def _count(source: TokenRows, num_labels: int, stop: StopSignal) -> JudgedSplit:
    gains = np.zeros((len(source.buckets), _BINS), dtype=np.int64)
    rows, sums = np.zeros(num_labels, dtype=np.int64), np.zeros(num_labels, dtype=np.float64)
    queries: list[tuple[Any, Any, Any]] = []
    for bucket, numbers in source.blocks():
        stop.raise_if_set("counting judgements")
        arrays = source.read(np.full(len(numbers), bucket), numbers, bucket, ("gain", "label", "query_id"))
        gain, label = arrays["gain"], arrays["label"]
        bins = hundredths(gain).astype(np.uint8)
        gains[bucket] += np.bincount(bins, minlength=_BINS)
        has_label = label >= 0
        rows += np.bincount(label[has_label], minlength=num_labels)
        sums += np.bincount(label[has_label], weights=gain[has_label], minlength=num_labels)
        queries.append(_reduce_by_query(arrays["query_id"], bins, bins))
    _, worst, best = _reduce_by_query(*(np.concatenate(column) for column in zip(*queries, strict=True)))
    return JudgedSplit(
        gains=tuple(map(_nonzero, gains)),
        labels=tuple(rows.tolist()),
        label_gain_sums=tuple(sums.tolist()),
        query_best=_nonzero(np.bincount(best)),
        query_worst=_nonzero(np.bincount(worst)),
    )


def _reduce_by_query(ids: Int64s, low: Any, high: Any) -> tuple[Int64s, Any, Any]:
    """Return the sorted unique ids, together with the minimum of `low` and the maximum of `high` for each id."""
    order = np.argsort(ids, kind="stable")
    unique, starts = np.unique(ids[order], return_index=True)
    return unique, np.minimum.reduceat(low[order], starts), np.maximum.reduceat(high[order], starts)


def _nonzero(counts: Int64s) -> dict[int, int]:
    return {int(index): int(counts[index]) for index in np.flatnonzero(counts)}


@dataclass(frozen=True)
class JudgementCounts:
    """The judgements in one split, summed over partitions, given the minimum gain of a positive.

    A query that occurs in several partitions is counted once per partition. `mean_gains` is the mean gain of each
    label, or None if no row has that label.
    """

    rows: int
    positives: int
    queries: int
    queries_without_positive: int
    queries_without_negative: int
    mean_gains: tuple[float | None, ...]


def sum_judgements(infos: Sequence[TokenSetInfo], split: Split, positive_gain: float) -> JudgementCounts | None:
    """Sum the counts of all partitions.

    Returns None if none of them has counts, because the split is empty or was prepared by an earlier version.
    """
    judged = [info.judged[split] for info in infos if split in info.judged]
    if not judged:
        return None
    threshold = int(hundredths(positive_gain))
    gains = sum((Counter(bucket) for counts in judged for bucket in counts.gains), Counter[int]())
    best = sum((Counter(counts.query_best) for counts in judged), Counter[int]())
    worst = sum((Counter(counts.query_worst) for counts in judged), Counter[int]())
    rows = [sum(column) for column in zip(*(counts.labels for counts in judged), strict=True)]
    sums = [sum(column) for column in zip(*(counts.label_gain_sums for counts in judged), strict=True)]
    return JudgementCounts(
        rows=gains.total(),
        positives=_at_least(gains, threshold),
        queries=best.total(),
        queries_without_positive=best.total() - _at_least(best, threshold),
        queries_without_negative=_at_least(worst, threshold),
        mean_gains=tuple(total / count if count else None for total, count in zip(sums, rows, strict=True)),
    )


def _at_least(counts: Mapping[int, int], threshold: int) -> int:
    return sum(count for gain, count in counts.items() if gain >= threshold)


# Warnings about problems in the data that limit quality without causing an error.

_MAX_UNUSABLE = 0.5  # maximum fraction of queries without a positive, or without a negative
_MAX_TRUNCATED = 0.05  # maximum fraction of rows with a truncated text
_GAIN_TOLERANCE = 1e-6
_MAX_IN_TRAIN = 0.05  # maximum fraction of the queries in the validation or test split that are also in train
_FEW_NEW = 0.05  # fraction of rows with a new product below which nothing is known about new products
_HOLDOUTS: tuple[Split, ...] = ("valid", "test")


def training_warnings(infos: Sequence[TokenSetInfo], positive_gain: float, *, contrastive: bool) -> dict[str, str]:
    """Return warnings about problems in the train split that would limit model quality, keyed by kind."""
    judged = sum_judgements(infos, "train", positive_gain)
    if judged is None:
        return {}
    warnings = dict[str, str]()
    if contrastive and not judged.positives:
        warnings["positives"] = (
            f"no row has a gain of at least {positive_gain:g} (train.loss.positive_gain), so the contrastive loss"
            " learns nothing. Lower it, provide gains (data.columns.gain), or order data.labels from worst to best"
        )
    elif contrastive and judged.queries_without_positive > _MAX_UNUSABLE * judged.queries:
        warnings["without positive"] = (
            f"{judged.queries_without_positive:,} of {judged.queries:,} queries have no row with a gain of at least"
            f" {positive_gain:g} (train.loss.positive_gain), so the contrastive loss learns nothing from them. Lower"
            " it if their best products count as relevant"
        )
    if contrastive and judged.positives and judged.queries_without_negative > _MAX_UNUSABLE * judged.queries:
        warnings["without negative"] = (
            f"{judged.queries_without_negative:,} of {judged.queries:,} queries have no judged negative, so only"
            " products of other queries are used as negatives. Use trnpipe mine to find hard negatives"
        )
    gains = [(name, gain) for name, gain in zip(infos[0].labels, judged.mean_gains, strict=False) if gain is not None]
    if any(worse > better + _GAIN_TOLERANCE for (_, worse), (_, better) in pairwise(gains)):
        means = ", ".join(f"{label} {gain:.3g}" for label, gain in gains)
        warnings["order"] = f"data.labels are not ordered from worst to best: their mean gains are {means}"
    return warnings


def prepared_warnings(infos: Sequence[TokenSetInfo], positive_gain: float, *, contrastive: bool) -> list[str]:
    """Return warnings about the prepared data, considering all partitions together."""
    warnings, truncated = list[str](), sum(info.truncated_rows for info in infos)
    rows = sum(info.rows for info in infos)
    if truncated > _MAX_TRUNCATED * rows:
        largest = Bucket.parse(infos[0].buckets[-1])
        larger = Bucket(2 * largest.query_tokens, 2 * largest.product_tokens)
        warnings.append(
            f"{truncated:,} of {rows:,} rows ({truncated / rows:.0%}) have a text that is truncated to the largest"
            f" bucket {largest.name}. To prepare all data and compile all graphs with a larger one, use --data.buckets"
            f" {','.join((*infos[0].buckets, larger.name))}"
        )
    if not any(sum(info.rows_by_bucket("valid")) for info in infos):
        warnings.append(
            "no row is in split valid, from which trnpipe train selects the best checkpoint. Raise data.valid_fraction,"
            " or name rows of some queries valid in the split column, if there is one"
        )
    warnings += training_warnings(infos, positive_gain, contrastive=contrastive).values()
    warnings += [text for text, few_new in shared_products(infos) if few_new]
    for split in _HOLDOUTS if infos[0].split_by == "query" else ():
        judged = [info.judged[split] for info in infos if split in info.judged]
        queries = sum(sum(counts.query_best.values()) for counts in judged)
        in_train = sum(counts.queries_in_train for counts in judged)
        if in_train > _MAX_IN_TRAIN * queries:
            warnings.append(
                f"{in_train:,} of {queries:,} queries ({in_train / queries:.0%}) of split {split} are also in split"
                " train, so metrics will be better than on new queries. Add a split column that separates queries,"
                " or set --evaluate.leak warn"
            )
    return warnings


def shared_products(infos: Sequence[TokenSetInfo]) -> Iterator[tuple[str, bool]]:
    """Describe how many products each holdout split shares with train, unless the splits were made by product.

    Yields a sentence, and whether the split has so few new products that its metrics do not say anything about them.
    """
    for split in _HOLDOUTS if infos[0].split_by == "query" else ():
        judged = [info.judged[split] for info in infos if split in info.judged and info.judged[split].products]
        products, in_train = (sum(getattr(one, name) for one in judged) for name in ("products", "products_in_train"))
        new = sum(one.rows_new_product for one in judged) / max(
            1, sum(sum(part.values()) for one in judged for part in one.gains)
        )
        if in_train > _MAX_IN_TRAIN * products:
            yield (
                f"{in_train:,} of {products:,} products ({in_train / products:.0%}) of split {split} are also in split"
                f" train, which is right for a fixed catalogue. Only the {new:.0%} of its rows with a new product"
                " measure new products. For more of them, set --data.split-by both (without a split column)",
                new < _FEW_NEW,
            )
