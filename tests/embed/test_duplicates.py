"""Looking up rows of earlier vectors, and ids that are in several parts, against plain dictionaries."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.stop import StopSignal
from pipeline.embed.carry_over import RowIndex, decode_row, open_row_index
from pipeline.embed.parts import find_duplicates


def u64(values: list[int]) -> Any:
    return np.array(values, dtype=np.uint64)


def vectors_of(parts: list[list[int]], hash_of: Callable[[int], int] = lambda name: name) -> Any:
    """Vectors of these ids; the hash of a text is a third of its id."""
    return SimpleNamespace(
        manifest=SimpleNamespace(digest="digest"),
        info=SimpleNamespace(rows=sum(map(len, parts)), parts=parts),
        hashes=lambda part: (u64([hash_of(n) for n in parts[part]]), u64([n // 3 for n in parts[part]])),
        ids_at=lambda part, rows: [parts[part][row] for row in rows],
    )


@given(
    ids=st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=80),
    cut=st.integers(0, 80),
    asked=st.lists(st.integers(0, 2**64 - 1), max_size=10),
)
def test_the_index_finds_what_was_put_in(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], cut: int, asked: list[int]
) -> None:
    parts = [ids[:cut], ids[cut:]]
    index = RowIndex(open_row_index(vectors_of(parts), tmp_path_factory.mktemp("index"), StopSignal()))
    wanted = [*ids, *asked]
    place, known = index.look_up(u64(wanted), u64([n // 3 for n in wanted]))
    where = {name: (number, row) for number, part in enumerate(parts) for row, name in enumerate(part)}
    for name, found, there in zip(wanted, place, known, strict=True):
        assert there == (name in where)
        assert (tuple(int(x) for x in decode_row(found)) if found >= 0 else None) == where.get(name)
    other, _ = index.look_up(u64(wanted), u64([n // 3 + 1 for n in wanted]))
    assert (other == -1).all(), "another text"
    anyhow, _ = index.look_up(u64(wanted))
    assert ((anyhow >= 0) == known).all()


def test_an_index_is_made_once(tmp_path: Path) -> None:
    first = open_row_index(vectors_of([[1]]), tmp_path, StopSignal())
    assert open_row_index(SimpleNamespace(manifest=SimpleNamespace(digest="digest")), tmp_path, StopSignal()) == first  # type: ignore[arg-type]


PARTS = st.lists(st.lists(st.integers(0, 40), unique=True, max_size=20), max_size=5)


@given(parts=PARTS, buckets=st.sampled_from([1, 7, 2**60]))
def test_duplicates_are_found_whatever_their_hashes(parts: list[list[int]], buckets: int) -> None:
    """With few different hashes most of those that meet are of different ids."""
    found = find_duplicates(vectors_of(parts, lambda name: name * 2**57 % buckets), limit=1000, stop=StopSignal())
    seen: set[int] = set()
    expected: dict[int, list[int]] = {}
    for number, part in enumerate(parts):
        rows = [row for row, name in enumerate(part) if name in seen]
        seen |= set(part)
        expected |= {number: rows} if rows else {}
    assert {part: rows.tolist() for part, rows in found.items()} == expected


def test_it_gives_up_when_nearly_all_are_duplicates() -> None:
    found = find_duplicates(vectors_of([list(range(500))] * 4), limit=30, stop=StopSignal())
    assert 30 < sum(map(len, found.values())) < 1500
