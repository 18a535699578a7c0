"""Each format gives the same rows; broken bytes and lines are counted, never fatal and never silent."""

import gzip
import json
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError
from pipeline.data.config import ColumnMapping, DataConfig
from pipeline.data.csv_records import WRONG_FIELDS
from pipeline.data.readers import read_file, suffix_format
from pipeline.data.rows import RawBatch, batch_rows, cut_chunks, plan_columns
from pipeline.io.storage import open_storage

TABLE = pa.table(
    {
        "query": [f"query {i // 3} ü" for i in range(30)],
        "title": [f'title, {i} "x"\nnext line' if i == 4 else f"title {i}" for i in range(30)],
        "label": ["good" if i % 2 else "bad" for i in range(30)],
        "gain": [float(i % 2) for i in range(30)],
        "price": [i * 0.5 for i in range(30)],
        "unused": list(range(30)),
    }
)
CONFIG = DataConfig(numeric=("price",))


def read(path: Path, config: DataConfig = CONFIG, num_rows: int = 7) -> list[RawBatch]:
    storage = open_storage(str(path.parent))
    name = suffix_format(path.name)
    assert name
    return list(read_file(storage, path.name, name, lambda names: plan_columns(config, names, path.name), num_rows))


def column(batches: list[RawBatch], field: str) -> list[str | None]:
    values = [value for batch in batches for value in batch.columns[field].to_pylist()]
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def write(path: Path) -> Path:
    if ".parquet" in path.name:
        pq.write_table(TABLE, path, row_group_size=11)
    elif ".csv" in path.name:
        pyarrow.csv.write_csv(TABLE, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in TABLE.to_pylist()))
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(path.read_bytes()))
    return path


@pytest.mark.unit
@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl", "a.csv.gz", "a.jsonl.gz"])
def test_all_formats_agree(tmp_path: Path, name: str) -> None:
    batches = read(write(tmp_path / name))
    assert column(batches, "query") == TABLE["query"].to_pylist()
    assert column(batches, "title") == TABLE["title"].to_pylist()
    assert [float(value) for value in column(batches, "numeric.price")] == TABLE["price"].to_pylist()  # type: ignore[arg-type]
    assert [row for batch in batches for row in batch.rows.tolist()] == list(range(30))
    assert max(batch.num_rows for batch in batches) <= 7
    assert "unused" not in batches[0].columns.schema.names


@pytest.mark.unit
@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.jsonl"])
def test_missing_column_names_what_there_is(tmp_path: Path, name: str) -> None:
    config = DataConfig(columns=ColumnMapping(title="product_title"))
    with pytest.raises(DataError, match="product_title") as caught:
        read(write(tmp_path / name), config)
    assert "unused" in caught.value.expected
    assert "--data.columns.title" in caught.value.next_command


@pytest.mark.unit
def test_a_renamed_optional_column_is_required(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="description"):
        read(write(tmp_path / "a.parquet"), DataConfig(columns=ColumnMapping(text="description")))


@pytest.mark.unit
def test_csv_survives_broken_lines_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"query,title,label\nq0,t0,good\nq1,t1\n\nq2,\xff\xfe,good\nq3,t3,good,extra\nq4,t4,bad\n")
    batches = read(path, DataConfig())
    assert [b for batch in batches for b in batch.columns["title"].to_pylist()] == [b"t0", b"\xff\xfe", b"t4"]
    bad = [row for batch in batches for row in batch.bad]
    assert [(row.row, row.reason, row.content) for row in bad] == [
        (1, WRONG_FIELDS, "q1,t1"),
        (3, WRONG_FIELDS, "q3,t3,good,extra"),
    ]


@pytest.mark.unit
def test_an_unclosed_quote_counts_every_line_it_swallowed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('query,title,label\nq0,t0,good\nq1,"t1,good\nq2,t2,good\nq3,t3,good\n')
    batches = read(path, DataConfig())
    assert sum(batch.columns.num_rows for batch in batches) == 1
    assert sum(row.count for batch in batches for row in batch.bad) == 3


@pytest.mark.unit
def test_jsonl_survives_broken_lines_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = b'{"query": "q", "title": "t", "label": 3}\n'
    path.write_bytes(good + b'{"query": "q", \n[1]\n\n{"query": "\xff", "title": "t", "label": null}\n' + good)
    batches = read(path, DataConfig())
    assert [b for batch in batches for b in batch.columns["query"].to_pylist()] == [b"q", b"\xff", b"q"]
    assert [b for batch in batches for b in batch.columns["label"].to_pylist()] == [b"3", None, b"3"]
    assert [row.row for batch in batches for row in batch.bad] == [1, 2]


@pytest.mark.unit
@pytest.mark.parametrize("name", ["a.parquet", "a.csv.gz"])
def test_half_a_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"is cut short|cannot be read as csv"):
        read(path)


@pytest.mark.unit
@pytest.mark.parametrize("rows_per_chunk", [5, 7, 30, 100])
def test_chunks_are_bounded_and_whole(tmp_path: Path, rows_per_chunk: int) -> None:
    batches = read(write(tmp_path / "a.parquet"), num_rows=batch_rows(rows_per_chunk))
    chunks = list(cut_chunks("a.parquet", batches, rows_per_chunk))
    assert all(0 < len(chunk.rows) <= rows_per_chunk for chunk in chunks)
    assert [row for chunk in chunks for row in chunk.rows.tolist()] == list(range(30))
    assert [v for chunk in chunks for v in chunk.table()["query"].to_pylist()] == [
        value.encode() for value in TABLE["query"].to_pylist()
    ]


@pytest.mark.unit
def test_big_rows_end_a_chunk_early(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pipeline.data.rows.CHUNK_BYTES", 500)
    chunks = list(cut_chunks("a", read(write(tmp_path / "a.parquet"), num_rows=3), 1000))
    assert len(chunks) > 3
    assert sum(len(chunk.rows) for chunk in chunks) == 30


@pytest.mark.unit
def test_whole_numbers_of_any_size_are_numbers(tmp_path: Path) -> None:
    """Rounded as in a text format; one of them does not cost the file."""
    table = TABLE.set_column(4, "price", pa.array([2**53 + 1, -(2**63), *range(28)], pa.int64()))
    pq.write_table(table, tmp_path / "a.parquet")
    pyarrow.csv.write_csv(table, tmp_path / "a.csv")
    for name in ("a.parquet", "a.csv"):
        found = [float(value) for value in column(read(tmp_path / name), "numeric.price")]  # type: ignore[arg-type]
        assert found == [2.0**53, -(2.0**63), *map(float, range(28))]


@pytest.mark.unit
@pytest.mark.parametrize("kind", [pa.uuid(), pa.binary(16), pa.binary_view()])
def test_an_id_of_bytes_costs_no_row(tmp_path: Path, kind: pa.DataType) -> None:
    ids = [UUID(int=2**127 + number) for number in range(30)]
    values = pa.array([one.bytes for one in ids], kind)
    pq.write_table(TABLE.append_column("product_id", values), tmp_path / "a.parquet")
    found = [value for batch in read(tmp_path / "a.parquet") for value in batch.columns["product_id"].to_pylist()]
    assert found == [str(one).encode() if kind == pa.uuid() else one.bytes for one in ids]


@pytest.mark.unit
def test_a_type_that_is_no_text_is_named_with_its_column(tmp_path: Path) -> None:
    pq.write_table(TABLE.append_column("text", pa.array([[1, 2]] * 30)), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet: column 'text' is list<.*int64>") as caught:
        read(tmp_path / "a.parquet")
    assert "--data.columns" in caught.value.next_command
