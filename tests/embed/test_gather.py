"""Catalogues that are brought into the workspace first."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.context import StageContext, open_context
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data.config import ColumnMapping, DataConfig, SyntheticConfig
from pipeline.embed import plan as plan_module
from pipeline.embed.catalogue import read_shard
from pipeline.embed.config import CatalogueConfig
from pipeline.embed.plan import find_catalogue, gather_products
from pipeline.settings import Settings


@pytest.fixture
def ctx(tmp_path: Path) -> Iterator[StageContext]:
    settings = Settings(workspace=str(tmp_path / "workspace"), scratch=str(tmp_path / "scratch"))
    with open_context(settings, StopSignal(), {}) as made:
        yield made


def rows(ctx: StageContext, config: CatalogueConfig, data: DataConfig | None = None) -> list[tuple[Any, ...]]:
    """(id, title, text) of every row that will be judged."""
    catalogue = find_catalogue(config, data or DataConfig(), ctx)
    assert catalogue.root == "" and catalogue.id_type == "string"
    shards = catalogue.shards(1000)
    batches = [raw.batch() for shard in shards for raw in read_shard(catalogue, ctx.workspace, shard, 1000)]
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def test_the_synthetic_catalogue_is_the_default(ctx: StageContext) -> None:
    data = DataConfig(synthetic=SyntheticConfig(num_queries=15, num_days=2))
    found = rows(ctx, CatalogueConfig(), data)
    assert sorted(row[0] for row in found) == sorted(f"p{q}-{n}".encode() for q in range(30) for n in range(12))
    first = gather_products(data, ctx.workspace, scratch=ctx.scratch, stop=ctx.stop)
    assert first[1].rows == 360
    assert gather_products(data, ctx.workspace, scratch=ctx.scratch, stop=ctx.stop) == first


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


def test_of_the_rows_of_a_product_the_first_counts(ctx: StageContext, tmp_path: Path) -> None:
    data = DataConfig(path=str(judgements(tmp_path / "in")))
    assert rows(ctx, CatalogueConfig(), data) == [
        (f"p{n}".encode(), f"p{n} of file 0".encode(), None) for n in range(7)
    ]


def test_the_filter_of_the_data_holds(ctx: StageContext, tmp_path: Path) -> None:
    data = DataConfig(path=str(judgements(tmp_path / "in")), filter={"shop": "2"})
    assert {row[0] for row in rows(ctx, CatalogueConfig(), data)} == {f"p{n}".encode() for n in range(7)}
    none = DataConfig(path=str(tmp_path / "in"), filter={"shop": "3"})
    with pytest.raises(DataError, match="no row"):
        rows(ctx, CatalogueConfig(), none)


def test_products_without_an_id_are_named_by_their_title(ctx: StageContext, tmp_path: Path) -> None:
    folder = judgements(tmp_path / "in")
    mapping = ColumnMapping(product_id="product_id", title="title")
    table = pq.read_table(folder / "0.parquet").drop_columns(["product_id"])
    pq.write_table(table, folder / "0.parquet")
    (folder / "1.parquet").unlink()
    found = rows(ctx, CatalogueConfig(), DataConfig(path=str(folder), columns=mapping))
    assert [row[0] for row in found] == [str(hash63(f"p{n} of file 0")).encode() for n in range(7)]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_file_sizes_do_not_matter(
    ctx: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(plan_module, "FILE_ROWS", size)
    lines = [json.dumps({"sku": n, "name": f"phone {n}", "text": "long"}) for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:5], "{broken", *lines[5:]]))
    config = CatalogueConfig(path=str(tmp_path / "rows.jsonl"), id="sku", title="name")
    assert rows(ctx, config) == [(str(n).encode(), f"phone {n}".encode(), b"long") for n in range(10)]
    catalogue = find_catalogue(config, DataConfig(), ctx)
    assert catalogue.unreadable == {"malformed row: not a JSON object": 1}
    assert [row.content for row in catalogue.unreadable_sample] == ["{broken\n"]


def test_csv_keeps_rows_with_equal_ids_to_be_judged(ctx: StageContext, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"product_id,title,shop\n1,phone,a\n1,laptop,a\n2,caf\xe9,a\n3,drill,b\n")
    config = CatalogueConfig(path=str(tmp_path / "rows.csv"), filter={"shop": "a"})
    assert [row[:2] for row in rows(ctx, config)] == [(b"1", b"phone"), (b"1", b"laptop"), (b"2", b"caf\xe9")]


def test_a_catalogue_that_is_not_there(ctx: StageContext, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"--embed\.catalogue\.path"):
        find_catalogue(CatalogueConfig(path=str(tmp_path / "none")), DataConfig(), ctx)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"have no suffix .*: notes\.txt"):
        find_catalogue(CatalogueConfig(path=str(tmp_path / "in")), DataConfig(), ctx)


def test_it_may_be_killed_and_run_again(ctx: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(synthetic=SyntheticConfig(num_queries=10, num_days=3))
    monkeypatch.setattr(plan_module, "FILE_ROWS", 50)
    write = type(ctx.workspace).write_if_absent
    left = iter([True, True, False])

    def dying(self: Any, *args: Any) -> bool:
        if not next(left):
            raise KeyboardInterrupt
        return bool(write(self, *args))

    monkeypatch.setattr(type(ctx.workspace), "write_if_absent", dying)
    with pytest.raises(KeyboardInterrupt):
        rows(ctx, CatalogueConfig(), data)
    monkeypatch.setattr(type(ctx.workspace), "write_if_absent", write)
    assert len(rows(ctx, CatalogueConfig(), data)) == 360


def files_of(ctx: StageContext) -> dict[str, tuple[int, int]]:
    """Rows and modification time of each file of the one gathered catalogue."""
    folder = next((Path(ctx.workspace.local_path("") or "") / "catalogues").iterdir())
    paths = sorted(folder.glob("*.parquet"))
    return {path.name: (pq.read_metadata(path).num_rows, path.stat().st_mtime_ns) for path in paths}


def test_files_that_are_there_stay_unless_they_hold_something_else(ctx: StageContext, tmp_path: Path) -> None:
    """The plan of another cycle names them by their etag, in which the modification time may count."""
    data = DataConfig(path=str(judgements(tmp_path / "in")))
    rows(ctx, CatalogueConfig(), data)
    before = files_of(ctx)
    folder = next((Path(ctx.workspace.local_path("") or "") / "catalogues").iterdir())
    (folder / "MANIFEST.json").unlink()
    rows(ctx, CatalogueConfig(), data)
    assert files_of(ctx) == before
    (folder / "MANIFEST.json").unlink()
    pq.write_table(pa.table({"id": ["of another version"]}), folder / "part-00000.parquet")
    assert len(rows(ctx, CatalogueConfig(), data)) == before["part-00000.parquet"][0] == 7


def test_judgements_without_a_product_id_are_kept_to_be_judged(ctx: StageContext, tmp_path: Path) -> None:
    table = pa.table(
        {
            "query": ["q"] * 5,
            "title": ["lamp", "lamp", "desk", "desk", "desk"],
            "label": ["x"] * 5,
            "product_id": [None, None, "", "p1", "p1"],
        }
    )
    (tmp_path / "in").mkdir()
    pq.write_table(table, tmp_path / "in" / "0.parquet")
    found = rows(ctx, CatalogueConfig(), DataConfig(path=str(tmp_path / "in")))
    assert [(row[0] or None, row[1]) for row in found] == [
        (None, b"lamp"),
        (None, b"lamp"),
        (None, b"desk"),
        (b"p1", b"desk"),
    ]


def test_other_files_beside_the_catalogue_are_named(
    ctx: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(ctx.console, "info", lines.append)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"product_id": ["a"], "title": ["lamp"]}), tmp_path / "in" / "rows.parquet")
    find_catalogue(CatalogueConfig(path=str(tmp_path / "in")), DataConfig(), ctx)
    assert lines == []
    (tmp_path / "in" / "README.md").write_text("hello")
    find_catalogue(CatalogueConfig(path=str(tmp_path / "in")), DataConfig(), ctx)
    assert lines == ["embed: 1 other file(s) were not read: README.md"]
