"""Two recorded sides: are they of the same work, and how far apart are they."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from pipeline.core.errors import ConfigError, DataError
from pipeline.evaluate.config import ParityBars, ParityConfig
from pipeline.evaluate.parity import (
    Comparison,
    ParityCheck,
    compare_curves,
    compare_evaluations,
    compare_scores,
    compare_vectors,
    judge,
)
from pipeline.evaluate.scores import to_rows
from pipeline.parity.record import RecordedSide

FULL = "fp32"


class SideSummary(BaseModel):
    """One side, as the report names it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    device: str
    record: str = Field(description="URI of the record")
    code_version: str


class ParityReport(BaseModel):
    """The comparison of two sides with its verdict."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

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


def compare_sides(a: RecordedSide, b: RecordedSide, config: ParityConfig) -> ParityReport:
    """Compare and judge; `a` is the reference. Raises ConfigError, DataError naming in what the work differs."""
    check_same(a, b)
    vectors_a, vectors_b = a.scores.vectors, b.scores.vectors
    compared = Comparison(
        evaluations=compare_evaluations(a.record.evaluations, b.record.evaluations),
        curve=compare_curves(a.record.curve, b.record.curve, first_steps=config.first_steps),
        scores=compare_scores(to_rows(a.scores), to_rows(b.scores)),
        vectors=compare_vectors((vectors_a.query, vectors_a.product), (vectors_b.query, vectors_b.product))
        if vectors_a and vectors_b
        else None,
    )
    bars: ParityBars = config.fp32 if {a.record.precision, b.record.precision} == {FULL} else config.reduced
    return ParityReport(
        a=_summary(a),
        b=_summary(b),
        checkpoint=a.record.checkpoint,
        digest=a.record.digest,
        metric=a.record.metric,
        max_difference=config.max_difference,
        bars=ParityBars.model_validate(bars.model_dump()),
        compared=compared,
        checks=judge(compared, bars, config.max_difference),
        notes=tuple(_notes(a, b, compared, config)),
    )


def check_same(a: RecordedSide, b: RecordedSide) -> None:
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


def _summary(side: RecordedSide) -> SideSummary:
    record = side.record
    return SideSummary(name=record.side.name, device=record.device, record=side.uri, code_version=record.code_version)


def _notes(a: RecordedSide, b: RecordedSide, compared: Comparison, config: ParityConfig) -> list[str]:
    notes = []
    one_row = 1.0 / (compared.scores.rows * compared.evaluations[0].a) if compared.evaluations[0].a > 0 else 1.0
    if one_row > config.max_difference:
        notes.append(
            f"one of the {compared.scores.rows:,} holdout rows is {one_row:.2%} of the metric: "
            f"too few rows to tell a difference of {config.max_difference:.2%}"
        )
    if a.record.code_version != b.record.code_version:
        notes.append(f"recorded by versions {a.record.code_version} and {b.record.code_version}")
    notes += [f"not judged: {one} has no meaning for this data" for one in _skipped(compared)]
    return notes


def _skipped(compared: Comparison) -> list[str]:
    vectors = compared.vectors
    missing = {
        "correlation": compared.scores.pearson,
        "overlap of rankings (no query has more than ten rows)": compared.scores.overlap,
        "overlap of neighbours": vectors and vectors.overlap,
    }
    return [name for name, value in missing.items() if value is None]


# A comparison as lines for a terminal.


def lines_of(report: ParityReport) -> list[str]:
    """Evaluations side by side, then every figure with its bar, then what to know."""
    return [*_head(report), "", *_evaluations(report), "", *map(_check_line, report.checks), "", *_tail(report)]


def _head(report: ParityReport) -> Iterator[str]:
    scores, curve, a, b = report.compared.scores, report.compared.curve, report.a, report.b
    yield f"parity of A {a.name} ({a.device}) and B {b.name} ({b.device})"
    yield f"checkpoint {report.checkpoint} | {scores.rows:,} holdout rows | {curve.steps:,} steps from it"


def _evaluations(report: ParityReport) -> Iterator[str]:
    a, b, metric = f"A {report.a.name}", f"B {report.b.name}", report.metric
    width = max(12, len(a), len(b), len(metric)) + 2
    yield f"{'':>6}" + "".join(f"{text:>{width}}" for text in (metric, metric, "", "", "loss", "loss", ""))
    yield f"{'step':>6}" + "".join(f"{text:>{width}}" for text in (a, b, "difference", "relative", a, b, "relative"))
    for pair in report.compared.evaluations:
        cells = (
            f"{pair.a:.6f}",
            f"{pair.b:.6f}",
            f"{pair.difference:+.6f}",
            f"{pair.relative:.4%}",
            f"{pair.loss_a:.6f}",
            f"{pair.loss_b:.6f}",
            f"{pair.loss_relative:.4%}",
        )
        yield f"{pair.step:>6}" + "".join(f"{cell:>{width}}" for cell in cells)


def value_text(check: ParityCheck) -> str:
    """A difference in three digits; what should be near one in seven."""
    if check.value is None:
        return "-"
    return f"{check.value:.3g}" if check.comparison == "<=" else f"{check.value:.7g}"


def bound_text(check: ParityCheck) -> str:
    return f"{'at most' if check.comparison == '<=' else 'at least'} {check.bound:g}"


def _check_line(check: ParityCheck) -> str:
    mark = {"pass": "pass", "fail": "FAIL", "skipped": "skip"}[check.outcome]
    return f"  {mark}  {check.text:<62} {value_text(check):>10}  {bound_text(check)}"


def _tail(report: ParityReport) -> Iterator[str]:
    scores, vectors = report.compared.scores, report.compared.vectors
    yield f"  {scores.decisions:,} of {scores.rows:,} rows have another most likely class"
    if vectors:
        yield f"  mean cosine of embeddings {vectors.mean_cosine:.7f} over {vectors.rows:,} pairs of texts"
    yield from (f"  note: {note}" for note in report.notes)
