"""Catalogues that are brought into the workspace first."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError, Preempted
from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data.config import ColumnMapping, DataConfig, SyntheticConfig
from pipeline.embed import planning as gather_module
from pipeline.embed.config import CatalogueConfig
from pipeline.embed.planning import Surroundings, find_catalogue, gather_products
from pipeline.embed.reading import CatalogueReader
from pipeline.io.retry import RetryPolicy
from pipeline.io.storage import open_storage


@pytest.fixture
def around(tmp_path: Path) -> Surroundings:
    workspace = open_storage(str(tmp_path / "workspace"))
    return Surroundings(workspace, tmp_path / "scratch", RetryPolicy(), StopSignal())


def rows(around: Surroundings, config: CatalogueConfig, data: DataConfig | None = None) -> list[tuple[Any, ...]]:
    """(id, title, text) of every row that will be judged."""
    catalogue = find_catalogue(config, data or DataConfig(), around)
    assert catalogue.root == "" and catalogue.id_type == "string"
    with CatalogueReader(catalogue, around.workspace, 1000) as reader:
        batches = [raw.batch() for shard in catalogue.shards(1000) for raw in reader.read(shard)]
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_the_synthetic_catalogue_is_the_default(around: Surroundings) -> None:
    data = DataConfig(synthetic=SyntheticConfig(num_queries=15, num_days=2))
    found = rows(around, CatalogueConfig(), data)
    assert sorted(row[0] for row in found) == sorted(f"p{q}-{n}".encode() for q in range(30) for n in range(12))
    first = gather_products(data, around.workspace, scratch=around.scratch, stop=around.stop)
    assert first.info.rows == 360
    assert gather_products(data, around.workspace, scratch=around.scratch, stop=around.stop) == first


def judgements(folder: Path) -> Path:
    """Two files of judgements in which products come again, with other texts too."""
    folder.mkdir()
    for number in range(2):
        names = [f"p{n % 7}" for n in range(number, 20 + number)]
        table = pa.table(
            {
                "query": [f"q{n}" for n in range(20)],
                "title": [f"{name} of file {number}" for name in names],
                "label": ["x"] * 20,
                "product_id": names,
                "shop": ["1" if n % 2 else "2" for n in range(20)],
            }
        )
        pq.write_table(table, folder / f"{number}.parquet")
    return folder


def test_of_the_rows_of_a_product_the_first_counts(around: Surroundings, tmp_path: Path) -> None:
    data = DataConfig(path=str(judgements(tmp_path / "in")))
    assert rows(around, CatalogueConfig(), data) == [
        (f"p{n}".encode(), f"p{n} of file 0".encode(), None) for n in range(7)
    ]


def test_the_filter_of_the_data_holds(around: Surroundings, tmp_path: Path) -> None:
    data = DataConfig(path=str(judgements(tmp_path / "in")), filter={"shop": "2"})
    assert {row[0] for row in rows(around, CatalogueConfig(), data)} == {f"p{n}".encode() for n in range(7)}
    none = DataConfig(path=str(tmp_path / "in"), filter={"shop": "3"})
    with pytest.raises(DataError, match="no row"):
        rows(around, CatalogueConfig(), none)


def test_products_without_an_id_are_named_by_their_title(around: Surroundings, tmp_path: Path) -> None:
    folder = judgements(tmp_path / "in")
    mapping = ColumnMapping(product_id="product_id", title="title")
    table = pq.read_table(folder / "0.parquet").drop_columns(["product_id"])
    pq.write_table(table, folder / "0.parquet")
    (folder / "1.parquet").unlink()
    found = rows(around, CatalogueConfig(), DataConfig(path=str(folder), columns=mapping))
    assert [row[0] for row in found] == [str(hash63(f"p{n} of file 0")).encode() for n in range(7)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_file_sizes_do_not_matter(
    around: Surroundings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(gather_module, "FILE_ROWS", size)
    lines = [json.dumps({"sku": n, "name": f"phone {n}", "text": "long"}) for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:5], "{broken", *lines[5:]]))
    config = CatalogueConfig(path=str(tmp_path / "rows.jsonl"), id="sku", title="name")
    assert rows(around, config) == [(str(n).encode(), f"phone {n}".encode(), b"long") for n in range(10)]
    catalogue = find_catalogue(config, DataConfig(), around)
    assert catalogue.unreadable == {"malformed row": 1}
    assert [row.content for row in catalogue.unreadable_sample] == ["{broken\n"]


def test_csv_keeps_rows_with_equal_ids_to_be_judged(around: Surroundings, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"product_id,title,shop\n1,phone,a\n1,laptop,a\n2,caf\xe9,a\n3,drill,b\n")
    config = CatalogueConfig(path=str(tmp_path / "rows.csv"), filter={"shop": "a"})
    assert [row[:2] for row in rows(around, config)] == [(b"1", b"phone"), (b"1", b"laptop"), (b"2", b"caf\xe9")]


def test_a_catalogue_that_is_not_there(around: Surroundings, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--embed\.catalogue\.path"):
        find_catalogue(CatalogueConfig(path=str(tmp_path / "none")), DataConfig(), around)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"seen: notes\.txt"):
        find_catalogue(CatalogueConfig(path=str(tmp_path)), DataConfig(), around)


def test_it_may_be_killed_and_run_again(around: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(synthetic=SyntheticConfig(num_queries=10, num_days=3))
    monkeypatch.setattr(gather_module, "FILE_ROWS", 50)
    write = type(around.workspace).write_if_absent
    left = iter([True, True, False])

    def dying(self: Any, *args: Any) -> bool:
        if not next(left):
            raise KeyboardInterrupt
        return bool(write(self, *args))

    monkeypatch.setattr(type(around.workspace), "write_if_absent", dying)
    with pytest.raises(KeyboardInterrupt):
        rows(around, CatalogueConfig(), data)
    monkeypatch.setattr(type(around.workspace), "write_if_absent", write)
    assert len(rows(around, CatalogueConfig(), data)) == 360


def test_a_stop_ends_it(around: Surroundings) -> None:
    around.stop.set("SIGTERM")
    with pytest.raises(Preempted):
        rows(around, CatalogueConfig(), DataConfig(synthetic=SyntheticConfig(num_queries=30)))
