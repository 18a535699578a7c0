"""Two sides compared: equal ones pass, each figure fails beyond its bar, and other work is refused."""

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from pipeline.commands.parity import (
    ParityReport,
    RecordedSide,
    SideRecord,
    TrainingCurve,
    ValidationPoint,
    compare_sides,
)
from pipeline.core.errors import ConfigError, DataError
from pipeline.data.shards import Arrays
from pipeline.evaluate.config import ParityConfig

ROWS = 40
RNG = np.random.default_rng(1)
LOGITS = RNG.normal(size=(ROWS, 2)).astype(np.float32)
VECTORS = RNG.normal(size=(20, 8))
VECTORS = (VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)).astype(np.float32)
CONFIG = ParityConfig(max_difference=0.01)


def side(arrays: Arrays | None = None, **record: Any) -> RecordedSide:
    numbers = np.arange(ROWS)
    made: Arrays = {"sample_id": numbers, "query_id": numbers // 4, "label": numbers % 2, "gain": numbers % 2 * 1.0}
    made |= {"logits": LOGITS, "query": VECTORS, "product": VECTORS[::-1].copy(), **(arrays or {})}
    fields: dict[str, Any] = {
        "run": "r",
        "backend": "cpu",
        "precision": "fp32",
        "device": "cpu",
        "checkpoint": "file:///c",
        "digest": "d",
        "identity": {"data.sets": "1", "train.seed": "2"},
        "metric": "accuracy",
        "label_gains": (0.0, 1.0),
        "evaluations": tuple(ValidationPoint(step=step, metric=0.5, loss=0.25) for step in (0, 2)),
        "curve": TrainingCurve(losses=(1.0, 0.5), grad_norms=(2.0, 1.0), samples=("a", "b")),
        "scores": "s",
        "code_version": "v",
        "finished": datetime(2026, 1, 1, tzinfo=UTC),
    }
    return RecordedSide("file:///side", SideRecord(**(fields | record)), made)


def evaluated(metric: float = 0.5, loss: float = 0.25) -> dict[str, Any]:
    last = ValidationPoint(step=2, metric=metric, loss=loss)
    return {"evaluations": (ValidationPoint(step=0, metric=0.5, loss=0.25), last)}


def trained(loss: float = 1.0, norm: float = 2.0) -> dict[str, Any]:
    return {"curve": TrainingCurve(losses=(loss, 0.5), grad_norms=(norm, 1.0), samples=("a", "b"))}


def compare(other: RecordedSide) -> ParityReport:
    report = compare_sides(side(), other, CONFIG)
    assert ParityReport.model_validate_json(report.model_dump_json()).a == "cpu.fp32"
    assert len(report.lines()) > len(report.checks)
    return report


def test_equal_sides_pass() -> None:
    report = compare(side())
    assert not report.failed and {check.outcome for check in report.checks} == {"pass"}
    assert (report.rows, report.decisions, report.value("metric")) == (ROWS, 0, 0.0)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (side(**evaluated(metric=0.506)), {"metric"}),
        (side(**evaluated(metric=math.nan)), {"metric"}),
        (side(**evaluated(metric=0.0)), {"metric"}),
        (side(**evaluated(loss=0.26)), {"holdout_loss"}),
        (side(**evaluated(loss=math.inf)), {"holdout_loss"}),
        (side(**trained(loss=1.001)), {"first_losses"}),
        (side(**trained(norm=2.01)), {"first_gradients"}),
        (side({"logits": LOGITS + np.eye(ROWS, 2, dtype=np.float32) * 1e-3}), {"probability"}),
        (side({"logits": LOGITS * np.nan}), {"probability", "mean_probability", "correlation"}),
        (side({"logits": LOGITS[:, ::-1].copy()}), {"probability", "mean_probability", "correlation"}),
        (side({"product": VECTORS}), {"cosine"}),
        (side({"query": VECTORS * np.nan}), {"cosine"}),
    ],
)
def test_each_figure_beyond_its_bar_fails(other: RecordedSide, names: set[str]) -> None:
    assert {check.name for check in compare(other).failed} >= names


def test_a_reduced_precision_has_wider_bars() -> None:
    moved = {"logits": LOGITS + RNG.normal(0, 0.003, LOGITS.shape).astype(np.float32)}
    assert compare(side(moved)).failed and not compare(side(moved, precision="bf16")).failed


def test_what_does_not_vary_has_no_correlation() -> None:
    flat = {"logits": np.zeros_like(LOGITS)}
    outcomes = {check.name: check.outcome for check in compare_sides(side(flat), side(flat), CONFIG).checks}
    assert outcomes["correlation"] == "skipped"


@pytest.mark.parametrize(
    ("other", "error", "seen"),
    [
        (side(digest="e"), ConfigError, "checkpoint"),
        (side(identity={"data.sets": "1", "train.seed": "3"}), ConfigError, "train.seed"),
        (side(identity={"data.sets": "0", "train.seed": "2"}), DataError, "data.sets"),
        (side({"sample_id": np.arange(1, ROWS + 1)}), DataError, "sample_id"),
        (side(curve=TrainingCurve(losses=(1.0,), grad_norms=(1.0,), samples=("a",))), DataError, "training steps"),
        (
            side(curve=TrainingCurve(losses=(1.0, 1), grad_norms=(1.0, 1), samples=("a", "c"))),
            DataError,
            "training steps",
        ),
    ],
)
def test_other_work_is_refused(other: RecordedSide, error: type[Exception], seen: str) -> None:
    with pytest.raises(error, match=seen):
        compare_sides(side(), other, CONFIG)


def test_too_few_rows_are_noted() -> None:
    assert "one of the 40 holdout rows moves the metric by 5.00%" in compare(side()).note
