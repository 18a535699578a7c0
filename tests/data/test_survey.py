"""A look at the input first: a sample of its texts, and its labels in order, by gains or known names, else refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.data import survey
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.survey import LabelCount, Survey, TextSample, decide_labels, infer_gains


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ("E S C I", {"I": 0.0, "C": 0.01, "S": 0.1, "E": 1.0}),
        ("Exact Irrelevant Substitute", {"Irrelevant": 0.0, "Substitute": 0.1, "Exact": 1.0}),
        ("yes no", {"no": 0.0, "yes": 1.0}),
        ("True False", {"False": 0.0, "True": 1.0}),
        ("match", {"match": 1.0}),
        ("10 2 0", {"0": 0.0, "2": 0.2, "10": 1.0}),
        ("1 5 3.0", {"1": 0.0, "3.0": 0.5, "5": 1.0}),
        ("match non_match", {"non_match": 0.0, "match": 1.0}),
        ("0", {"0": 0.0}),
        *((labels, {}) for labels in ("yes match", "a b", "0 76", "0 0.5 1", "-1 1", "1 1.0", "Yes yes", "nan 1")),
    ],
)
def test_known_orders(labels: str, expected: dict[str, float]) -> None:
    assert list((infer_gains(labels.split()) or {}).items()) == list(expected.items())


@pytest.mark.parametrize(
    ("labels", "command"),
    [
        ("hard|match|random negative", "in order of relevance: hard,match,random negative"),
        ("no, thanks|sure", 'in order of relevance: ["no, thanks", "sure"]'),
    ],
)
def test_an_unknown_order_is_refused_with_the_labels_to_order(labels: str, command: str) -> None:
    seen = Survey(labels={name: LabelCount(rows=9) for name in labels.split("|")}, has_labels=True, has_rows=True)
    with pytest.raises(DataError) as caught:
        decide_labels(DataConfig(), {}, seen)
    assert caught.value.next_command.endswith(command)


def test_rare_labels_that_look_like_mistakes_are_not_put_in_order() -> None:
    """Nobody is taught to keep `n/a` among the grades."""
    counts = {"2": 900, "0": 1000, "n/a": 1, "1": 900, "5": 1}
    labels = {name: LabelCount(rows=rows) for name, rows in counts.items()}
    with pytest.raises(DataError) as caught:
        decide_labels(DataConfig(), {}, Survey(labels=labels, has_labels=True, has_rows=True))
    assert caught.value.next_command.startswith("--data.labels=0,1,2 (rows with other labels")


def rows(folder: Path, labels: str, gains: str = "") -> DataConfig:
    """Twenty rows for each label, more of the later ones."""
    lines = ["query,title,label" + (",gain" if gains else "")]
    for place, label in enumerate(labels.split("|")):
        ends = f",{gains.split()[place]}" if gains else ""
        lines += [f'q{n},t{n},"{label}"{ends}' for n in range(20 + place)]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")
    return DataConfig(path=str(folder / "a.csv"), num_workers=1, tokenizer=TokenizerConfig(vocab_size=256))


@pytest.mark.stage
@pytest.mark.parametrize("row", ["q,t,yes,", '"q,t,yes'])
def test_rows_of_which_none_can_be_read_are_said_to_be_so(
    workplace: Callable[[str], Any], tmp_path: Path, row: str
) -> None:
    config = rows(tmp_path, "")
    (tmp_path / "a.csv").write_text(f"query,title,label\n\n{row}\n")
    with pytest.raises(DataError, match=r"a\.csv, line 3: malformed row: "):
        workplace("one").prepare(config)


@pytest.mark.stage
def test_the_gain_of_a_bad_row_does_not_order_labels(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    config = rows(tmp_path, "irrelevant|exact", "0 1")
    path = tmp_path / "a.csv"
    path.write_text(path.read_text().replace('"irrelevant",0', '"irrelevant",100', 1))
    result = workplace("one").prepare(config)
    assert (result.labels, result.rows_bad) == (("irrelevant", "exact"), 1)
    assert result.infos[0].label_gains == (0.0, 1.0)


@pytest.mark.stage
def test_gains_in_some_files_only_are_refused_unless_labels_say_them(
    workplace: Callable[[str], Any], tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    config = rows(tmp_path / "in", "irrelevant|exact", "0 0.8").model_copy(update={"path": str(tmp_path / "in")})
    lines = [f"q{n},t{n},exact\n" for n in range(10)]
    (tmp_path / "in" / "b.csv").write_text("query,title,label\n" + "".join(lines))
    (tmp_path / "in" / "c.csv").write_text("query,title,label\n")
    place = workplace("one")
    with pytest.raises(DataError, match=r"^b\.csv has no column 'gain', but other files have one"):
        place.prepare(config)
    result = place.prepare(config.model_copy(update={"labels": ("irrelevant", "exact")}))
    judged = result.infos[0].judged.values()
    assert sum(split.label_gain_sums[1] for split in judged) == pytest.approx(21 * 0.8 + 10 * 1.0)


def batch(first: int, size: int) -> pa.RecordBatch:
    values = pa.array([f"row {row}".encode() for row in range(first, first + size)], pa.large_binary())
    return pa.RecordBatch.from_arrays([values], names=["query"])


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 30))
def test_sample_is_bounded_and_evenly_spread(sizes: list[int], limit: int) -> None:
    sample, first = TextSample(limit), 0
    for size in sizes:
        sample.add(batch(first, size), 100)
        first += size
    assert len(sample.rows) <= limit
    assert list(sample.texts()) == [f"row {row}" for row in range(0, first, sample.stride)]
    assert sample.stride == 1 or len(sample.rows) * 2 >= limit - 1, "no sparser than it must be"


def test_sample_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "SAMPLE_BYTES", 100)
    sample = TextSample(10_000)
    for first in range(0, 500, 50):
        sample.add(batch(first, 50), 5)
    assert sum(map(len, sample.texts())) == sample.num_bytes <= 100
    assert next(sample.texts()) == "row 0"
