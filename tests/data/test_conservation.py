"""No row is lost: what is in a file comes out once, whole or counted as bad, by every reader and from both storages."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError
from pipeline.data import prepare as prepare_module
from pipeline.data import readers
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.csv_records import TEXT_AFTER_QUOTE, UNCLOSED_QUOTE, WRONG_FIELDS
from pipeline.data.input_files import FLAT, Files, InputFile
from pipeline.data.readers import NOT_AN_OBJECT, suffix_format
from pipeline.data.rows import RawBatch, RowChunk, cut_chunks
from pipeline.data.sources import file_reader
from pipeline.data.token_sets import FileRows, TokenSetInfo
from pipeline.data.validate import RowRules, validate_chunk
from pipeline.embed.catalogue import CatalogueColumns, TextRules, read_footers, read_shard, validate_rows
from pipeline.embed.plan import COLUMNS, gather_rows
from pipeline.evaluate import retrieval
from pipeline.evaluate.config import RetrievalConfig
from pipeline.evaluate.retrieval import JudgedCatalogue
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage, open_storage
from tests.data.generated import HEADER, ROWS_PER_CHUNK, Made, make_file

QUICK, THOROUGH = range(120), range(120, 2700)
RULES = RowRules(DataConfig(valid_fraction=0, test_fraction=0), FLAT, ("no", "yes"), (0.0, 1.0), carve_valid=False)


def ids_of(batch: Any, field: str) -> list[str]:
    return [(value or b"").decode() for value in batch[field].to_pylist()]


def check_prepared(storage: Storage, made: Made, chooser: random.Random) -> None:
    """As prepare reads: batches, chunks, judged rows."""
    file = InputFile(made.name, str(suffix_format(made.name)), "content")
    rows_per_chunk = chooser.choice(ROWS_PER_CHUNK)
    config = DataConfig(columns={"query_id": "product_id"}, rows_per_chunk=rows_per_chunk)  # type: ignore[arg-type]
    batches = list(file_reader(storage)(config, file, None))
    ids, numbers, bad = list[str](), list[int](), 0

    for chunk in cut_chunks(file.key, batches, rows_per_chunk):
        good, bad_rows, judged = validate_chunk(chunk, RULES)
        assert judged == chunk.num_rows == len(good.query) + sum(row.count for row in bad_rows)
        assert {row.reason for row in bad_rows} <= {WRONG_FIELDS, UNCLOSED_QUOTE, NOT_AN_OBJECT}
        ids += ids_of(chunk.table(), "query_id")
        numbers += chunk.rows.tolist()
        bad += sum(row.count for row in bad_rows)
    assert (ids, bad) == (made.ids, made.malformed)
    assert sum(batch.rows_read for batch in batches) == made.rows
    assert sum(batch.blank for batch in batches) == made.blank
    assert numbers == sorted(set(numbers))


def check_catalogue(storage: Storage, made: Made, chooser: random.Random, workspace: Storage) -> None:
    """As embed reads: gathered into Parquet, unless it is, then by shards and windows."""
    columns, stat = CatalogueColumns(id="product_id", title="title"), storage.stat(made.name)
    assert stat is not None
    place, stats, malformed = storage, [stat], 0
    if (format_name := str(suffix_format(made.name))) != "parquet":
        prefix, gathered = gather_rows(columns, Files(storage, ((stat, format_name),)), workspace)
        malformed, columns, place = sum(gathered.unreadable.values()), COLUMNS, workspace
        stats = [one for one in workspace.list(prefix) if one.key.endswith(".parquet")]
    assert malformed == made.malformed
    if not made.ids:
        return
    catalogue, ids = read_footers(place, stats, columns), list[str]()
    window_rows = chooser.choice((7, 100, 16_384))
    for shard in catalogue.shards(chooser.choice((50, 1000, 65_536))):
        for window in read_shard(catalogue, place, shard, window_rows):
            rows = validate_rows(TextRules(b"", 16, "string"), window)
            assert not rows.bad
            ids += rows.table["id"].to_pylist()
    assert ids == made.ids


def check_retrieval(storage: Storage, made: Made, chooser: random.Random) -> None:
    """As evaluate reads its catalogue: the queries, then the titles window by window."""
    config = RetrievalConfig(id="product_id", query="query")
    stat = storage.stat(made.name)
    assert stat is not None
    file = JudgedCatalogue(config, Files(storage, ((stat, str(suffix_format(made.name))),)))
    found = file.queries()
    assert int(found.is_item.sum()) == len(found.query_of) == len(made.ids)
    assert found.item_of.tolist() == list(range(len(made.ids)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "WINDOW_ROWS", rows := chooser.choice((7, 1000, 8192)))
        windows = list(file.windows(found.is_item, lambda number: True, 64))
    assert [first for first, _ in windows] == list(range(0, len(made.ids), rows))
    assert sum(len(texts) for _, texts in windows) == len(made.ids)


def check(seed: int, storage: Storage, workspace: Storage) -> None:
    chooser = random.Random(seed)
    reader = chooser.choice(("prepare", "prepare", "embed", "evaluate"))
    made = make_file(seed, whole=reader == "evaluate")
    if not made.data or (reader == "evaluate" and not made.ids):  # what is empty, these two refuse
        reader = "prepare"
    made.name = f"{seed}-{made.name}"
    storage.write_bytes(made.name, made.data)
    try:
        if reader == "prepare":
            check_prepared(storage, made, chooser)
        elif reader == "embed":
            check_catalogue(storage, made, chooser, workspace)
        else:
            check_retrieval(storage, made, chooser)
    except AssertionError as error:
        error.add_note(f"seed {seed}: {reader} of {made.name}")
        raise


def check_all(seeds: range, folder: Path, s3_uri: str) -> None:
    """Four of five files on local disk, one on S3."""
    local, remote = ([open_storage(f"{root}/{name}") for name in ("input", "workspace")] for root in (folder, s3_uri))
    for seed in seeds:
        check(seed, *(remote if seed % 5 == 0 else local))


@pytest.mark.stage
def test_every_reader_gives_every_row(tmp_path: Path, s3_uri: str) -> None:
    check_all(QUICK, tmp_path, s3_uri)


@pytest.mark.stage
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_every_reader_gives_every_row_of_many_files(tmp_path: Path, s3_uri: str) -> None:
    check_all(THOROUGH, tmp_path, s3_uri)


def read(path: Path) -> list[RawBatch]:
    config = DataConfig(columns={"query_id": "product_id"})  # type: ignore[arg-type]
    file = InputFile(path.name, str(suffix_format(path.name)), "content")
    return list(file_reader(open_storage(str(path.parent)))(config, file, None))


def json_lines(count: int, extra: str = "") -> str:
    return "".join(
        f'{{"product_id": "p{i}", "query": "q", "title": "t", "label": "yes"{extra}}}\n' for i in range(count)
    )


@pytest.mark.parametrize("count", [999, 1000, 1001, 1002, 2001])
def test_json_lines_after_the_peek(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json_lines(count))
    found = [name for batch in read(path) for name in ids_of(batch.columns, "query_id")]
    assert found == [f"p{number}" for number in range(count)]


def test_a_reader_that_loses_a_row_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_one_more(items: Iterator[bytes], count: int) -> list[bytes]:
        return [item for item, _ in zip(items, range(count), strict=False)]

    path = tmp_path / "a.jsonl"
    path.write_text(json_lines(1002))
    monkeypatch.setattr(readers, "islice", takes_one_more)
    with pytest.raises(RuntimeError, match="has 1002 rows, but its reader yielded 1001"):
        read(path)


def test_a_column_that_comes_late_is_refused_not_half_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json_lines(1000) + json_lines(2, ', "unused": 1') + json_lines(1, ', "gain": 0.5'))
    with pytest.raises(DataError, match="has 'gain' for the first time in row 1002"):
        read(path)
    path.write_text(json_lines(1000) + json_lines(3, ', "unused": 1'))
    assert sum(len(batch.rows) for batch in read(path)) == 1003


@pytest.mark.parametrize(
    ("swallowed", "reason"),
    [
        (['p1,q,"t,yes', "p2,q,t,yes", 'p3,q,"t",yes'], UNCLOSED_QUOTE),  # closed by the quote of another row
        (['p1,q,"24" screen,yes'], TEXT_AFTER_QUOTE),
        (['p1,q,"Deluxe Edition,yes', "p2,q,t, black,yes", 'p3,q,Monitor 27",yes'], UNCLOSED_QUOTE),
        (['p1,q,"Deluxe Edition,yes', "p2,q,t,yes", "torn", "p2,q,t,yes", 'p3,q,Monitor 27",yes'], UNCLOSED_QUOTE),
    ],
)
def test_a_field_that_holds_rows_is_no_text(tmp_path: Path, swallowed: list[str], reason: str) -> None:
    """A quote that begins a field and one that ends a later one of its column make one record of the right size."""
    rows = [",".join(HEADER), "p0,q,t,yes", *swallowed, "p4,q,t,yes"]
    (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
    batches = read(tmp_path / "a.csv")
    assert [one for batch in batches for one in ids_of(batch.columns, "query_id")] == ["p0", "p4"]
    (bad,) = [row for batch in batches for row in batch.bad]
    assert (bad.row, bad.line, bad.reason, bad.count) == (1, 3, reason, len(swallowed))
    assert str(bad.content).startswith(swallowed[0])


def test_a_line_longer_than_the_limit_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_LINE_BYTES", 200)
    path = tmp_path / "a.jsonl"
    long = json_lines(1).replace('"t"', '"' + "t" * 900 + '"')
    path.write_text(json_lines(1) + long + json_lines(1) + long.rstrip("\n"))
    batches = read(path)
    assert sum(len(batch.rows) for batch in batches) == 2
    assert [row.row for batch in batches for row in batch.bad] == [1, 3]


CONFIG = DataConfig(num_workers=1, tokenizer=TokenizerConfig(vocab_size=256), max_bad_fraction=1.0, rows_per_chunk=100)


def write_input(folder: Path) -> DataConfig:
    folder.mkdir()
    (folder / "a.jsonl").write_text("\n" + json_lines(250) + "\n\n{\n" + json_lines(1).replace('"t"', '""'))
    (folder / "b.csv").write_text("query,title,label,product_id\n" + "q,t,yes,x\n" * 3 + 'q,"t,yes,x\nq,t,no,x\n')
    return CONFIG.model_copy(update={"path": str(folder), "filter": {"product_id": "x|p0|p1|p2"}})


@pytest.mark.stage
def test_prepare_accounts_for_every_row(workplace: Callable[[str], Any], tmp_path: Path) -> None:
    place = workplace("one")
    result = place.prepare(write_input(tmp_path / "in"))
    manifest = read_manifest(place.storage, result.token_set_prefixes[0])
    assert manifest is not None
    assert TokenSetInfo.model_validate(manifest.fields).files == (
        FileRows(file="a.jsonl", rows=252, good=3, bad=2, filtered=247, blank=3),
        FileRows(file="b.csv", rows=5, good=3, bad=2, filtered=0, blank=0),
    )
    assert (result.rows, result.rows_bad, result.rows_filtered, result.rows_blank) == (6, 4, 247, 3)


@pytest.mark.stage
def test_a_row_lost_on_the_way_to_the_shards_is_a_bug(
    workplace: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loses_the_last_chunk(*arguments: Any) -> Iterator[RowChunk]:
        return iter(list(cut_chunks(*arguments))[:-1])

    monkeypatch.setattr(prepare_module, "cut_chunks", loses_the_last_chunk)
    with pytest.raises(RuntimeError, match=r"a\.jsonl: .* of 252 rows are unaccounted for"):
        workplace("one").prepare(write_input(tmp_path / "in"))
