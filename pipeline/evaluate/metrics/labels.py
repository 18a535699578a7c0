"""Metrics of labels: of two (AUC, F1 at a threshold), of the most probable one, and calibration."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.errors import DataError
from pipeline.evaluate.metrics.scored_rows import QueryGroups, ScoredRows, Sums, divided, ratio

_BLOCK = 8
"""Resamples at a time, one cache line of a row: 3 times faster than 64 with 75,000 rows."""


def best_threshold(rows: ScoredRows) -> float:
    """Choose the probability from which a row is called a match, with the best F1 on `rows` (the valid split).

    It lies half way to the next lower score that occurs (or 0), so that rounding on another device does not move rows
    across it. Of equal F1 the highest is taken: fewest rows are called a match.

    Raises:
        DataError: not two labels, NaN or infinite scores, or no row with the more relevant label.
    """
    if len(rows.labels) != 2:
        raise DataError(f"a threshold is for two labels, there are {len(rows.labels)}", expected="two labels")
    if rows.unusable.any():
        raise DataError(f"{rows.unusable.sum()} of {rows.num_rows} rows have NaN or infinite scores")
    labelled = rows.label >= 0
    score, match = rows.probabilities[labelled, 1], rows.label[labelled] == 1
    if not match.any():
        raise DataError(
            f"no row of {labelled.sum()} is labelled {rows.labels[1]!r}: a threshold cannot be chosen",
            expected="matching and other rows in the valid split",
        )
    scores, place = np.unique(score, return_inverse=True)  # ascending
    hits = np.cumsum(np.bincount(place, match)[::-1])[::-1]  # called a match from each score on
    called = np.cumsum(np.bincount(place)[::-1])[::-1]
    f1 = 2 * hits / (called + match.sum())
    best = int(len(f1) - 1 - f1[::-1].argmax())
    lower = scores[best - 1] if best else 0.0
    middle = (lower + scores[best]) / 2
    return float(middle if middle > lower else scores[best])  # neighbouring floats have no middle


def at_threshold(queries: QueryGroups, label: Int64s, score: Float64s, threshold: float, metric: str) -> Sums:
    """Precision, recall or F1 (`metric`) of calling rows [N] a match whose score is `threshold` or more."""
    labelled = label >= 0
    called, match = labelled & (score >= threshold), label == 1

    def combine(sums: Float64s) -> Float64s:
        hits, called, matches = sums.T
        if metric == "f1":
            return divided(2 * hits, called + matches)
        return divided(hits, called if metric == "precision" else matches)  # not defined where nothing is called one

    parts = [queries.sums(called & match), queries.sums(called), queries.sums(match)]
    return Sums(np.stack(parts, axis=1), combine, queries.sums(labelled) > 0)


@dataclass(frozen=True, eq=False)
class ThresholdCurve:
    """`area` (roc_auc or average_precision) over all thresholds: rows by falling score, matches and others apart.

    `at_or_above` and `above`: how many of the other rows (sorted the same way) score as high as each match or higher,
    and higher; `matches_with`: how many matches score as high or higher. So equal scores are passed together.
    """

    counted: Bools
    match_query: Int64s
    other_query: Int64s
    above: Int64s
    at_or_above: Int64s
    matches_with: Int64s
    area: str

    @classmethod
    def of(cls, queries: QueryGroups, label: Int64s, score: Float64s, area: str) -> "ThresholdCurve":
        order = np.argsort(-score, kind="stable")
        match, other = order[label[order] == 1], order[label[order] == 0]
        return cls(
            queries.sums(label >= 0) > 0,
            queries.index[match],
            queries.index[other],
            np.searchsorted(-score[other], -score[match], side="left"),
            np.searchsorted(-score[other], -score[match], side="right"),
            np.searchsorted(-score[match], -score[match], side="right"),
            area,
        )

    @cached_property
    def tied(self) -> bool:
        """Whether a match has the score of another row."""
        return not np.array_equal(self.above, self.at_or_above)

    def at(self, weights: Float64s) -> Float64s:
        """See Statistic. Rows count as often as their queries."""
        parts = [self._area(weights[start : start + _BLOCK]) for start in range(0, len(weights), _BLOCK)]
        return np.concatenate(parts)

    def _area(self, weights: Float64s) -> Float64s:
        by_query = np.ascontiguousarray(weights.T)
        match, others = by_query[self.match_query], _running(by_query[self.other_query])
        total = match.sum(axis=0)
        if self.area == "roc_auc":  # a match beats the others below it, and half of those beside it (Mann and Whitney)
            before = others[self.above]
            if self.tied:
                before = (before + others[self.at_or_above]) / 2
            return divided(others[-1] * total - np.einsum("nr,nr->r", match, before), total * others[-1])
        found = _running(match)[self.matches_with]
        called = np.maximum(found + others[self.at_or_above], 1.0)  # 0 where no row of a score is drawn
        return divided(np.einsum("nr,nr->r", match, found / called), total)


def _running(weights: Float64s) -> Float64s:
    """[rows, R] to the sums of the first 0, 1, ... rows."""
    total = np.zeros((len(weights) + 1, weights.shape[1]))
    np.cumsum(weights, axis=0, out=total[1:])
    return total


# Metrics of the most probable label of each row. Of equal probabilities the least relevant label is taken.


def accuracy(queries: QueryGroups, label: Int64s, predicted: Int64s) -> Sums:
    """Share of labelled rows [N] whose predicted label is right. Micro F1 is the same: each row has one label."""
    labelled = label >= 0
    counts = queries.sums(labelled)
    hits = queries.sums(labelled & (label == predicted))
    return Sums(np.stack([hits, counts], axis=1), ratio, counts > 0)


def label_f1(
    queries: QueryGroups, label: Int64s, predicted: Int64s, num_classes: int, wanted: int | None = None
) -> Sums:
    """F1 of one label, not defined where it neither occurs nor is predicted; or the mean over all that do."""
    labelled = label >= 0
    guess = np.where(labelled, predicted, -1)
    ones = np.ones(len(label))
    hits = queries.table(np.where(label == guess, label, -1), num_classes, ones)
    seen = queries.table(label, num_classes, ones) + queries.table(guess, num_classes, ones)

    def combine(sums: Float64s) -> Float64s:
        hits, seen = np.split(sums, 2, axis=1)
        f1 = divided(2 * hits, seen)
        if wanted is not None:
            return f1[:, wanted]
        return divided(np.nansum(f1, axis=1), (~np.isnan(f1)).sum(axis=1).astype(np.float64))

    return Sums(np.concatenate([hits, seen], axis=1), combine, queries.sums(labelled) > 0)


# How far the probabilities can be believed: calibration error and log loss, over labelled rows.

NUM_BINS = 15
"""Of confidence, equal (Guo et al., "On Calibration", ICML 2017)."""
SMALLEST = float(np.finfo(np.float64).eps)
"""A probability below this counts as this, as in scikit-learn: a sure and wrong row costs at most 36.04 nats."""


def log_loss(queries: QueryGroups, label: Int64s, probabilities: Float64s) -> Sums:
    """Mean of -log(probability of the true label), nats; probabilities [N, K], label [N], -1 for none."""
    labelled = label >= 0
    chosen = np.where(labelled, probabilities[np.arange(len(label)), label], 1.0)
    counts = queries.sums(labelled)
    return Sums(np.stack([queries.sums(-np.log(np.clip(chosen, SMALLEST, 1.0))), counts], axis=1), ratio, counts > 0)


def calibration_error(queries: QueryGroups, label: Int64s, probabilities: Float64s, num_bins: int = NUM_BINS) -> Sums:
    """Compute the expected calibration error of the most probable label.

    Confidence falls into equal bins (0, 1/n], (1/n, 2/n], ...: one at an edge belongs to the lower bin. Each bin adds
    |share of right rows - mean confidence| by its share of the rows.
    """
    labelled = label >= 0
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == label
    edges = np.linspace(0.0, 1.0, num_bins + 1)[1:-1]
    place = np.where(labelled, np.searchsorted(edges, confidence), -1)
    gap = queries.table(place, num_bins, right - confidence)
    counts = queries.sums(labelled)

    def combine(sums: Float64s) -> Float64s:  # the rows of a bin cancel, |right - confidence| / rows is left
        return divided(np.abs(sums[:, :num_bins]).sum(axis=1), sums[:, num_bins])

    return Sums(np.concatenate([gap, counts[:, None]], axis=1), combine, counts > 0)
