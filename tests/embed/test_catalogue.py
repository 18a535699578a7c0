"""Catalogues that cannot be used, and shards read in any order of pieces."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.embed.catalogue import Catalogue, CatalogueColumns, RowRange, plan_shards, read_footers, read_shard
from pipeline.io.storage import open_storage
from tests.embed.catalogues import COLUMNS, products, write_catalogue


def look(folder: Path, columns: CatalogueColumns = COLUMNS) -> Catalogue:
    storage = open_storage(str(folder))
    return read_footers(storage, list(storage.list("")), columns)


def table(**columns: Any) -> pa.Table:
    return pa.table({"product_id": ["a"], "title": ["x"], **columns})


@pytest.mark.parametrize(
    ("tables", "columns", "reason"),
    [
        ([table()], CatalogueColumns(id="sku", title="title"), r"no column 'sku' \(for id\)"),
        ([table()], CatalogueColumns(id="product_id", title="name"), r"no column 'name' \(for title\)"),
        ([table()], CatalogueColumns(id="product_id", title="title", text="long"), r"no column 'long' \(for text\)"),
        ([table()], COLUMNS.model_copy(update={"filter": {"shop": "1"}}), r"no column 'shop' \(for filter\.shop\)"),
        ([table(product_id=[1.5])], COLUMNS, "the id column 'product_id' of .* has type double"),
        ([table(product_id=[["a"]])], COLUMNS, "the id column 'product_id' of .* has type list"),
        ([table(title=[[1]])], COLUMNS, "column 'title' is list"),
        ([table(), table(product_id=[7])], COLUMNS, "are string in file-0.parquet and int64 in file-1.parquet"),
        ([table().slice(1)], COLUMNS, "has 1 files but no rows"),
    ],
)
def test_a_catalogue_that_cannot_be_used(
    tmp_path: Path, tables: list[pa.Table], columns: CatalogueColumns, reason: str
) -> None:
    write_catalogue(tmp_path, tables)
    with pytest.raises(DataError, match=reason):
        look(tmp_path, columns)


@pytest.mark.parametrize("cut", [0, 4, 200])
def test_a_broken_file(tmp_path: Path, cut: int) -> None:
    path = write_catalogue(tmp_path, [products(range(100))]) / "file-0.parquet"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"file-0\.parquet (cannot be read as parquet|is truncated)"):
        look(tmp_path)


def test_a_row_group_that_is_damaged(tmp_path: Path) -> None:
    path = write_catalogue(tmp_path, [products(range(100))]) / "file-0.parquet"
    found, data = look(tmp_path), bytearray(path.read_bytes())
    data[4:60] = bytes(56)
    path.write_bytes(data)
    again = look(tmp_path)  # the footer is fine
    assert again.files[0].groups == found.files[0].groups
    with pytest.raises(DataError, match="as parquet"):
        list(read_shard(again, open_storage(str(tmp_path)), again.shards(1000)[0], 50))


def test_whole_row_groups_stay_together_and_large_ones_are_cut_evenly() -> None:
    assert [shard.ranges for shard in plan_shards([[40, 0, 40], [250], [5]], 100)] == [
        (RowRange(0, 0, 0, 40), RowRange(0, 2, 0, 40)),
        (RowRange(1, 0, 0, 83),),
        (RowRange(1, 0, 83, 83),),
        (RowRange(1, 0, 166, 84), RowRange(2, 0, 0, 5)),
    ]


GROUPS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=3)


@given(groups=GROUPS, limit=st.integers(1, 50), window=st.integers(1, 30), skip=st.integers(0, 3))
def test_shards_hold_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], limit: int, window: int, skip: int
) -> None:
    """They are in order, and as full as they can be."""
    folder, total = tmp_path_factory.mktemp("catalogue"), 0
    for number, sizes in enumerate(groups):
        with pq.ParquetWriter(folder / f"file-{number}.parquet", products([0]).schema) as writer:
            for size in sizes:
                writer.write_table(products(range(total, total + size)), row_group_size=size)
                total += size
    found = look(folder)
    assert [list(file.groups) for file in found.files] == groups and found.rows == total
    shards = found.shards(limit)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(0 < shard.rows <= limit for shard in shards)
    assert all(left.rows + right.ranges[0].rows > limit for left, right in pairwise(shards))
    seen = []
    for shard in shards[skip:]:
        for raw in read_shard(found, open_storage(str(folder)), shard, window):
            batch = raw.batch()
            assert len(batch) <= window
            seen += [(raw.file, raw.first_row + row, name) for row, name in enumerate(batch["id"].to_pylist())]
    first = sum(shard.rows for shard in shards[:skip])
    assert [name for _, _, name in seen] == [f"p{number}".encode() for number in range(first, total)]
    starts = {file.key: sum(sum(f.groups) for f in found.files[:place]) for place, file in enumerate(found.files)}
    assert all(f"p{starts[file] + row}".encode() == name for file, row, name in seen)
