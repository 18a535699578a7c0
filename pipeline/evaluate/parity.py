"""Compare two recorded sides of one checkpoint: the same scores and the same training on two devices or precisions.

Side `a` is the reference. A figure that is NaN fails its bar.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field

from pipeline.core.arrays import Float64s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.record import Record
from pipeline.data.shards import Arrays
from pipeline.evaluate.config import ParityConfig
from pipeline.evaluate.scores import to_probabilities

Precision = Literal["fp32", "autocast", "bf16"]
FIRST_STEPS = 10
"""Training steps whose losses and gradients have bars; later ones magnify rounding."""


class Bars(NamedTuple):
    """How far two sides may be apart. Losses and gradients are relative differences."""

    holdout_loss: float
    first_losses: float
    first_gradients: float
    probability: float
    mean_probability: float
    correlation: float
    cosine: float


FULL = Bars(1e-3, 1e-4, 1e-3, 1e-4, 1e-5, 0.99999, 0.99999)
"""Both sides in fp32. XLA:CPU and PyTorch's own CPU kernels stay 50 times and more below."""
REDUCED = Bars(2e-2, 0.1, 0.2, 0.3, 5e-3, 0.999, 0.999)
"""A side in bf16 or autocast. The metric has the same bar in every precision, though training magnifies rounding: 300
steps on PriceRunner in bf16 led to accuracies 0.08 to 0.2 % apart, and so did fp32 (0.13 %) from weights that were
moved once by 0.2 %, the rounding of bf16."""


class _Figures(Record):
    model_config = ConfigDict(ser_json_inf_nan="strings")


class Evaluation(_Figures):
    """One evaluation of the holdout during training; step 0 is the checkpoint itself."""

    step: int
    metric: float
    loss: float


class Curve(_Figures):
    """Every training step, the first one first: loss, gradient norm, digest of the samples in its batch."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    samples: tuple[str, ...]


class SideRecord(_Figures):
    """What one side computed, from what, and with what."""

    schema_version: Literal[2] = 2
    run: str = Field(description="Name of what was computed; the same for sides that were asked for together")
    backend: str
    precision: Precision
    device: str = Field(description="What graphs are compiled for, such as xla:CPU")
    checkpoint: str = Field(description="URI of the checkpoint")
    digest: str = Field(description="Digest of its manifest: names its content")
    identity: dict[str, str] = Field(description="Fingerprint of all that decides the weights, but the precision")
    metric: str
    label_gains: tuple[float, ...]
    evaluations: tuple[Evaluation, ...] = Field(min_length=1, description="Step 0 first: the checkpoint itself")
    curve: Curve
    scores: str = Field(description="Digest of the manifest of the arrays next to it")
    code_version: str
    finished: datetime = Field(description="UTC")

    @property
    def name(self) -> str:
        return f"{self.backend}.{self.precision}"


class RecordedSide(NamedTuple):
    """A record with its arrays.

    sample_id (ascending), query_id, label, gain [N]; logits [N, K]; vector_rows [M], the rows of `query` and `product`
    embeddings [M, D], which have length one.
    """

    uri: str
    record: SideRecord
    arrays: Arrays


class EvaluationPair(_Figures):
    """One evaluation on both sides. `relative`: the size of the difference as a share of a."""

    step: int
    a: float
    b: float
    relative: float
    loss_a: float
    loss_b: float
    loss_relative: float


class ParityCheck(_Figures):
    """One figure compared with its bar; None if it is undefined for this data."""

    name: str
    text: str
    value: float | None
    comparison: Literal["<=", ">="]
    bound: float
    outcome: Literal["pass", "fail", "skipped"]

    @property
    def line(self) -> str:
        shown = "-" if self.value is None else f"{self.value:.3g}" if self.comparison == "<=" else f"{self.value:.7g}"
        return f"{self.text} {shown}, {'at most' if self.comparison == '<=' else 'at least'} {self.bound:g}"


class ParityReport(_Figures):
    """The comparison of two sides."""

    schema_version: Literal[2] = 2
    a: str = Field(description="Backend and precision of the first side, such as cpu.fp32")
    b: str
    records: tuple[str, str] = Field(description="URIs of the records")
    checkpoint: str = Field(description="URI as the first side knows it")
    metric: str
    rows: int
    decisions: int = Field(description="Rows with another most probable class")
    max_difference: float
    evaluations: tuple[EvaluationPair, ...]
    checks: tuple[ParityCheck, ...]
    note: str = Field(description="Why the rows are too few, or nothing")

    @property
    def failed(self) -> tuple[ParityCheck, ...]:
        return tuple(check for check in self.checks if check.outcome == "fail")

    def value(self, name: str) -> float | None:
        return next(check.value for check in self.checks if check.name == name)

    def lines(self) -> list[str]:
        """Return lines for a terminal: evaluations side by side, then every figure with its bar, then notes."""
        head = f"{'step':>6}{'A':>12}{'B':>12}{'relative':>12}{'loss A':>12}{'loss B':>12}{'relative':>12}"
        rows = (
            f"{one.step:>6}{one.a:>12.6f}{one.b:>12.6f}{one.relative:>12.4%}{one.loss_a:>12.6f}{one.loss_b:>12.6f}"
            f"{one.loss_relative:>12.4%}"
            for one in self.evaluations
        )
        return [
            f"parity of A {self.a} and B {self.b}: {self.metric} and loss on {self.rows:,} holdout rows, trained from"
            f" {self.checkpoint}",
            head,
            *rows,
            *(f"  {check.outcome:<7}  {check.line}" for check in self.checks),
            f"  {self.decisions:,} of {self.rows:,} rows have another most probable class",
            *([f"  note: {self.note}"] if self.note else []),
        ]


def compare_sides(a: RecordedSide, b: RecordedSide, config: ParityConfig) -> ParityReport:
    """Compare and judge. Raises ConfigError or DataError naming what differs in the work of the sides."""
    _check_same(a, b)
    bars = FULL if {a.record.precision, b.record.precision} == {"fp32"} else REDUCED
    metric, loss = (
        relative_differences(*([getattr(one, name) for one in side.record.evaluations] for side in (a, b)))
        for name in ("metric", "loss")
    )
    pairs = zip(a.record.evaluations, b.record.evaluations, metric.tolist(), loss.tolist(), strict=True)
    evaluations = tuple(
        EvaluationPair(
            step=one.step,
            a=one.metric,
            b=other.metric,
            relative=relative,
            loss_a=one.loss,
            loss_b=other.loss,
            loss_relative=loss_relative,
        )
        for one, other, relative, loss_relative in pairs
    )
    losses = relative_differences(a.record.curve.losses, b.record.curve.losses)[:FIRST_STEPS]
    gradients = relative_differences(a.record.curve.grad_norms, b.record.curve.grad_norms)[:FIRST_STEPS]
    ours, theirs = (to_probabilities(side.arrays["logits"]) for side in (a, b))
    apart = np.abs(ours - theirs)
    cosines = np.concatenate([(a.arrays[side] * b.arrays[side]).sum(axis=1) for side in ("query", "product")])
    scores, others = (probabilities @ np.array(a.record.label_gains) for probabilities in (ours, theirs))
    first, gradient = f"in the first {len(losses)} steps", bars.first_gradients
    checks = (
        _check("metric", f"relative difference of {a.record.metric}", metric.max(), "<=", config.max_difference),
        _check("holdout_loss", "relative difference of the holdout loss", loss.max(), "<=", bars.holdout_loss),
        _check("first_losses", f"relative difference of the loss {first}", losses.max(), "<=", bars.first_losses),
        _check("first_gradients", f"the same of the gradient norm {first}", gradients.max(), "<=", gradient),
        _check("probability", "largest difference of a probability", apart.max(), "<=", bars.probability),
        _check("mean_probability", "mean difference of a probability", apart.mean(), "<=", bars.mean_probability),
        _check("correlation", "correlation of the scores", _correlation(scores, others), ">=", bars.correlation),
        _check("cosine", "least cosine of an embedding", cosines.min(initial=1.0), ">=", bars.cosine),
    )
    first_metric, note = a.record.evaluations[0].metric, ""
    if (one_row := 1.0 / (len(ours) * first_metric) if first_metric > 0 else 1.0) > config.max_difference:
        note = f"one of the {len(ours):,} holdout rows is {one_row:.2%} of the metric: too few to show a difference"
    return ParityReport(
        a=a.record.name,
        b=b.record.name,
        records=(a.uri, b.uri),
        checkpoint=a.record.checkpoint,
        metric=a.record.metric,
        rows=len(ours),
        decisions=int((ours.argmax(axis=1) != theirs.argmax(axis=1)).sum()),
        max_difference=config.max_difference,
        evaluations=evaluations,
        checks=checks,
        note=note,
    )


def relative_differences(a: Sequence[float], b: Sequence[float]) -> Float64s:
    """Return |b - a| as shares of |a|: infinite if only `a` is 0, NaN if one is not finite."""
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    with np.errstate(all="ignore"):
        apart = np.where(left == right, 0.0, np.abs(right - left) / np.abs(left))
    return np.where(np.isfinite(left) & np.isfinite(right), apart, np.nan)


def _correlation(a: Float64s, b: Float64s) -> float | None:
    """Return Pearson's correlation of [N] values; None if either does not vary."""
    if not (np.ptp(a) and np.ptp(b)):
        return None
    with np.errstate(all="ignore"):
        return float(np.corrcoef(a, b)[0, 1])


def _check(name: str, text: str, value: float | None, comparison: Literal["<=", ">="], bound: float) -> ParityCheck:
    outcome: Literal["pass", "fail", "skipped"] = "skipped"
    if value is not None:  # NaN is neither above nor below
        outcome = "pass" if (value <= bound if comparison == "<=" else value >= bound) else "fail"
    value = None if value is None else float(value)
    return ParityCheck(name=name, text=text, value=value, comparison=comparison, bound=bound, outcome=outcome)


def _check_same(a: RecordedSide, b: RecordedSide) -> None:
    """Raise ConfigError or DataError unless both did the same work but for backend and precision."""
    one, other = a.record, b.record
    ours, theirs = ({"checkpoint": side.digest, **side.identity} for side in (one, other))
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    of_settings = [name for name in different if not name.startswith("data.")]
    rows = ("sample_id", "query_id", "label", "gain")
    different += [f"{name} of the holdout" for name in rows if not np.array_equal(a.arrays[name], b.arrays[name])]
    different += ["samples of the training steps"] if one.curve.samples != other.curve.samples else []
    if different:
        raise (ConfigError if of_settings else DataError)(
            f"{a.uri} and {b.uri} were recorded with other {', '.join(different)}",
            expected="one checkpoint, and the same data and settings; only backend and precision may differ",
            next_command="record one of them again with the other's settings",
        )
