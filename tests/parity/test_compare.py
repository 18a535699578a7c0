"""Only sides of the same work are compared; the report says what a reader must know."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pipeline.core.errors import ConfigError, DataError, TrnpipeError
from pipeline.evaluate.config import ParityConfig
from pipeline.parity.compare import ParityReport, RecordedSide, compare_sides, compare_vectors, lines_of, plot_svg
from tests.parity.case import Case

pytestmark = pytest.mark.stage


@pytest.fixture(scope="module")
def side(case: Case) -> RecordedSide:
    return case.side(case.task())


def with_identity(side: RecordedSide, **parts: str) -> RecordedSide:
    identity = side.record.identity | {name.replace("__", "."): value for name, value in parts.items()}
    return replace(side, record=side.record.model_copy(update={"identity": identity}))


def with_scores(side: RecordedSide, **changes: object) -> RecordedSide:
    return replace(side, scores=replace(side.scores, **changes))  # type: ignore[arg-type]


def fewer_rows(side: RecordedSide) -> RecordedSide:
    names = ("sample_id", "query_id", "label", "gain", "logits")
    return with_scores(side, **{name: getattr(side.scores, name)[1:] for name in names})


def other_vectors(side: RecordedSide) -> RecordedSide:
    assert side.scores.vectors is not None
    return with_scores(side, vectors=replace(side.scores.vectors, sample_id=side.scores.vectors.sample_id + 1))


@pytest.mark.parametrize(
    ("change", "family", "words"),
    [
        (
            lambda side: replace(side, record=side.record.model_copy(update={"digest": "0" * 64})),
            ConfigError,
            "of other checkpoints: .* and .*000000000000",
        ),
        (lambda side: with_identity(side, train__seed="x"), ConfigError, r"with other train\.seed"),
        (
            lambda side: with_identity(side, train__max_steps="x", model__new="y"),
            ConfigError,
            r"model\.new, train\.max",
        ),
        (lambda side: with_identity(side, data__new="x"), DataError, r"with other data\.new"),
        (fewer_rows, DataError, "sample_id of the holdout: 80 and 79 rows"),
        (lambda side: with_scores(side, label=1 - side.scores.label), DataError, "label of the holdout: row 0 is"),
        (other_vectors, DataError, "rows with embeddings: row 0"),
    ],
)
def test_sides_of_other_work_are_refused_by_name(
    side: RecordedSide, change: Callable[[RecordedSide], RecordedSide], family: type[TrnpipeError], words: str
) -> None:
    with pytest.raises(family, match=words) as caught:
        compare_sides(side, change(side), ParityConfig())
    assert caught.value.expected
    assert caught.value.next_command


def test_notes_tell_of_a_small_holdout_and_of_other_code(side: RecordedSide) -> None:
    other = replace(side, record=side.record.model_copy(update={"code_version": "later"}))
    notes = compare_sides(side, other, ParityConfig()).notes
    assert "one of the 80 holdout rows is" in notes[0]
    assert "too few rows to tell a difference of 0.10%" in notes[0]
    assert notes[1].endswith("and later")
    assert notes[2].startswith("not judged: overlap of rankings")
    assert "one of the" not in " ".join(compare_sides(side, side, ParityConfig(max_difference=0.5)).notes)


def nan_scores(side: RecordedSide) -> RecordedSide:
    logits = side.scores.logits.copy()
    logits[5] = np.nan
    return with_scores(side, logits=logits)


def test_scores_that_are_no_numbers_fail(side: RecordedSide) -> None:
    for a, b in ((side, nan_scores(side)), (nan_scores(side), nan_scores(side))):
        report = compare_sides(a, b, ParityConfig())
        assert not report.passed
        assert "FAIL" in "\n".join(lines_of(report))
        assert ParityReport.model_validate_json(report.model_dump_json()).passed is False


def test_the_table_shows_every_evaluation_and_every_bar(side: RecordedSide) -> None:
    report = compare_sides(side, side, ParityConfig())
    text = "\n".join(lines_of(report))
    for pair in report.compared.evaluations:
        assert f"{pair.a:.6f}" in text
    for check in report.checks:
        assert check.text in text
    assert "0 of 80 rows have another most likely class" in text
    assert text.count("skip") == 1


def test_the_picture_is_the_same_for_the_same_figures(side: RecordedSide) -> None:
    pytest.importorskip("matplotlib")
    report = compare_sides(side, nan_scores(side), ParityConfig())
    curve = side.record.curve
    odd = curve.model_copy(update={"losses": (float("nan"), float("inf"), *curve.losses[2:])})
    first = plot_svg(report, curve, odd)
    assert first == plot_svg(report, curve, odd)
    assert first is not None and first.startswith(b"<?xml")
    assert b"FAIL" not in (plot_svg(compare_sides(side, side, ParityConfig()), curve, curve) or b"FAIL")


def test_few_vectors_have_no_neighbours_in_common() -> None:
    values = np.eye(8, dtype=np.float32)
    found = compare_vectors((values, values), (values, values))
    assert (found.rows, found.min_cosine, found.overlap) == (8, 1.0, None)
