"""Metrics of the most probable label of each row. Of equal probabilities the least relevant label is taken."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.errors import DataError
from pipeline.evaluate.metrics.statistic import Queries, Sums, divided, ratio


@dataclass(frozen=True)
class ClassFigures:
    """Accuracy and F1 over K classes; `positive_f1` is the F1 of the most relevant class."""

    accuracy: float
    macro_f1: float
    positive_f1: float
    f1_by_class: tuple[float, ...]


def class_figures(label: Int64s, predicted: Int64s, num_classes: int) -> ClassFigures:
    """Compare predicted with true classes, [N] each. A class neither present nor predicted is left out of the mean."""
    if label.size == 0:
        raise DataError("no labelled rows to score", expected="at least one row with a label in the holdout")
    confusion = np.bincount(label * num_classes + predicted, minlength=num_classes**2).reshape(num_classes, num_classes)
    hits, present, guessed = np.diag(confusion), confusion.sum(1), confusion.sum(0)
    seen = (present + guessed) > 0
    f1 = np.divide(2 * hits, present + guessed, out=np.zeros(num_classes), where=seen)
    return ClassFigures(
        accuracy=float(hits.sum() / label.size),
        macro_f1=float(f1[seen].mean()),
        positive_f1=float(f1[num_classes - 1]),
        f1_by_class=tuple(float(value) for value in f1),
    )


def accuracy(queries: Queries, label: Int64s, predicted: Int64s) -> Sums:
    """Share of labelled rows [N] whose predicted label is right. Micro F1 is the same: each row has one label."""
    labelled = label >= 0
    counts = queries.sums(labelled)
    hits = queries.sums(labelled & (label == predicted))
    return Sums(np.stack([hits, counts], axis=1), ratio, counts > 0)


def macro_f1(queries: Queries, label: Int64s, predicted: Int64s, num_classes: int) -> Sums:
    """Mean F1 over the labels that occur or are predicted."""
    return _f1(queries, label, predicted, num_classes, None)


def label_f1(queries: Queries, label: Int64s, predicted: Int64s, num_classes: int, wanted: int) -> Sums:
    """F1 of one label; not defined where it neither occurs nor is predicted."""
    return _f1(queries, label, predicted, num_classes, wanted)


def _f1(queries: Queries, label: Int64s, predicted: Int64s, num_classes: int, wanted: int | None) -> Sums:
    labelled = label >= 0
    guess = np.where(labelled, predicted, -1)
    ones = np.ones(len(label))
    hits = queries.table(np.where(label == guess, label, -1), num_classes, ones)
    seen = queries.table(label, num_classes, ones) + queries.table(guess, num_classes, ones)
    counted: Bools = queries.sums(labelled) > 0
    return Sums(np.concatenate([hits, seen], axis=1), partial(_mean_f1, wanted=wanted), counted)


def _mean_f1(sums: Float64s, wanted: int | None) -> Float64s:
    """[R, 2K] hits, then rows that are or are called each label; to [R]."""
    hits, seen = np.split(sums, 2, axis=1)
    f1 = divided(2 * hits, seen)
    if wanted is not None:
        return f1[:, wanted]
    return divided(np.nansum(f1, axis=1), (~np.isnan(f1)).sum(axis=1).astype(np.float64))
