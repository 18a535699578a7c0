"""Sorting, looking up and finding duplicates on disk, against the same in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.stop import StopSignal
from pipeline.embed import carry_over as spill_module
from pipeline.embed.carry_over import HashSpill, RowIndex, build_index, part_and_row
from pipeline.embed.finish import RECORD, find_duplicates

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=60)


@pytest.fixture(autouse=True)
def _many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill_module, "RECORDS_PER_FILE", 10)


@given(blocks=st.lists(HASHES, max_size=4), expected=st.sampled_from([0, 15, 300, 10_000]))
def test_all_records_come_back_in_order(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[list[int]], expected: int
) -> None:
    folder = tmp_path_factory.mktemp("spill") / "files"
    everything: list[tuple[int, int]] = []
    with HashSpill(folder, RECORD, expected) as spill:
        for block in blocks:
            records = np.empty(len(block), dtype=RECORD)
            records["hash"], records["place"] = block, np.arange(len(everything), len(everything) + len(block))
            everything += [(int(one), int(place)) for one, place in records.tolist()]
            spill.add(records)
        assert [row for part in spill.sorted() for row in part.tolist()] == sorted(everything)
    assert not list(folder.iterdir())


def test_two_processes_of_a_machine_sort_in_one_folder(tmp_path: Path) -> None:
    with HashSpill(tmp_path, RECORD, 1) as one:
        with HashSpill(tmp_path, RECORD, 1) as other:
            other.add(np.zeros(2, dtype=RECORD))
        one.add(np.ones(3, dtype=RECORD))
        assert [len(part) for part in one.sorted()] == [3]
    assert not list(tmp_path.iterdir())


def u64(values: list[int]) -> Any:
    return np.array(values, dtype=np.uint64)


@given(
    ids=st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=80),
    cut=st.integers(0, 80),
    asked=st.lists(st.integers(0, 2**64 - 1), max_size=10),
)
def test_the_index_finds_what_was_put_in(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], cut: int, asked: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("index") / "index"
    parts = [ids[:cut], ids[cut:]]
    rows = ((u64(part), u64([n // 3 for n in part])) for part in parts)
    index = RowIndex(build_index(folder, rows, len(ids), StopSignal()))
    assert len(index) == len(ids)
    wanted = [*ids, *asked]
    place, known = index.look_up(u64(wanted), u64([n // 3 for n in wanted]))
    where = {name: (number, row) for number, part in enumerate(parts) for row, name in enumerate(part)}
    for name, found, there in zip(wanted, place, known, strict=True):
        assert there == (name in where)
        assert (tuple(int(x) for x in part_and_row(found)) if found >= 0 else None) == where.get(name)
    other, _ = index.look_up(u64(wanted), u64([n // 3 + 1 for n in wanted]))
    assert (other == -1).all(), "another text"
    anyhow, _ = index.look_up(u64(wanted))
    assert ((anyhow >= 0) == known).all()


def test_an_index_is_made_once(tmp_path: Path) -> None:
    build_index(tmp_path / "index", [(u64([1]), u64([2]))], 1, StopSignal())
    again = build_index(tmp_path / "index", [], 1, StopSignal())
    assert len(RowIndex(again)) == 1


PARTS = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=20), max_size=5)


@given(parts=PARTS, buckets=st.sampled_from([1, 7, 2**60]))
def test_duplicates_are_found_whatever_their_hashes(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]], buckets: int
) -> None:
    """With few different hashes most of those that meet are of different ids."""
    found = find_duplicates(
        [u64([name * 2**57 % buckets for name in part]) for part in parts],
        lambda part, rows: [parts[part][row] for row in rows],
        folder=tmp_path_factory.mktemp("duplicates") / "spill",
        expected=50,
        limit=1000,
        stop=StopSignal(),
    )
    seen: set[int] = set()
    expected: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        rows = [row for row, name in enumerate(part) if name in seen]
        seen |= set(part)
        expected |= {number: rows} if rows else {}
    assert {part: rows.tolist() for part, rows in found.items()} == expected


def test_it_gives_up_when_nearly_all_are_duplicates(tmp_path: Path) -> None:
    parts = [list(range(500))] * 4
    found = find_duplicates(
        [u64([n * 2**54 for n in part]) for part in parts],
        lambda part, rows: rows.tolist(),
        folder=tmp_path / "spill",
        expected=2000,
        limit=30,
        stop=StopSignal(),
    )
    assert 30 < sum(map(len, found.values())) < 1500
