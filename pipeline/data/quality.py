"""What in the data costs quality without failing anything: one wording for `prepare` and `train`, with counts."""

import math
from collections.abc import Sequence
from itertools import pairwise

from pipeline.core.batching import Bucket
from pipeline.data.judgements import Judgements, judgements_of
from pipeline.data.tokens import TokenSetInfo

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


def about_positives(
    rows: Sequence[int],
    positives: Sequence[int],
    *,
    queries: int,
    without_negative: int,
    buckets: Sequence[Bucket],
    positive_gain: float,
    without_positive: int = 0,
) -> dict[str, str]:
    """What keeps the contrastive loss from learning. `rows` and `positives`: of each bucket. Warnings by kind."""
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


def about_order(labels: Sequence[str], mean_gains: Sequence[float | None]) -> dict[str, str]:
    """Labels, from worst to best, that are not in the order of their gains. Warnings by kind."""
    gains = [(label, gain) for label, gain in zip(labels, mean_gains, strict=False) if gain is not None]
    if all(worse <= better + _SAME_GAIN for (_, worse), (_, better) in pairwise(gains)):
        return {}
    shown = ", ".join(f"{label} {gain:.3g}" for label, gain in gains)
    return {"order": f"labels from worst to best have these mean gains: {shown}; put data.labels in the order of gains"}


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
    odd = [
        f"{label} {_share(train, place):.1%} and {_share(valid, place):.1%}"
        for place, label in enumerate(labels)
        if _differ(train, valid, place)
    ]
    if odd:
        found["shares"] = (
            f"shares of labels in train ({total:,} rows) and valid ({sum(valid.labels):,} rows) differ:"
            f" {', '.join(odd)}; valid names the best checkpoint and the thresholds, so split both in the same way"
        )
    return found


def about_lengths(truncated: int, rows: int, buckets: Sequence[Bucket]) -> dict[str, str]:
    """Texts that were cut. Warnings by kind."""
    if truncated <= _TRUNCATED * rows:
        return {}
    return {
        "truncated": f"{truncated:,} of {rows:,} rows ({truncated / rows:.0%}) have a text longer than the largest"
        f" bucket {buckets[-1].name}: the rest of it is not read; add a larger one to data.buckets"
    }


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
    buckets, labels = [Bucket.parse(name) for name in infos[0].buckets], infos[0].labels
    found = about_lengths(sum(info.truncated_rows for info in infos), sum(info.rows for info in infos), buckets)
    train = judgements_of(infos, "train", positive_gain)
    if train is None:
        return found
    if contrastive:
        found |= about_positives(
            train.rows,
            train.positives,
            queries=train.queries,
            without_negative=train.queries_without_negative,
            buckets=buckets,
            positive_gain=positive_gain,
            without_positive=train.queries_without_positive,
        )
    valid = judgements_of(infos, "valid", positive_gain)
    return found | about_order(labels, train.mean_gains) | about_labels(labels, train, valid)


def _share(judged: Judgements, label: int) -> float:
    return judged.labels[label] / max(1, sum(judged.labels))


def _differ(train: Judgements, valid: Judgements, label: int) -> bool:
    """Much, and not by chance. Rows of a query are judged alike, so a query counts as one draw."""
    one, other = _share(train, label), _share(valid, label)
    rows = sum(train.labels) + sum(valid.labels)
    together = (train.labels[label] + valid.labels[label]) / max(1, rows)
    error = math.sqrt(together * (1.0 - together) * (1.0 / max(1, train.queries) + 1.0 / max(1, valid.queries)))
    is_much = abs(one - other) > _POINTS or max(one, other) > _TIMES * min(one, other)
    return is_much and abs(one - other) > _SIGMA * error
