"""Prepared partitions: which of them a run takes as new, and opening them for reading."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from pipeline.core.errors import ConfigError, DataError
from pipeline.data.token_sets import Partition, Selection, open_rows, read_token_sets, select_partitions, spec_of
from pipeline.io.commit import commit_dir
from pipeline.io.storage import Storage, open_storage
from tests.train.rows import write_token_set


def day(number: int, content: str = "") -> Partition:
    date = f"2026-01-{number:02d}"
    return Partition(f"dt={date}", date, content or f"content-{number}")


DAYS = {day(number).name: f"content-{number}" for number in (1, 2)}
FLAT = Partition("flat", "", "a")


@pytest.mark.parametrize(
    ("prepared", "watermark", "trained", "expected"),
    [
        ((day(1), day(2)), None, {}, Selection((day(1), day(2)), (), ())),
        (
            (day(1), day(2, "rewritten"), day(3)),
            "2026-01-02",
            DAYS,
            Selection((day(3),), (day(1), day(2, "rewritten")), (day(2, "rewritten"),)),
        ),
        ((day(1),), "2026-01-02", {}, Selection((), (day(1),), (day(1),))),  # a day that the parent never saw is late
        ((FLAT,), "", {"flat": "a"}, Selection((), (FLAT,), ())),
        ((FLAT,), "", {"flat": "b"}, Selection((FLAT,), (), ())),
        ((day(1), day(2)), "", {"flat": "a"}, Selection((day(1), day(2)), (), ())),
    ],
)
def test_days_after_the_watermark_and_changed_flat_data_are_new(
    prepared: tuple[Partition, ...], watermark: str | None, trained: dict[str, str], expected: Selection
) -> None:
    seen = select_partitions(prepared, parent_watermark=watermark, parent_partitions=trained)
    assert seen == expected
    assert seen.watermark == max(one.watermark for one in prepared)


@given(st.lists(st.integers(1, 28), unique=True), st.none() | st.integers(1, 28))
def test_new_and_old_are_a_split_in_order(days: list[int], watermark: int | None) -> None:
    parts = [day(number) for number in days]
    mark = None if watermark is None else day(watermark).watermark
    seen = select_partitions(parts, parent_watermark=mark, parent_partitions={})
    assert sorted([*seen.new, *seen.old], key=parts.index) == parts
    assert set(seen.late) <= set(seen.old)
    assert [p for p in parts if p in seen.new] == list(seen.new)


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "workspace"))


def commit(workspace: Storage, tmp_path: Path, day: int, *, kind: str = "tokens", **changes: JsonValue) -> str:
    """A partition with 3 + day training rows of bucket 0 and 2 of bucket 1, and no validation rows."""
    folder = tmp_path / f"staging-{day}"
    folder.mkdir()
    partition = f"dt=2026-01-0{day}"
    info = write_token_set(
        folder, {"train": (3 + day, 2)}, partition=partition, fingerprint=f"print-{partition}", first_id=100 * day + 1
    )
    prefix = f"tokens/d/{info.fingerprint}"
    commit_dir(workspace, folder, prefix, kind=kind, fields={**info.model_dump(mode="json"), **changes})
    return prefix


def test_rows_of_all_partitions_in_their_order(workspace: Storage, tmp_path: Path) -> None:
    sets = read_token_sets(workspace, [commit(workspace, tmp_path, day) for day in (2, 1)])
    assert [(s.partition.name, s.partition.watermark) for s in sets] == [
        ("dt=2026-01-02", "2026-01-02"),
        ("dt=2026-01-01", "2026-01-01"),
    ]
    assert open_rows(workspace, sets, "train", tmp_path / "cache").sizes == (5 + 4, 4)
    assert open_rows(workspace, sets, "valid", tmp_path / "cache").sizes == (0, 0)
    path = workspace.local_path(f"{sets[0].prefix}/train.safetensors")
    assert path is not None
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"train\.safetensors has \d+ bytes"):
        open_rows(workspace, sets, "train", tmp_path / "cache")


def test_what_is_not_committed_or_is_of_another_kind_or_version_is_a_data_error(
    workspace: Storage, tmp_path: Path
) -> None:
    gone = commit(workspace, tmp_path, 1)
    workspace.delete([f"{gone}/MANIFEST.json"])
    for prefixes, words in (
        ([gone], "does not contain prepared data"),
        ([commit(workspace, tmp_path, 2, kind="tokenizer")], "does not contain prepared data"),
        ([commit(workspace, tmp_path, 3, surprise=1)], "a different version"),
        (list[str](), "no prepared partition"),
    ):
        with pytest.raises(DataError, match=words):
            read_token_sets(workspace, prefixes)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokenizer_fingerprint", "other"), ("buckets", ["4x6", "8x8"]), ("labels", ["x", "y"]), ("pad_id", 3)],
)
def test_partitions_that_do_not_fit_together_are_named(
    workspace: Storage, tmp_path: Path, name: str, value: JsonValue
) -> None:
    prefixes = [commit(workspace, tmp_path, 1), commit(workspace, tmp_path, 2, **{name: value})]  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"dt=2026-01-02 was prepared with {name}"):
        read_token_sets(workspace, prefixes)


def test_a_partition_that_counts_missing_numbers_gives_a_new_model_its_indicators(
    workspace: Storage, tmp_path: Path
) -> None:
    """Those of earlier versions do not count them, and alone give a model as it was."""
    old, new = commit(workspace, tmp_path, 1), commit(workspace, tmp_path, 2, without_number={"price": 3})
    assert [spec_of(one.info).missing for one in read_token_sets(workspace, [old])] == [()]
    both = read_token_sets(workspace, [old, new])
    assert [spec_of(one.info).missing for one in both] == [("price",), ("price",)]
    assert [one.info.without_number for one in both] == [{"price": 0}, {"price": 3}]
