"""How far the probabilities can be believed: calibration error and log loss, over labelled rows."""

from functools import partial

import numpy as np

from pipeline.core.arrays import Float64s, Int64s
from pipeline.evaluate.metrics.statistic import Queries, Sums, divided, ratio

SMALLEST = float(np.finfo(np.float64).eps)
"""A probability below this counts as this, as in scikit-learn: a sure and wrong row costs at most 36.04 nats."""


def log_loss(queries: Queries, label: Int64s, probabilities: Float64s) -> Sums:
    """Mean of -log(probability of the true label), nats; probabilities [N, K], label [N], -1 for none."""
    labelled = label >= 0
    chosen = np.where(labelled, probabilities[np.arange(len(label)), label], 1.0)
    counts = queries.sums(labelled)
    return Sums(np.stack([queries.sums(-np.log(np.clip(chosen, SMALLEST, 1.0))), counts], axis=1), ratio, counts > 0)


def calibration_error(queries: Queries, label: Int64s, probabilities: Float64s, num_bins: int) -> Sums:
    """Expected calibration error of the most probable label (Guo et al., "On Calibration", ICML 2017).

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
    return Sums(np.concatenate([gap, counts[:, None]], axis=1), partial(_error, num_bins=num_bins), counts > 0)


def _error(sums: Float64s, num_bins: int) -> Float64s:
    """[R, bins + 1]: gaps, then rows; the rows of a bin cancel, |right - confidence| / rows is left."""
    return divided(np.abs(sums[:, :num_bins]).sum(axis=1), sums[:, num_bins])
