"""Classification metrics for two labels (such as AUC and F1 at a threshold) or more, and calibration metrics."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline.core.arrays import Bools, Float32s, Float64s, Int64s
from pipeline.core.errors import DataError
from pipeline.evaluate.metrics.scored_rows import QueryGroups, ScoredRows, Sums, divided, ratio

_BLOCK = 8  # Resamples per block. 8 doubles fit in a cache line, which is 3 times faster than 64 with 75,000 rows.


def best_threshold(rows: ScoredRows) -> float:
    """Choose the probability threshold with the highest F1 on `rows`, which should be from the validation split.

    We put the threshold half way between two scores, so that rounding differences on a different device do not move
    rows across it. If several thresholds have the same F1, the highest is returned, which predicts the fewest matches.

    Raises:
        DataError: If the number of labels is not two, if a score is NaN or infinite, or if no row has the more relevant
            label.
    """
    if len(rows.labels) != 2:
        raise DataError(f"a threshold requires two labels, but there are {len(rows.labels)}", expected="two labels")
    if rows.unusable.any():
        raise DataError(f"{rows.unusable.sum()} of {rows.num_rows} rows have NaN or infinite scores")
    labelled = rows.label >= 0
    score, match = rows.probabilities[labelled, 1], rows.label[labelled] == 1
    if not match.any():
        raise DataError(
            f"cannot choose a threshold: none of {labelled.sum()} rows is labelled {rows.labels[1]!r}",
            expected="rows with both labels in the valid split",
        )
    scores, position = np.unique(score, return_inverse=True)
    hits = np.cumsum(np.bincount(position, match)[::-1])[::-1]  # number of matches that score at least this high
    predicted = np.cumsum(np.bincount(position)[::-1])[::-1]
    f1 = 2 * hits / (predicted + match.sum())
    best = int(len(f1) - 1 - f1[::-1].argmax())
    lower = scores[best - 1] if best else 0.0
    middle = (lower + scores[best]) / 2
    return float(middle if middle > lower else scores[best])  # there is no midpoint between adjacent floats


def at_threshold(queries: QueryGroups, label: Int64s, score: Float64s, threshold: float, metric: str) -> Sums:
    """Compute precision, recall or F1, treating rows with a score of at least `threshold` as predicted matches."""
    labelled = label >= 0
    predicted, match = labelled & (score >= threshold), label == 1

    def combine(sums: Float64s) -> Float64s:
        hits, predicted, matches = sums.T
        if metric == "f1":
            return divided(2 * hits, predicted + matches)
        return divided(hits, predicted if metric == "precision" else matches)

    parts = [queries.sums(predicted & match), queries.sums(predicted), queries.sums(match)]
    return Sums(np.stack(parts, axis=1), combine, queries.sums(labelled) > 0)


@dataclass(frozen=True, eq=False)
class ThresholdCurve:
    """The area under the ROC curve or the precision-recall curve (`area` is roc_auc or average_precision).

    Matches and non-matches are sorted separately by descending score. For each match we store how many non-matches have
    a higher score (`above`) or at least the same score (`at_or_above`), and how many matches have at least the same
    score (`matches_with`). This ensures that rows with tied scores cross a threshold together.
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
        """Return whether any match has the same score as a non-match."""
        return not np.array_equal(self.above, self.at_or_above)

    def at(self, weights: Float64s) -> Float64s:
        """Evaluate the area for R resamples (see `Statistic.at`). The weight of a row is that of its query."""
        parts = [self._area(weights[start : start + _BLOCK]) for start in range(0, len(weights), _BLOCK)]
        return np.concatenate(parts)

    def _area(self, weights: Float64s) -> Float64s:
        by_query = np.ascontiguousarray(weights.T)
        match, others = by_query[self.match_query], _running(by_query[self.other_query])
        total = match.sum(axis=0)
        if self.area == "roc_auc":  # the Mann-Whitney U statistic, in which ties count half
            before = others[self.above]
            if self.tied:
                before = (before + others[self.at_or_above]) / 2
            return divided(others[-1] * total - np.einsum("nr,nr->r", match, before), total * others[-1])
        hits = _running(match)[self.matches_with]
        predicted = np.maximum(hits + others[self.at_or_above], 1.0)  # avoid 0 / 0 if none of these rows was drawn
        return divided(np.einsum("nr,nr->r", match, hits / predicted), total)


def _running(weights: Float64s) -> Float64s:
    """Compute a running sum over the rows of [rows, R], starting with a row of zeros."""
    total = np.zeros((len(weights) + 1, weights.shape[1]))
    np.cumsum(weights, axis=0, out=total[1:])
    return total


# Metrics of the most probable label. If several labels are equally probable, the least relevant one is predicted.


def accuracy(queries: QueryGroups, label: Int64s, predicted: Int64s) -> Sums:
    """Compute the accuracy over all labelled rows. It equals micro F1, because each row has exactly one label."""
    labelled = label >= 0
    counts = queries.sums(labelled)
    hits = queries.sums(labelled & (label == predicted))
    return Sums(np.stack([hits, counts], axis=1), ratio, counts > 0)


def label_f1(queries: QueryGroups, label: Int64s, predicted: Int64s, num_classes: int, only: int | None = None) -> Sums:
    """Compute the F1 score of the label `only`, or the macro F1 score if `only` is None.

    F1 is undefined for labels that neither occur nor are predicted, so macro F1 does not include them.
    """
    labelled = label >= 0
    guess = np.where(labelled, predicted, -1)
    ones = np.ones(len(label))
    hits = queries.table(np.where(label == guess, label, -1), num_classes, ones)
    support = queries.table(label, num_classes, ones) + queries.table(guess, num_classes, ones)

    def combine(sums: Float64s) -> Float64s:
        hits, support = np.split(sums, 2, axis=1)
        f1 = divided(2 * hits, support)
        if only is not None:
            return f1[:, only]
        return divided(np.nansum(f1, axis=1), (~np.isnan(f1)).sum(axis=1).astype(np.float64))

    return Sums(np.concatenate([hits, support], axis=1), combine, queries.sums(labelled) > 0)


# How good the probabilities are: log loss, calibration error, and the temperature that reduces both.

NUM_BINS = 15  # number of equal-width bins, as in Guo et al., "On Calibration", ICML 2017
SMALLEST = float(np.finfo(np.float64).eps)
"""Smaller probabilities are clipped to this value, as in scikit-learn, so that no row has a loss above 36.04 nats."""


MIN_FITTED = 200
"""Number of labelled rows below which no temperature is fitted. With 120 rows, it often made calibration worse."""
_COLDEST, _HOTTEST = 0.05, 20.0


def fit_temperature(logits: Float32s, label: Int64s) -> float:
    """Fit the temperature: dividing logits [N, K] by it minimizes the log loss of their softmax (Guo et al., 2017).

    One additional row whose label is unknown is assumed (similar to Platt, 1999), so that the temperature of a model
    that makes no mistake on these rows does not become 0. Unlabelled rows (-1) are ignored. Returns 1.0 if there
    are less than MIN_FITTED labelled rows, if all of them have the same label, or if a logit is not finite.
    """
    labelled = label >= 0
    wide, label = logits[labelled].astype(np.float64), label[labelled]
    num_rows = len(wide)
    if num_rows < MIN_FITTED or len(np.unique(label)) < 2 or not np.isfinite(wide).all():
        return 1.0
    wide -= wide.max(axis=1, keepdims=True)
    if not wide.any():
        return 1.0
    smoothing = 1 / (num_rows + 1)
    true = (1 - smoothing) * wide[np.arange(num_rows), label].mean() + smoothing * wide.mean()
    # The loss is convex in 1 / T. Its derivative is the mean expected logit minus the mean true logit.
    low, high = np.log(_COLDEST), np.log(_HOTTEST)
    for _ in range(40):
        middle = (low + high) / 2
        weights = np.exp(wide / np.exp(middle))
        expected = ((weights * wide).sum(axis=1) / weights.sum(axis=1)).mean()
        low, high = (low, middle) if expected < true else (middle, high)
    return round(float(np.exp((low + high) / 2)), 4)  # the last digits may depend on the device


def log_loss(queries: QueryGroups, label: Int64s, probabilities: Float64s) -> Sums:
    """Compute the mean negative log-likelihood of the true label in nats. Unlabelled rows (-1) are ignored."""
    labelled = label >= 0
    chosen = np.where(labelled, probabilities[np.arange(len(label)), label], 1.0)
    counts = queries.sums(labelled)
    return Sums(np.stack([queries.sums(-np.log(np.clip(chosen, SMALLEST, 1.0))), counts], axis=1), ratio, counts > 0)


def calibration_error(queries: QueryGroups, label: Int64s, probabilities: Float64s, num_bins: int = NUM_BINS) -> Sums:
    """Compute the expected calibration error of the most probable label.

    Rows are grouped by confidence into bins (0, 1/n], (1/n, 2/n] and so on. The error is the mean over all bins of
    |accuracy - mean confidence|, weighted by the number of rows in each bin.
    """
    labelled = label >= 0
    confidence = probabilities.max(axis=1)
    correct = probabilities.argmax(axis=1) == label
    edges = np.linspace(0.0, 1.0, num_bins + 1)[1:-1]
    bins = np.where(labelled, np.searchsorted(edges, confidence), -1)
    gap = queries.table(bins, num_bins, correct - confidence)
    counts = queries.sums(labelled)

    def combine(sums: Float64s) -> Float64s:  # no need to divide by the number of rows in a bin, which cancels out
        return divided(np.abs(sums[:, :num_bins]).sum(axis=1), sums[:, num_bins])

    return Sums(np.concatenate([gap, counts[:, None]], axis=1), combine, counts > 0)
