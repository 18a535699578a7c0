"""The order of labels found in data: by gains, by a known vocabulary that is named, else refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.shared_prepare import prepare_share
from pipeline.data.survey import LabelCount, LabelSet, Survey, TextSample, decide_labels, known_order
from pipeline.stages.prepare import summary
from tests.real_data import real_file


@pytest.mark.unit
@pytest.mark.parametrize(
    ("labels", "expected", "name"),
    [
        ("E S C I", {"I": 0.0, "C": 0.01, "S": 0.1, "E": 1.0}, "E/S/C/I"),
        ("I E", {"I": 0.0, "E": 1.0}, "E/S/C/I"),
        ("Exact Irrelevant Substitute", {"Irrelevant": 0.0, "Substitute": 0.1, "Exact": 1.0}, "exact/substitute/"),
        ("yes no", {"no": 0.0, "yes": 1.0}, "yes/no"),
        ("Y N", {"N": 0.0, "Y": 1.0}, "yes/no"),
        ("True False", {"False": 0.0, "True": 1.0}, "true/false"),
        ("match non_match", {"non_match": 0.0, "match": 1.0}, "match/non_match"),
        ("match non-match", {"non-match": 0.0, "match": 1.0}, "match/non_match"),
        ("Match NonMatch", {"NonMatch": 0.0, "Match": 1.0}, "match/non_match"),
        ("match", {"match": 1.0}, "match/non_match"),
        ("relevant not_relevant", {"not_relevant": 0.0, "relevant": 1.0}, "highly_relevant/"),
        ("relevant irrelevant highly-relevant", {"irrelevant": 0.0, "relevant": 0.5, "highly-relevant": 1.0}, "highly"),
        ("10 2 0", {"0": 0.0, "2": 0.2, "10": 1.0}, "0 to 10"),
        ("1 5 3.0", {"1": 0.0, "3.0": 0.5, "5": 1.0}, "1 to 5"),
        ("0", {"0": 0.0}, "0 to 0"),
    ],
)
def test_known(labels: str, expected: dict[str, float], name: str) -> None:
    found = known_order(labels.split())
    assert found is not None
    assert list(found[0].items()) == list(expected.items())
    assert found[1].startswith(name)


@pytest.mark.unit
@pytest.mark.parametrize(
    "labels",
    ["hard_negative match random_negative", "yes match", "a b", "0 76", "0 0.5 1", "-1 1", "1 1.0", "Yes yes", "nan 1"],
)
def test_unknown(labels: str) -> None:
    assert known_order(labels.split()) is None


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
    with pytest.raises(DataError, match=r"no row of .* can be read; .* a\.csv, line 3: malformed row: "):
        workplace("one").prepare(config)


@pytest.mark.stage
def test_the_vocabulary_is_named(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    result = workplace("one").prepare(rows(tmp_path, "match|non-match"))
    assert summary(result).endswith("| labels non-match < match (known vocabulary match/non_match)")


@pytest.mark.stage
@pytest.mark.parametrize("gains", ["", "0.0 0.0 0.0", "1 1 1"])
def test_an_order_that_nothing_tells_is_refused(workplace: Callable[[str], Any], tmp_path: Path, gains: str) -> None:
    with pytest.raises(DataError) as caught:
        workplace("one").prepare(rows(tmp_path, "hard_negative|match|random negative", gains))
    assert "random negative (22 rows), match (21 rows), hard_negative (20 rows)" in caught.value.seen
    assert caught.value.next_command.startswith("--data.labels 'random negative,match,hard_negative',")


def decide(counts: dict[str, int]) -> LabelSet:
    seen = Survey({name: LabelCount(rows=rows) for name, rows in counts.items()}, TextSample(1), has_labels=True)
    return decide_labels(DataConfig(), SimpleNamespace(fixed_labels={}), seen)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("counts", "labels"),
    [
        ({"0": 1400, "1": 900, "2": 698, "n/a": 1, "5": 1}, ["0", "1", "2"]),
        ({"match": 2000, "non_match": 998, "mach": 2}, ["non_match", "match"]),
        ({"0": 1000, "1": 1000, "5": 1}, ["0", "1", "5"]),  # all of them are grades
    ],
)
def test_a_rare_label_of_no_known_vocabulary_is_a_bad_row(counts: dict[str, int], labels: list[str]) -> None:
    found = decide(counts)
    assert list(found.gains) == labels
    assert all(name in found.vocabulary for name in counts.keys() - {*labels})


@pytest.mark.unit
@pytest.mark.parametrize(
    ("counts", "command"),
    [
        ({"0": 1400, "1": 900, "2": 698, "n/a": 60}, "--data.labels 0,1,2; the 60 rows with"),
        ({"yes": 10, "no": 9, "?": 1, "-": 1}, "--data.labels no,yes; the 2 rows with"),
        ({"a": 2000, "b": 1}, "--data.labels a,b, put in order"),
        ({"1": 30, "0": 20, "0.5": 10}, "--data.labels 0,0.5,1, if the least"),
        ({"1": 30, "-1": 20, "100": 10}, "--data.labels=-1,1,100, if the least"),
        ({"1": 30, "0": 20, "01": 10}, "--data.labels 0,1; the 10 rows with"),
    ],
)
def test_labels_are_offered_without_what_is_no_grade(counts: dict[str, int], command: str) -> None:
    with pytest.raises(DataError) as caught:
        decide(counts)
    assert caught.value.next_command.startswith(command)


@pytest.mark.stage
def test_the_gain_of_a_bad_row_does_not_order_labels(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    config = rows(tmp_path, "irrelevant|exact", "0 1")
    path = tmp_path / "a.csv"
    path.write_text(path.read_text().replace('"irrelevant",0', '"irrelevant",100', 1))
    result = workplace("one").prepare(config)
    assert (result.labels, result.rows_bad) == (("irrelevant", "exact"), 1)
    assert result.infos[0].label_gains == (0.0, 1.0)


@pytest.mark.stage
@pytest.mark.parametrize("workers", [1, 2])
def test_gains_in_some_files_only_are_refused_unless_labels_say_them(
    workplace: Callable[[str], Any], tmp_path: Path, workers: int
) -> None:
    (tmp_path / "in").mkdir()
    rows(tmp_path / "in", "irrelevant|exact", "0 0.8")
    lines = [f"q{n},t{n},exact\n" for n in range(10)]
    (tmp_path / "in" / "b.csv").write_text("query,title,label\n" + "".join(lines))
    (tmp_path / "in" / "c.csv").write_text("query,title,label\n")
    config = DataConfig(
        path=str(tmp_path / "in"), num_workers=1, workers=workers, tokenizer=TokenizerConfig(vocab_size=256)
    )
    place = workplace("one")

    def prepare(config: DataConfig) -> Any:
        if workers == 1:
            return place.prepare(config)
        scratch, stop = place.folder / "scratch", place.stop
        parts = [
            prepare_share(
                config, place.storage, worker=n, workers=workers, scratch=scratch, events=place.emit, stop=stop
            )
            for n in range(workers)
        ]
        return parts[-1]

    for _ in range(2):  # an array reads the labels of all files the second time
        with pytest.raises(DataError, match=r"^b\.csv has no column 'gain', and others have one"):
            prepare(config)
    result = prepare(config.model_copy(update={"labels": ("irrelevant", "exact")}))
    judged = result.infos[0].judged.values()
    assert sum(split.label_gain_sums[1] for split in judged) == pytest.approx(21 * 0.8 + 10 * 1.0)


@pytest.mark.stage
def test_the_flag_it_names_can_be_given(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    config = rows(tmp_path, "no, thanks|sure")
    with pytest.raises(DataError) as caught:
        workplace("one").prepare(config)
    assert caught.value.next_command.startswith("""--data.labels '["sure", "no, thanks"]',""")


@pytest.mark.stage
def test_real_pairs_without_gains(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    table = pq.read_table(real_file("wdc_lspc_pairs.parquet"), columns=["query", "title", "label", "split"])
    pq.write_table(table.slice(0, 3000), tmp_path / "pairs.parquet")
    config = DataConfig(path=str(tmp_path / "pairs.parquet"), num_workers=1)
    result = workplace("one").prepare(config)
    assert (result.labels, result.vocabulary) == (("non_match", "match"), "match/non_match")
