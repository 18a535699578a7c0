import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.input_files import InputFile
from pipeline.data.shards import map_safetensors
from pipeline.data.sources import NO_PRODUCT, EsciProducts, open_source
from pipeline.data.token_sets import SPLITS, FileRows
from pipeline.io.storage import DiskFull, open_storage

LABELS = "ESCI"


@pytest.fixture
def esci(tmp_path: Path) -> Path:
    """60 examples in two locales, a third of them in Spanish; product P9 is unknown; P1 exists in both locales."""
    folder = tmp_path / "esci"
    folder.mkdir()
    rows = range(60)
    examples = {
        "query": [f"query {i // 4}" for i in rows],
        "query_id": [i // 4 for i in rows],
        "product_id": [f"P{i % 10}" for i in rows],
        "product_locale": ["es" if i % 3 == 0 else "us" for i in rows],
        "esci_label": [LABELS[i % 4] for i in rows],
        "small_version": [i % 2 for i in rows],
        "split": ["test" if i // 4 % 5 == 0 else "train" for i in rows],
    }
    products = {
        "product_id": [f"P{i // 2}" for i in range(18)],
        "product_title": [f"{('us', 'es')[i % 2]} title {i // 2}" for i in range(18)],
        "product_description": ["long " * 300 if i // 2 == 2 else None for i in range(18)],
        "product_bullet_point": [f"point {i // 2}" for i in range(18)],
        "product_brand": ["Brand" if i // 2 % 2 else None for i in range(18)],
        "product_locale": ["us", "es"] * 9,
    }
    pq.write_table(pa.table(examples), folder / "shopping_queries_dataset_examples.parquet")
    pq.write_table(pa.table(products), folder / "shopping_queries_dataset_products.parquet")
    return folder


def test_splits_are_those_of_the_dataset(esci: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has a split column .split., so data\.split_by product has no effect"):
        open_source(DataConfig(path=str(esci), split_by="product"), scratch=tmp_path, stop=StopSignal())


@pytest.mark.stage
def test_join_by_id_and_locale(esci: Path, tmp_path: Path) -> None:
    source = open_source(DataConfig(path=str(esci)), scratch=tmp_path / "scratch", stop=StopSignal())
    (file,) = source.partitions[0].files
    (batch,) = source.read(file)
    ids, titles, texts = (batch.columns[name].to_pylist() for name in ("product_id", "title", "text"))
    for row, product, title, text in zip(batch.rows.tolist(), ids, titles, texts, strict=True):
        locale = "es" if row % 3 == 0 else "us"
        number = product.decode()[1:]
        assert title.decode() == f"{locale} title {number}"
        assert text.decode().startswith(f"Brand point {number}" if int(number) % 2 else f"point {number}")
        assert len(text) <= 4 * 16 * 64
    assert [(bad.row, bad.reason) for bad in batch.bad] == [(row, NO_PRODUCT) for row in range(9, 60, 10)]


@pytest.mark.stage
def test_products_missing_is_one_clear_error(esci: Path, tmp_path: Path) -> None:
    (esci / "shopping_queries_dataset_products.parquet").unlink()
    with pytest.raises(DataError, match="0 product files") as caught:
        open_source(DataConfig(path=str(esci)), scratch=tmp_path, stop=StopSignal())
    assert "shopping_queries_dataset_products.parquet" in caught.value.expected


def opened(folder: Path, scratch: Path) -> EsciProducts:
    storage, key = open_storage(str(folder)), "shopping_queries_dataset_products.parquet"
    return EsciProducts(storage, InputFile(key, "parquet", "content"), scratch / "esci", 4096)


@pytest.mark.stage
def test_processes_of_a_machine_index_the_products_once(
    esci: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plain = list[int](), EsciProducts.write_index

    def slowly(self: EsciProducts, path: Path) -> None:
        made.append(threading.get_ident())
        time.sleep(0.2)
        plain(self, path)

    monkeypatch.setattr(EsciProducts, "write_index", slowly)
    sources = [opened(esci, tmp_path / "scratch") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        all_of = list(pool.map(lambda source: source.index, sources))
    assert len(made) == 1
    assert len(all_of) == 4 and all(source.look_up(b"P9", b"us") is None for source in sources)
    assert all(source.look_up(b"P1", b"us") for source in sources)


@pytest.mark.fault
def test_a_full_disk_while_products_are_indexed(esci: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(path: Path, **options: Any) -> sqlite3.Connection:
        table: sqlite3.Connection = connect(path, **options)
        table.execute("PRAGMA max_page_count = 2")
        return table

    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", small)
        with pytest.raises(DiskFull, match="no space left while writing"):
            opened(esci, tmp_path).look_up(b"P1", b"us")
    assert not list(tmp_path.rglob("products.db"))
    assert opened(esci, tmp_path).look_up(b"P1", b"us") is not None


def config_of(folder: Path, **settings: Any) -> DataConfig:
    return DataConfig(
        path=str(folder),
        num_workers=1,
        max_bad_fraction=0.5,
        tokenizer=TokenizerConfig(vocab_size=300),
        **settings,
    )


@pytest.mark.stage
@pytest.mark.parametrize("locale", ["us", "es", "us|es"])
@pytest.mark.parametrize("wanted", [{}, {"small_version": "1"}])
def test_every_example_is_accounted_for(esci: Path, workplace: Any, locale: str, wanted: dict[str, str]) -> None:
    """Rows of the file = good + bad + those that the filter leaves out."""
    place = workplace("one")
    result = place.prepare(config_of(esci, filter={"product_locale": locale, **wanted}))
    kept = [row for row in range(60) if ("es" if row % 3 == 0 else "us") in locale and (not wanted or row % 2 == 1)]
    no_product = [row for row in kept if row % 10 == 9]
    good = [row for row in kept if row not in no_product]
    (info,) = result.infos
    expected = FileRows(
        file="shopping_queries_dataset_examples.parquet",
        rows=60,
        good=len(good),
        bad=len(no_product),
        filtered=60 - len(good) - len(no_product),
        blank=0,
    )
    assert info.files == (expected,)
    assert (result.labels, info.label_gains) == (("I", "C", "S", "E"), (0.0, 0.01, 0.1, 1.0))
    assert (result.rows, result.rows_bad, result.rows_filtered) == (expected.good, expected.bad, expected.filtered)


@pytest.mark.stage
def test_a_query_is_in_one_split_and_a_test_query_stays_one(esci: Path, workplace: Any) -> None:
    place = workplace("one")
    result = place.prepare(config_of(esci, valid_fraction=0.4, test_fraction=0.4, lexical=False))
    folder = place.folder / "workspace" / result.token_set_prefixes[0]
    ids: dict[str, set[int]] = {split: set() for split in SPLITS}
    for split, shards in result.infos[0].splits.items():
        for arrays in (map_safetensors(folder / shard.file) for shard in shards):
            ids[split] |= {one for name in arrays if name.endswith(".query_id") for one in arrays[name].tolist()}
    all_ids = {hash63(str(number)): number for number in range(15)}
    assert {all_ids[one] for one in ids["test"]} == {0, 5, 10}, "what the dataset says, whatever test_fraction is"
    assert ids["valid"] and not ids["valid"] & ids["train"] and not ids["test"] & (ids["valid"] | ids["train"])
    assert ids["train"] | ids["valid"] | ids["test"] == set(all_ids)


@pytest.mark.stage
@pytest.mark.parametrize(
    "name", ["dt=2026-11-20/part-0.parquet", "more.csv", "old_shopping_queries_dataset_examples.parquet"]
)
def test_rows_that_the_layout_does_not_have_are_refused(esci: Path, tmp_path: Path, name: str) -> None:
    for other in ("shopping_queries_dataset_sources.csv", "README.md", "_SUCCESS"):
        (esci / other).write_text("x")
    source = open_source(config_of(esci), scratch=tmp_path, stop=StopSignal())
    assert set(source.skipped) == {"shopping_queries_dataset_sources.csv", "README.md", "_SUCCESS"}
    (esci / name).parent.mkdir(exist_ok=True)
    (esci / name).write_text("query,title\n")
    with pytest.raises(DataError, match=f"other data files: {name}"):
        open_source(config_of(esci), scratch=tmp_path, stop=StopSignal())
