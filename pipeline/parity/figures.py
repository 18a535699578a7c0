"""How far two sides are apart, in figures: evaluations, training steps, scores, embeddings.

Pure. `a` is the reference: relative differences are shares of its values.
"""

import math
from collections.abc import Sequence

import numpy as np
from pydantic import ConfigDict, Field

from pipeline.core.arrays import Float32s, Float64s
from pipeline.core.errors import DataError
from pipeline.core.record import Record
from pipeline.evaluate.metrics.scored import ScoredRows

TOP_K = 10
TIE = 1e-6
"""Scores this close rank as equal: which of them is among the first ten is a matter of rounding."""


class FiguresRecord(Record):
    model_config = ConfigDict(ser_json_inf_nan="strings")


class Evaluation(FiguresRecord):
    """One evaluation of the holdout during training; step 0 is the checkpoint itself."""

    step: int
    metric: float
    loss: float


class Curve(FiguresRecord):
    """Every training step, the first one first: loss, gradient norm, digest of the samples in its batch."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    samples: tuple[str, ...]


class EvaluationPair(FiguresRecord):
    """One evaluation on both sides."""

    step: int
    a: float
    b: float
    difference: float = Field(description="b - a")
    relative: float = Field(description="Its size as a share of a")
    loss_a: float
    loss_b: float
    loss_relative: float


class CurveFigures(FiguresRecord):
    """How far the training losses and gradient norms are apart, relative to a."""

    steps: int
    first_steps: int = Field(description="How many the `first` figures cover")
    first_loss: float
    first_gradient: float
    max_loss: float
    mean_loss: float


class ScoreFigures(FiguresRecord):
    """How far the scores of one checkpoint are apart. None where a figure has no meaning."""

    rows: int
    ranked_queries: int = Field(description="Queries with more rows than the overlap looks at")
    max_probability: float
    mean_probability: float
    decisions: int = Field(description="Rows with another most likely class")
    pearson: float | None
    spearman: float | None
    overlap: float | None = Field(description="Share in common of the first ten rows of a query, mean over queries")


class VectorFigures(FiguresRecord):
    """How far embeddings are apart: cosines between the sides, and the nearest products of each query."""

    rows: int
    min_cosine: float
    mean_cosine: float
    overlap: float | None = Field(description="Share in common of the ten nearest products, mean over queries")


class Comparison(FiguresRecord):
    """Everything that was compared."""

    evaluations: tuple[EvaluationPair, ...]
    curve: CurveFigures
    scores: ScoreFigures
    vectors: VectorFigures | None


def relative_difference(a: float, b: float) -> float:
    """|b - a| as a share of |a|; infinite when only `a` is 0, NaN when one is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.nan
    if a == b:
        return 0.0
    return abs(b - a) / abs(a) if a else math.inf


def compare_evaluations(a: Sequence[Evaluation], b: Sequence[Evaluation]) -> tuple[EvaluationPair, ...]:
    """Pairs by step. Raises DataError when there are none or the steps differ."""
    steps_a, steps_b = [one.step for one in a], [one.step for one in b]
    if not a or steps_a != steps_b:
        raise DataError(
            f"evaluations at steps {steps_a} against {steps_b}", expected="at least one, and the same steps on both"
        )
    return tuple(
        EvaluationPair(
            step=one.step,
            a=one.metric,
            b=other.metric,
            difference=other.metric - one.metric,
            relative=relative_difference(one.metric, other.metric),
            loss_a=one.loss,
            loss_b=other.loss,
            loss_relative=relative_difference(one.loss, other.loss),
        )
        for one, other in zip(a, b, strict=True)
    )


def compare_curves(a: Curve, b: Curve, *, first_steps: int) -> CurveFigures:
    """Losses and gradient norms of every step.

    Rounding is magnified from step to step; the first steps show whether gradients and updates are the same.
    Raises DataError when lengths differ, or a step was made of other samples.
    """
    if not a.losses or len(a.losses) != len(b.losses):
        raise DataError(f"{len(a.losses)} steps against {len(b.losses)}", expected="at least one, as many on both")
    for step, (one, other) in enumerate(zip(a.samples, b.samples, strict=True), start=1):
        if one != other:
            raise DataError(
                f"step {step} was made of samples {one} against {other}", expected="the same samples in the same order"
            )
    losses, gradients = differences(a.losses, b.losses), differences(a.grad_norms, b.grad_norms)
    return CurveFigures(
        steps=len(losses),
        first_steps=min(first_steps, len(losses)),
        first_loss=largest(losses[:first_steps]),
        first_gradient=largest(gradients[:first_steps]),
        max_loss=largest(losses),
        mean_loss=float(np.mean(losses)),
    )


def compare_scores(a: ScoredRows, b: ScoredRows) -> ScoreFigures:
    """Scores of the same N rows in the same order. Raises DataError for none, or for other rows or classes."""
    if not a.num_rows:
        raise DataError("no row was scored", expected="at least one on both sides")
    if a.probabilities.shape != b.probabilities.shape or not np.array_equal(a.query_id, b.query_id):
        raise DataError(
            f"scores of {a.probabilities.shape} and of {b.probabilities.shape} are not of the same rows",
            expected="the same rows and classes on both sides",
        )
    apart = np.abs(a.probabilities - b.probabilities)
    order = np.argsort(a.query_id, kind="stable")
    queries = np.split(order, np.unique(a.query_id[order], return_index=True)[1][1:])
    overlaps = [overlap_at(a.relevance[rows], b.relevance[rows]) for rows in queries if len(rows) > TOP_K]
    return ScoreFigures(
        rows=a.num_rows,
        ranked_queries=len(overlaps),
        max_probability=float(apart.max()),
        mean_probability=float(apart.mean()),
        decisions=int((a.probabilities.argmax(axis=1) != b.probabilities.argmax(axis=1)).sum()),
        pearson=pearson(a.relevance, b.relevance),
        spearman=spearman(a.relevance, b.relevance),
        overlap=float(np.mean(overlaps)) if overlaps else None,
    )


def compare_vectors(a: tuple[Float32s, Float32s], b: tuple[Float32s, Float32s]) -> VectorFigures:
    """(query [M, D], product [M, D]) of each side, the same M rows in the same order. Raises DataError."""
    if not len(a[0]) or [one.shape for one in a] != [one.shape for one in b]:
        raise DataError(
            f"vectors of {[one.shape for one in a]} against {[one.shape for one in b]}",
            expected="at least one row, and the same shapes on both sides",
        )
    units_a, units_b = [_units(one) for one in a], [_units(one) for one in b]
    cosines = np.concatenate([(one * other).sum(axis=1) for one, other in zip(units_a, units_b, strict=True)])
    near_a, near_b = units_a[0] @ units_a[1].T, units_b[0] @ units_b[1].T
    overlaps = [overlap_at(one, other) for one, other in zip(near_a, near_b, strict=True)]
    return VectorFigures(
        rows=len(a[0]),
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        overlap=float(np.mean(overlaps)) if near_a.shape[1] > TOP_K else None,
    )


def overlap_at(a: Float64s, b: Float64s, k: int = TOP_K) -> float:
    """Share in common of the `k` highest of N scores, N > k; those as good as equal to the last of them count, too.

    NaN when a score is not finite.
    """
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    counts = []
    for ours, theirs in ((a, b), (b, a)):
        chosen = np.argsort(-theirs, kind="stable")[:k]
        counts.append((ours[chosen] >= np.partition(ours, -k)[-k] - TIE).mean())
    return float(np.mean(counts))


def pearson(a: Float64s, b: Float64s) -> float | None:
    """Correlation of [N] values; None when either does not vary."""
    left, right = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(left @ left)) * math.sqrt(float(right @ right))
    return float(left @ right) / scale if scale else None


def spearman(a: Float64s, b: Float64s) -> float | None:
    """Correlation of the ranks of [N] values, equal ones sharing their mean rank. NaN when a value is not finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    return pearson(_ranks(a), _ranks(b))


def differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [relative_difference(one, other) for one, other in zip(a, b, strict=True)]


def largest(values: Sequence[float]) -> float:
    """NaN when one of them is."""
    return float(np.max(values))


def _units(vectors: Float32s) -> Float64s:
    """[M, D] scaled to length one; NaN for a vector of zeros."""
    wide = vectors.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        units: Float64s = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    return units


def _ranks(values: Float64s) -> Float64s:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]
