"""Classification and ranking metrics over host arrays. Empty input is an error, never a silent zero."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClassFigures:
    """Accuracy and F1 over K classes; `positive_f1` is the F1 of the most relevant class."""

    accuracy: float
    macro_f1: float
    positive_f1: float
    f1_by_class: tuple[float, ...]


def class_figures(label: Ints, predicted: Ints, num_classes: int) -> ClassFigures:
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


def ndcg(query: Ints, gain: Floats, score: Floats, k: int) -> float:
    """Mean nDCG@k over queries with some gain (Jarvelin and Kekalainen 2002, linear gain); ties keep the input order.

    All [N]. NaN when no query has any gain.
    """
    order = np.lexsort((np.arange(len(query)), -score, query))
    ideal = np.lexsort((-gain, query))
    _, starts, counts = np.unique(query[order], return_index=True, return_counts=True)
    rank = np.arange(len(query)) - np.repeat(starts, counts)
    discount = np.where(rank < k, 1.0 / np.log2(rank + 2.0), 0.0)
    actual = np.add.reduceat(gain[order] * discount, starts)
    best = np.add.reduceat(gain[ideal] * discount, starts)
    useful = best > 0
    return float((actual[useful] / best[useful]).mean()) if useful.any() else float("nan")
