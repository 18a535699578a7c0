"""Do two recorded sides agree: their figures held against bars, told as a table and a picture.

`a` is the reference. A figure that is NaN fails its bar.
"""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field

from pipeline.core.arrays import Float32s, Float64s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.record import Record
from pipeline.evaluate.config import ParityBars, ParityConfig
from pipeline.evaluate.metrics.scored_rows import ScoredRows
from pipeline.evaluate.scores import ScoreSet, to_rows

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


def relative_differences(a: Sequence[float], b: Sequence[float]) -> Float64s:
    """|b - a| as shares of |a|; infinite where only `a` is 0, NaN where one is not finite."""
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    with np.errstate(all="ignore"):
        apart = np.where(left == right, 0.0, np.abs(right - left) / np.abs(left))
    return np.where(np.isfinite(left) & np.isfinite(right), apart, np.nan)


def compare_evaluations(a: Sequence[Evaluation], b: Sequence[Evaluation]) -> tuple[EvaluationPair, ...]:
    """Pairs by step. Raises DataError when there are none or the steps differ."""
    steps_a, steps_b = [one.step for one in a], [one.step for one in b]
    if not a or steps_a != steps_b:
        raise DataError(
            f"evaluations at steps {steps_a} against {steps_b}", expected="at least one, and the same steps on both"
        )
    metrics = relative_differences([one.metric for one in a], [one.metric for one in b]).tolist()
    losses = relative_differences([one.loss for one in a], [one.loss for one in b]).tolist()
    return tuple(
        EvaluationPair(
            step=one.step,
            a=one.metric,
            b=other.metric,
            difference=other.metric - one.metric,
            relative=relative,
            loss_a=one.loss,
            loss_b=other.loss,
            loss_relative=loss_relative,
        )
        for one, other, relative, loss_relative in zip(a, b, metrics, losses, strict=True)
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
    losses = relative_differences(a.losses, b.losses)
    gradients = relative_differences(a.grad_norms, b.grad_norms)
    return CurveFigures(
        steps=len(losses),
        first_steps=min(first_steps, len(losses)),
        first_loss=float(losses[:first_steps].max()),
        first_gradient=float(gradients[:first_steps].max()),
        max_loss=float(losses.max()),
        mean_loss=float(losses.mean()),
    )


def compare_scores(a: ScoredRows, b: ScoredRows) -> ScoreFigures:
    """Scores of the same N rows in the same order, at least one."""
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
    """(query [M, D], product [M, D]) of each side, the same M rows in the same order, at least one."""
    units_a, units_b = [_units(one) for one in a], [_units(one) for one in b]
    cosines = np.concatenate([(one * other).sum(axis=1) for one, other in zip(units_a, units_b, strict=True)])
    near_a, near_b = units_a[0] @ units_a[1].T, units_b[0] @ units_b[1].T
    pairs = zip(near_a, near_b, strict=True) if near_a.shape[1] > TOP_K else ()
    overlaps = [overlap_at(one, other) for one, other in pairs]
    return VectorFigures(
        rows=len(a[0]),
        min_cosine=float(cosines.min()),
        mean_cosine=float(cosines.mean()),
        overlap=float(np.mean(overlaps)) if overlaps else None,
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
    if not (np.ptp(a) and np.ptp(b)):
        return None
    with np.errstate(all="ignore"):  # what varies by less than floats can square has no correlation either
        found = float(np.corrcoef(a, b)[0, 1])
    return found if math.isfinite(found) or not (np.isfinite(a).all() and np.isfinite(b).all()) else None


def spearman(a: Float64s, b: Float64s) -> float | None:
    """Correlation of the ranks of [N] values, equal ones sharing their mean rank. NaN when a value is not finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return math.nan
    ranks = []
    for values in (a, b):
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[places])
    return pearson(*ranks)


def _units(vectors: Float32s) -> Float64s:
    """[M, D] scaled to length one; NaN for a vector of zeros."""
    wide = vectors.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        units: Float64s = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    return units


FULL = "fp32"
_NO_DIFFERENCE = 1e-9
Precision = Literal["fp32", "autocast", "bf16"]


@dataclass(frozen=True)
class Side:
    """What one side computes on, and in: a backend with a precision."""

    backend: str
    precision: Precision

    @property
    def name(self) -> str:
        """As in file names: cpu.fp32"""
        return f"{self.backend}.{self.precision}"


class SideRecord(FiguresRecord):
    """What one side computed, from what, with what."""

    schema_version: Literal[1] = 1
    run: str = Field(description="Name of what was computed; the same for sides that were asked for together")
    backend: str
    precision: Precision
    device: str = Field(description="What graphs are compiled for, such as xla:CPU")
    checkpoint: str = Field(description="URI of the checkpoint")
    digest: str = Field(description="Digest of its manifest: names its content")
    identity: dict[str, str] = Field(description="Fingerprint of all that decides the weights, but the precision")
    metric: str
    evaluations: tuple[Evaluation, ...] = Field(min_length=1, description="Step 0 first: the checkpoint itself")
    curve: Curve
    scores: str = Field(description="Digest of the manifest of the scores beside it")
    settings_hash: str
    code_version: str
    finished: datetime = Field(description="UTC")

    @property
    def side(self) -> Side:
        return Side(self.backend, self.precision)


@dataclass(frozen=True)
class RecordedSide:
    """A record with the scores it goes with."""

    uri: str
    record: SideRecord
    scores: ScoreSet


class ParityCheck(FiguresRecord):
    """One figure held against its bar."""

    name: str
    text: str
    value: float | None
    comparison: Literal["<=", ">="]
    bound: float
    outcome: Literal["pass", "fail", "skipped"]

    @property
    def value_text(self) -> str:
        """A difference in three digits; what should be near one in seven."""
        if self.value is None:
            return "-"
        return f"{self.value:.3g}" if self.comparison == "<=" else f"{self.value:.7g}"

    @property
    def bound_text(self) -> str:
        return f"{'at most' if self.comparison == '<=' else 'at least'} {self.bound:g}"


class SideSummary(Record):
    """One side, as the report names it."""

    name: str
    device: str
    record: str = Field(description="URI of the record")
    code_version: str


class ParityReport(FiguresRecord):
    """The comparison of two sides with its verdict."""

    schema_version: Literal[1] = 1
    a: SideSummary
    b: SideSummary
    checkpoint: str = Field(description="URI as the first side knows it")
    digest: str
    metric: str
    max_difference: float
    bars: ParityBars
    compared: Comparison
    checks: tuple[ParityCheck, ...]
    notes: tuple[str, ...] = Field(description="What a reader must know to judge the figures")

    @property
    def passed(self) -> bool:
        return all(check.outcome != "fail" for check in self.checks)


def judge(compared: Comparison, bars: ParityBars, max_difference: float) -> tuple[ParityCheck, ...]:
    """Every figure that has a bar. `max_difference`: of the metric at any evaluation, relative."""
    pairs, curve, scores, vectors = compared.evaluations, compared.curve, compared.scores, compared.vectors
    first = f"in the first {curve.first_steps} steps"
    metric = float(np.max([pair.relative for pair in pairs]))  # NaN when one of them is
    loss = float(np.max([pair.loss_relative for pair in pairs]))
    cosine, near = (vectors.min_cosine, vectors.overlap) if vectors else (None, None)
    at_most: tuple[tuple[str, str, float | None, float], ...] = (
        ("metric", "relative difference of the metric", metric, max_difference),
        ("holdout_loss", "relative difference of the holdout loss", loss, bars.max_loss_difference),
        ("first_losses", f"relative difference of the loss {first}", curve.first_loss, bars.max_first_loss_difference),
        (
            "first_gradients",
            f"relative difference of the gradient norm {first}",
            curve.first_gradient,
            bars.max_first_gradient_difference,
        ),
        ("probability", "largest difference of a probability", scores.max_probability, bars.max_probability_difference),
        (
            "mean_probability",
            "mean difference of the probabilities",
            scores.mean_probability,
            bars.mean_probability_difference,
        ),
    )
    at_least: tuple[tuple[str, str, float | None, float], ...] = (
        ("pearson", "correlation of the scores", scores.pearson, bars.min_correlation),
        ("spearman", "correlation of the ranks", scores.spearman, bars.min_correlation),
        ("ranking", "first ten of a query in common", scores.overlap, bars.min_overlap),
        ("cosine", "least cosine of an embedding", cosine, bars.min_cosine),
        ("neighbours", "ten nearest products in common", near, bars.min_overlap),
    )
    return (
        *(_check(*one, comparison="<=") for one in at_most),
        *(_check(*one, comparison=">=") for one in at_least),
    )


def _check(name: str, text: str, value: float | None, bound: float, comparison: Literal["<=", ">="]) -> ParityCheck:
    outcome: Literal["pass", "fail", "skipped"] = "skipped"
    if value is not None:  # NaN is neither above nor below
        holds = value <= bound if comparison == "<=" else value >= bound
        outcome = "pass" if holds else "fail"
    return ParityCheck(name=name, text=text, value=value, comparison=comparison, bound=bound, outcome=outcome)


def compare_sides(a: RecordedSide, b: RecordedSide, config: ParityConfig) -> ParityReport:
    """Compare and judge; `a` is the reference. Raises ConfigError, DataError naming in what the work differs."""
    _check_same(a, b)
    vectors_a, vectors_b = a.scores.vectors, b.scores.vectors
    compared = Comparison(
        evaluations=compare_evaluations(a.record.evaluations, b.record.evaluations),
        curve=compare_curves(a.record.curve, b.record.curve, first_steps=config.first_steps),
        scores=compare_scores(to_rows(a.scores), to_rows(b.scores)),
        vectors=compare_vectors((vectors_a.query, vectors_a.product), (vectors_b.query, vectors_b.product))
        if vectors_a and vectors_b
        else None,
    )
    summaries = [
        SideSummary(
            name=side.record.side.name,
            device=side.record.device,
            record=side.uri,
            code_version=side.record.code_version,
        )
        for side in (a, b)
    ]
    bars: ParityBars = config.fp32 if {a.record.precision, b.record.precision} == {FULL} else config.reduced
    return ParityReport(
        a=summaries[0],
        b=summaries[1],
        checkpoint=a.record.checkpoint,
        digest=a.record.digest,
        metric=a.record.metric,
        max_difference=config.max_difference,
        bars=bars,
        compared=compared,
        checks=judge(compared, bars, config.max_difference),
        notes=tuple(_notes(a.record, b.record, compared, config)),
    )


def _check_same(a: RecordedSide, b: RecordedSide) -> None:
    """Both must have computed the same but for backend and precision. Raises ConfigError, DataError with the field."""
    names = f"{a.uri} and {b.uri}"
    if a.record.digest != b.record.digest:
        raise ConfigError(
            f"{names} are of other checkpoints: {a.record.checkpoint} ({a.record.digest[:12]}) and "
            f"{b.record.checkpoint} ({b.record.digest[:12]})",
            expected="one checkpoint for both sides",
            next_command="record one of them again with the other's --parity.checkpoint",
        )
    ours, theirs = a.record.identity, b.record.identity
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if different:
        family = DataError if different[0].startswith("data.") else ConfigError
        raise family(
            f"{names} were recorded with other {', '.join(different)}",
            expected="the same data and settings for both sides; only backend and precision may differ",
            next_command="record one of them again with the other's settings",
        )
    for name in ("sample_id", "query_id", "label", "gain"):
        _check_array(f"{name} of the holdout", getattr(a.scores, name), getattr(b.scores, name), names)
    if a.scores.vectors and b.scores.vectors:
        _check_array("rows with embeddings", a.scores.vectors.sample_id, b.scores.vectors.sample_id, names)


def _check_array(what: str, a: npt.NDArray[Any], b: npt.NDArray[Any], names: str) -> None:
    if np.array_equal(a, b):
        return
    if a.shape == b.shape:
        row = int(np.flatnonzero(a != b)[0])
        seen = f"row {row} is {a[row]} and {b[row]}"
    else:
        seen = f"{len(a):,} and {len(b):,} rows"
    raise DataError(
        f"{names} differ in the {what}: {seen}",
        expected="the same holdout on both sides",
        next_command="record both sides from the same prepared data, with the same parity.rows and parity.vector_rows",
    )


def _notes(a: SideRecord, b: SideRecord, compared: Comparison, config: ParityConfig) -> Iterator[str]:
    scores, vectors = compared.scores, compared.vectors
    one_row = 1.0 / (scores.rows * compared.evaluations[0].a) if compared.evaluations[0].a > 0 else 1.0
    if one_row > config.max_difference:
        yield (
            f"one of the {scores.rows:,} holdout rows is {one_row:.2%} of the metric: "
            f"too few rows to tell a difference of {config.max_difference:.2%}"
        )
    if a.code_version != b.code_version:
        yield f"recorded by versions {a.code_version} and {b.code_version}"
    figures = {
        "correlation": scores.pearson,
        "overlap of rankings (no query has more than ten rows)": scores.overlap,
        "overlap of neighbours": vectors and vectors.overlap,
    }
    yield from (f"not judged: {name} has no meaning for this data" for name, value in figures.items() if value is None)


# A comparison as lines for a terminal, and as a picture.


def lines_of(report: ParityReport) -> list[str]:
    """Evaluations side by side, then every figure with its bar, then what to know."""
    compared, a, b, metric = report.compared, f"A {report.a.name}", f"B {report.b.name}", report.metric
    scores, vectors = compared.scores, compared.vectors
    width = max(12, len(a), len(b), len(metric)) + 2

    def row(first: object, *cells: str) -> str:
        return f"{first:>6}" + "".join(f"{cell:>{width}}" for cell in cells)

    lines = [
        f"parity of {a} ({report.a.device}) and {b} ({report.b.device})",
        f"checkpoint {report.checkpoint} | {scores.rows:,} holdout rows | {compared.curve.steps:,} steps from it",
        "",
        row("", metric, metric, "", "", "loss", "loss", ""),
        row("step", a, b, "difference", "relative", a, b, "relative"),
    ]
    for pair in compared.evaluations:
        metrics = f"{pair.a:.6f}", f"{pair.b:.6f}", f"{pair.difference:+.6f}", f"{pair.relative:.4%}"
        lines.append(row(pair.step, *metrics, f"{pair.loss_a:.6f}", f"{pair.loss_b:.6f}", f"{pair.loss_relative:.4%}"))
    marks = {"pass": "pass", "fail": "FAIL", "skipped": "skip"}
    checks = [f"  {marks[one.outcome]}  {one.text:<62} {one.value_text:>10}  {one.bound_text}" for one in report.checks]
    lines += ["", *checks, "", f"  {scores.decisions:,} of {scores.rows:,} rows have another most likely class"]
    if vectors:
        lines.append(f"  mean cosine of embeddings {vectors.mean_cosine:.7f} over {vectors.rows:,} pairs of texts")
    return [*lines, *(f"  note: {note}" for note in report.notes)]


def plot_svg(report: ParityReport, a: Curve, b: Curve) -> bytes | None:
    """The metric, the difference of metric and holdout loss, that of every step; None without matplotlib.

    The same figures give the same bytes. No display is needed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        return None

    pairs = report.compared.evaluations
    steps = [pair.step for pair in pairs]
    figure = Figure(figsize=(13, 4), layout="constrained")
    metric, difference, curve = figure.subplots(1, 3)
    metric.plot(steps, [pair.a for pair in pairs], "o-", label=report.a.name)
    metric.plot(steps, [pair.b for pair in pairs], "x--", label=report.b.name)
    metric.set(title=report.metric, xlabel="step")
    # No difference at all has a place on the axis, too.
    difference.plot(steps, np.maximum([pair.relative for pair in pairs], _NO_DIFFERENCE), "o-", label=report.metric)
    difference.plot(
        steps, np.maximum([pair.loss_relative for pair in pairs], _NO_DIFFERENCE), "x--", label="holdout loss"
    )
    difference.axhline(report.max_difference, color="red", label=f"bar {report.max_difference:.2%}")
    difference.set(title="relative difference at evaluations", xlabel="step", yscale="log")
    for text, left, right in (("loss", a.losses, b.losses), ("gradient norm", a.grad_norms, b.grad_norms)):
        apart = np.maximum(relative_differences(left, right), _NO_DIFFERENCE)
        curve.plot(range(1, len(left) + 1), apart, linewidth=0.8, label=text)
    curve.set(title="relative difference of training steps", xlabel="step", yscale="log")
    for axes in (metric, difference, curve):
        axes.grid(alpha=0.3)
        axes.legend(loc="center right")
    figure.suptitle(f"{report.a.name} and {report.b.name}: {'pass' if report.passed else 'FAIL'}")
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "trnpipe"}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return file.getvalue()
