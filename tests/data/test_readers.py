"""Each format gives the same rows; broken bytes and lines are counted, never fatal and never silent."""

import bz2
import gzip
import lzma
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError
from pipeline.data.config import ColumnMapping, DataConfig
from pipeline.data.csv_records import WRONG_FIELDS
from pipeline.data.readers import KEY_TWICE, NOT_AN_OBJECT, read_file, suffix_format
from pipeline.data.rows import RawBatch, batch_rows, cut_chunks, plan_columns
from pipeline.data.validate import EMPTY_TITLE, RowRules, validate_chunk
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
    pq.write_table(TABLE, path, row_group_size=11)
    return path


@pytest.mark.parametrize(("rows_per_chunk", "num_bytes"), [(5, 10**9), (7, 10**9), (100, 10**9), (1000, 500)])
def test_chunks_are_bounded_and_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows_per_chunk: int, num_bytes: int
) -> None:
    monkeypatch.setattr("pipeline.data.rows.CHUNK_BYTES", num_bytes)
    batches = read(write(tmp_path / "a.parquet"), num_rows=batch_rows(rows_per_chunk) if num_bytes > 500 else 3)
    chunks = list(cut_chunks("a.parquet", batches, rows_per_chunk))
    assert all(0 < len(chunk.rows) <= rows_per_chunk for chunk in chunks) and (num_bytes > 500 or len(chunks) > 3)
    assert [row for chunk in chunks for row in chunk.rows.tolist()] == list(range(30))
    assert [v for chunk in chunks for v in chunk.table()["query"].to_pylist()] == [
        value.encode() for value in TABLE["query"].to_pylist()
    ]


@pytest.mark.parametrize("kind", [pa.uuid(), pa.binary(16), pa.binary_view()])
def test_an_id_of_bytes_costs_no_row(tmp_path: Path, kind: pa.DataType) -> None:
    ids = [UUID(int=2**127 + number) for number in range(30)]
    values = pa.array([one.bytes for one in ids], kind)
    pq.write_table(TABLE.append_column("product_id", values), tmp_path / "a.parquet")
    found = [value for batch in read(tmp_path / "a.parquet") for value in batch.columns["product_id"].to_pylist()]
    assert found == [str(one).encode() if kind == pa.uuid() else one.bytes for one in ids]


ROWS = b"query,title,label\nq,t,x\n"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer"),
        ("a.jsonl", b"\n<!DOCTYPE html><html><body>Sign in</body></html>\n", "is a web page"),
        ("a.csv.gz", gzip.compress(b"PK\x03\x04" + b"\x14\0" * 40, mtime=0), "is a zip archive"),
        ("a.parquet", b"\x28\xb5\x2f\xfd" + b"\x04\0" * 40, "is compressed with zstd"),
        ("a.tsv", bz2.compress(ROWS), "is compressed with bzip2"),
        ("a.csv", lzma.compress(ROWS), "is compressed with xz"),
        ("a.jsonl", None, "is a Parquet file"),
        ("a.parquet", gzip.compress(ROWS, mtime=0), "is compressed with gzip"),
        ("a.parquet", b"PAR1" + bytes(100), "is truncated"),
        ("a.csv.gz", gzip.compress(ROWS * 100, mtime=0)[:-20], "cannot be read as csv"),
        ("a.parquet", ROWS, "cannot be read as parquet"),
        ("a.csv.gz", ROWS, "its content is not gzip"),
        ("a.csv", ROWS.decode().encode("utf-16-le"), "is not UTF-8"),
        ("a.csv", ROWS.decode().encode("utf-16"), "is not UTF-8"),
        ("a.jsonl", "\ufeff{}".encode("utf-32-be"), "is not UTF-8"),
        ("a.csv", bytes(99), "is not UTF-8"),
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1", "has no column 'query'"),
        ("a.csv", b'{"query": "q", "title": "t"}\n', "cannot be read as csv"),
        ("a.jsonl", ROWS, "is not JSON lines"),
        ("a.jsonl", b'{"query": "q"},\n{"query": "r"},\n', "is not JSON lines"),
        ("a.json", b'{"query": "q",\n "title": "t"}\n', "is not JSON lines"),
        ("a.json", b'[{"query": "q", "title": "t", "label": "x"}]', "is not JSON lines"),
        ("a.csv", b"query,title,label,title\nq,t,x,t\n", r"has 2 columns 'title' \(for title\)"),
        ("a.csv", b"title;price\nt;1\n", "has no column 'query'"),
    ],
)
def test_content_of_another_kind_is_one_clear_error(
    tmp_path: Path, name: str, content: bytes | None, words: str
) -> None:
    data = write(tmp_path / "b.parquet").read_bytes() if content is None else content
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}.* {words}"):
        read(tmp_path / name, DataConfig())


def test_what_looks_like_other_content_is_text_and_a_key_twice_is_a_bad_row(tmp_path: Path) -> None:
    """A column of that name, and a zero byte below the header."""
    (tmp_path / "a.csv").write_bytes(b"ORC,query,title,label,FEA1\n1,q\0,t,x,2\n")
    assert column(read(tmp_path / "a.csv", DataConfig()), "query") == ["q\0"]
    lines = ['{"query": "q", "title": "t", "label": "x"}', '{"query": "a", "query": "b", "title": "t", "label": "x"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    batches = read(tmp_path / "a.jsonl", DataConfig())
    assert column(batches, "query") == ["q"]
    assert [(row.line, row.reason) for batch in batches for row in batch.bad] == [(2, KEY_TWICE)]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_bad_rows_of_text_files_name_their_line(tmp_path: Path, name: str) -> None:
    """Those of the reader, and those that are judged later: after blank lines and a text of several lines."""
    lines = ["query,title,label", "", 'q,"two|lines",x', "torn", "", "q,,x"]
    if name == "a.jsonl":
        lines = ["", '{"query": "q", "title": "t", "label": "x"}', "", "torn", "", '{"query": "q", "label": "x"}']
    text = "\n".join(lines).replace("|", "\n").replace(",", "\t" if name == "a.tsv" else ",") + "\n"
    (tmp_path / name).write_text(text)
    (chunk,) = cut_chunks(name, read(tmp_path / name, DataConfig(), num_rows=2), 100)
    rules = RowRules(DataConfig(), "flat", ("x", "y"), (0.0, 1.0), carve_valid=False)
    _, bad, _ = validate_chunk(chunk, rules)
    torn = NOT_AN_OBJECT if name == "a.jsonl" else WRONG_FIELDS
    line = 4 if name == "a.jsonl" else 5
    assert [(row.row, row.line, row.reason) for row in bad] == [(1, line, torn), (2, line + 2, EMPTY_TITLE)]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("Query,TITLE ,label", "--data.columns.query Query --data.columns.title 'TITLE '"),
        ("querry,titel,gain", "--data.columns.query querry --data.columns.title titel"),
        ("query,a,b", "--data.columns.title COLUMN --data.columns.label COLUMN"),
        ("query,title,label,prise", "correct 'price' in --data.numeric"),
        ("query,title,label,description", "--data.columns.text description"),
        (
            "search_term,Item Name,grade,price",
            "--data.columns.query search_term --data.columns.title 'Item Name' --data.columns.label grade",
        ),
    ],
)
def test_a_missing_column_is_offered_by_its_spelling(columns: str, expected: str) -> None:
    config = CONFIG if "prise" in columns else DataConfig()
    if "description" in columns:  # an explicitly configured column must exist
        config = DataConfig(columns=ColumnMapping(text="details"))
    with pytest.raises(DataError) as caught:
        plan_columns(config, columns.split(","), "a.csv")
    assert caught.value.next_command == expected
