"""Catalogues that are brought into the workspace first."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.context import StageContext, open_context
from pipeline.core.errors import DataError, TransientError
from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, SyntheticConfig
from pipeline.data.input_files import Files
from pipeline.embed import plan as plan_module
from pipeline.embed.catalogue import Catalogue, read_shard
from pipeline.embed.config import CatalogueConfig
from pipeline.embed.plan import find_catalogue, gather_products
from pipeline.io.storage import open_storage
from pipeline.model.config import Attribute
from pipeline.settings import Settings
from tests.kit.killing import killed_at


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


def judgements(folder: Path, number: int = 0, **columns: Any) -> Path:
    """A file of judgements in which products come again, with other texts too."""
    folder.mkdir(exist_ok=True)
    names = [f"p{n % 7}" for n in range(number, 20 + number)]
    table: dict[str, Any] = {"product_id": names, "title": [f"{name} of file {number}" for name in names]}
    table |= {"shop": ["1" if n % 2 else "2" for n in range(20)]} | columns
    count = len(table["title"])
    table |= {"query": [f"q{n}" for n in range(count)], "label": ["x"] * count}
    kept = {name: values for name, values in table.items() if values is not None and len(values) == count}
    pq.write_table(pa.table(kept), folder / f"{number}.parquet")
    return folder


def of_data(ctx: StageContext, folder: Path, **settings: Any) -> list[tuple[Any, ...]]:
    return rows(ctx, CatalogueConfig(), DataConfig(path=str(folder), **settings))


def test_the_synthetic_catalogue_is_the_default(ctx: StageContext) -> None:
    data = DataConfig(synthetic=SyntheticConfig(num_queries=15, num_days=2))
    found = rows(ctx, CatalogueConfig(), data)
    assert sorted(row[0] for row in found) == sorted(f"p{q}-{n}".encode() for q in range(30) for n in range(12))
    first = gather_products(data, ctx.workspace, scratch=ctx.scratch, stop=ctx.stop)
    assert first[1].rows == 360
    assert gather_products(data, ctx.workspace, scratch=ctx.scratch, stop=ctx.stop) == first


def test_of_the_rows_of_a_product_the_first_counts(ctx: StageContext, tmp_path: Path) -> None:
    folder = judgements(judgements(tmp_path / "in"), 1)
    assert of_data(ctx, folder) == [(f"p{n}".encode(), f"p{n} of file 0".encode(), None) for n in range(7)]
    assert {row[0] for row in of_data(ctx, folder, filter={"shop": "2"})} == {f"p{n}".encode() for n in range(7)}
    with pytest.raises(DataError, match="no row"):
        of_data(ctx, folder, filter={"shop": "3"})


BRAND = Attribute(name="shop", query="", product="shop", kind="text")
SIZE = Attribute(name="size", query="", product="size", kind="text")


def test_attributes_are_appended_to_titles(ctx: StageContext, tmp_path: Path) -> None:
    found = of_data(ctx, judgements(tmp_path / "in"), attributes=(BRAND,))
    assert found[:2] == [(b"p0", b"p0 of file 0 2", None), (b"p1", b"p1 of file 0 1", None)]
    assert of_data(ctx, tmp_path / "in")[0] == (b"p0", b"p0 of file 0", None), "another catalogue"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_attributes_that_a_catalogue_file_lacks_are_left_out_with_a_warning(
    ctx: StageContext, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings = list[str]()
    monkeypatch.setattr(ctx.console, "warn", warnings.append)
    table, path = pa.table({"product_id": ["a", "b"], "title": ["lamp", ""], "shop": ["x", "y"]}), tmp_path / suffix
    path.mkdir()
    (path / "1.csv").write_text("product_id,title,shop\na,lamp,x\nb,,y\n")
    if suffix == "parquet":
        (path / "1.csv").unlink()
        pq.write_table(table, path / "1.parquet")
    config = CatalogueConfig(path=str(path))
    catalogue = find_catalogue(config, DataConfig(attributes=(BRAND, SIZE)), ctx)
    assert len(warnings) == 1 and "no column 'size'" in warnings[0]
    storage = ctx.workspace if suffix == "csv" else open_storage(str(path))
    (raw,) = read_shard(catalogue, storage, catalogue.shards(10)[0], 10)
    assert [title or b"" for title in raw.batch()["title"].to_pylist()] == [b"lamp x", b""]
    plain = find_catalogue(config, DataConfig(), ctx)
    assert plain.digest != catalogue.digest and len(warnings) == 1
    assert '"attributes":' not in plain.model_dump_json() and Catalogue.model_validate_json(plain.model_dump_json())


def test_products_without_an_id(ctx: StageContext, tmp_path: Path) -> None:
    """Without the column they are named by their title; rows without a value are kept to be judged."""
    found = of_data(ctx, judgements(tmp_path / "in", product_id=None))
    assert [row[0] for row in found] == [str(hash63(f"p{n} of file 0")).encode() for n in range(7)]
    titles, names = ["lamp", "lamp", "desk", "desk", "desk"], [None, None, "", "p1", "p1"]
    found = of_data(ctx, judgements(tmp_path / "gaps", product_id=names, title=titles))
    expected = [(None, b"lamp"), (None, b"lamp"), (None, b"desk"), (b"p1", b"desk")]
    assert [(row[0] or None, row[1]) for row in found] == expected


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


def test_other_files_are_named(ctx: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(ctx.console, "info", lines.append)
    config = CatalogueConfig(path=str(tmp_path / "in"))
    with pytest.raises(DataError, match=r"--embed\.catalogue\.path"):
        find_catalogue(config, DataConfig(), ctx)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"have no known suffix: notes\.txt"):
        find_catalogue(config, DataConfig(), ctx)
    (tmp_path / "in" / "notes.txt").rename(tmp_path / "in" / "README.md")
    pq.write_table(pa.table({"product_id": ["a"], "title": ["lamp"]}), tmp_path / "in" / "rows.parquet")
    find_catalogue(config, DataConfig(), ctx)
    assert lines == ["embed: 1 other file(s) were not read: README.md"]


def test_a_product_without_a_text_is_replaced_by_a_later_row(ctx: StageContext, tmp_path: Path) -> None:
    titles, names = ["", "blue", "red", "pink"], ["p1", "p2", "p1", "p1"]
    found = of_data(ctx, judgements(tmp_path / "in", product_id=names, title=titles))
    assert [row[:2] for row in found] == [(b"p1", b""), (b"p2", b"blue"), (b"p1", b"red")]


def test_a_file_that_changes_while_it_is_read_is_refused(
    ctx: StageContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "rows.csv", Files.read

    def changed(files: Files, *given: Any) -> Any:
        path.write_text("product_id,title\n1,phone\n")
        return read(files, *given)

    config = CatalogueConfig(path=str(path))
    path.write_text("product_id,title\n1,phone\n2,desk\n")
    with monkeypatch.context() as patched, pytest.raises(TransientError, match="changed while it was being read"):
        patched.setattr(Files, "read", changed)
        rows(ctx, config)
    path.write_text("product_id,title\n1,phone\n2,desk\n")
    assert len(rows(ctx, config)) == 2


def test_it_may_be_killed_and_run_again(ctx: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(synthetic=SyntheticConfig(num_queries=10, num_days=3))
    monkeypatch.setattr(plan_module, "FILE_ROWS", 100)
    number = 1
    while killed_at(number, lambda: rows(ctx, CatalogueConfig(), data)) < 0:
        number += 4
    assert number > 8
    assert len(rows(ctx, CatalogueConfig(), data)) == 360


def test_files_that_are_there_stay_unless_they_hold_something_else(ctx: StageContext, tmp_path: Path) -> None:
    """The plan of another cycle names them by their etag, in which the modification time may count."""
    source = judgements(tmp_path / "in")
    of_data(ctx, source)
    folder = next((tmp_path / "workspace" / "catalogues").iterdir())
    (path,) = folder.glob("*.parquet")
    before = path.stat().st_mtime_ns
    (folder / "MANIFEST.json").unlink()
    of_data(ctx, source)
    assert path.stat().st_mtime_ns == before
    (folder / "MANIFEST.json").unlink()
    pq.write_table(pa.table({"id": ["of another version"]}), path)
    assert len(of_data(ctx, source)) == 7
