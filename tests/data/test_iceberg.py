"""An Iceberg table as input: each append is a partition, and anything else that was done to the table is refused."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.core.errors import ConfigError, DataError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.sources import list_input_objects, open_source
from pipeline.data.token_sets import Partition, select_partitions
from pipeline.telemetry.events import EventName
from tests.data.conftest import Workplace

PATH = "iceberg://shop/search.judgements"
LABELS = ("irrelevant", "substitute", "exact")


def rows(first: int, count: int = 60) -> pa.Table:
    """Rows of queries that no other part of the table has."""
    queries = [f"red shoes {first + i // 3}" for i in range(count)]
    titles = [f"Acme shoe {first + i} red" for i in range(count)]
    return pa.table({"query": queries, "title": titles, "label": [LABELS[i % 3] for i in range(count)]})


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A table with two appends, in a catalogue in SQLite."""
    catalogs = pytest.importorskip("pyiceberg.catalog")
    pytest.importorskip("sqlalchemy")
    (tmp_path / "lake").mkdir()
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__URI", f"sqlite:///{tmp_path}/catalogue.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__SHOP__WAREHOUSE", f"file://{tmp_path}/lake")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", type(catalogs._ENV_CONFIG)())  # it was read when imported
    catalog = catalogs.load_catalog("shop")
    catalog.create_namespace("search")
    made = catalog.create_table("search.judgements", schema=rows(0).schema)
    made.append(rows(0))
    made.append(rows(100))
    return made


def source_of(path: str = PATH) -> Any:
    return open_source(DataConfig(path=path, labels=LABELS), scratch=Path(), stop=StopSignal())


def queries(source: Any, partition: Any) -> list[bytes]:
    return [
        query
        for file in partition.files
        for batch in source.read(file, ["query"])
        for query in batch.columns["query"].to_pylist()
    ]


def test_each_append_is_a_partition(table: Any) -> None:
    source = source_of()
    ids = [snapshot.snapshot_id for snapshot in table.snapshots()]
    assert [part.name.rpartition("-")[2] for part in source.partitions] == [str(each) for each in ids]
    assert [part.name for part in source.partitions] == sorted(part.name for part in source.partitions)
    for part, first in zip(source.partitions, (0, 100), strict=True):
        assert queries(source, part) == [query.encode() for query in rows(first)["query"].to_pylist()]
    objects = list_input_objects(source.config, StopSignal())
    assert {stat.key for stat in objects} == {file.key for part in source.partitions for file in part.files}


@pytest.mark.stage
def test_a_later_append_is_new_and_the_earlier_ones_are_kept(table: Any, workplace: Callable[[str], Workplace]) -> None:
    config = DataConfig(path=PATH, labels=LABELS, num_workers=1, max_bad_fraction=0)
    place = workplace("one")
    before = place.prepare(config)
    assert (before.prepared, before.rows) == (2, 120)
    table.append(rows(200))
    after = place.prepare(config)
    assert (after.prepared, after.reused, after.rows) == (1, 2, 180)
    assert place.names().count(EventName.PARTITION_PREPARED) == 1
    parts = [Partition(info.partition, info.watermark, info.fingerprint) for info in after.infos]
    known = {part.name: part.fingerprint for part in parts[:2]}
    chosen = select_partitions(parts, parent_watermark=parts[1].watermark, parent_partitions=known)
    assert (chosen.new, chosen.old, chosen.late) == ((parts[2],), tuple(parts[:2]), ())


def test_files_keep_their_partition_after_a_snapshot_has_expired(table: Any) -> None:
    before = source_of().partitions
    table.maintenance.expire_snapshots().by_id(table.snapshots()[0].snapshot_id).commit()
    assert len(table.refresh().snapshots()) == 1
    assert source_of().partitions == before


def rename(table: Any) -> None:
    with table.update_schema() as update:
        update.rename_column("title", "name")


def replace(table: Any) -> None:
    with table.update_schema() as update:
        update.delete_column("title")
    with table.update_schema() as update:
        update.add_column("title", pytest.importorskip("pyiceberg.types").StringType())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda table: table.overwrite(rows(0)), "is of type (delete|overwrite)"),
        (lambda table: table.delete("query == 'red shoes 0'"), "is of type (delete|overwrite)"),
        (rename, "has a column 'title' that was renamed or replaced"),
        (replace, "has a column 'title' that was renamed or replaced"),
    ],
)
def test_what_is_no_append_is_refused_by_its_snapshot(table: Any, change: Callable[[Any], None], reason: str) -> None:
    change(table)
    with pytest.raises(DataError, match=rf"iceberg://shop/search\.judgements: snapshot \d+ {reason}"):
        source_of()


def test_a_new_column_is_no_change_of_the_others(table: Any) -> None:
    before = source_of().partitions
    with table.update_schema() as update:
        update.add_column("price", pytest.importorskip("pyiceberg.types").DoubleType())
    assert source_of().partitions == before


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("iceberg://shop", ConfigError),
        ("iceberg://shop/judgements", ConfigError),
        ("iceberg://unknown/search.judgements", ConfigError),
        ("iceberg://shop/search.other", DataError),
        ("iceberg://shop/other.judgements", DataError),
        ("iceberg://shop/search.empty", DataError),
    ],
)
def test_a_table_that_cannot_be_read(table: Any, path: str, error: type[Exception]) -> None:
    table.catalog.create_table("search.empty", schema=rows(0).schema)
    with pytest.raises(error):
        source_of(path)


def test_without_pyiceberg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pipeline.data.iceberg", raising=False)
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog", None)
    with pytest.raises(ConfigError, match="needs pyiceberg") as caught:
        source_of()
    assert caught.value.next_command == "pip install 'pyiceberg>=0.9'"
