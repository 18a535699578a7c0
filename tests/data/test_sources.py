"""What a path in the settings names: a file, a folder, or nothing that can be read."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import ConfigError, DataError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.input_files import find_files
from pipeline.data.sources import Source, open_source
from pipeline.data.tokenizer import given_tokenizer
from tests.kit.s3 import MotoServer, lead_to

CSV = "query,title,label\nq,t,yes\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: two files, one of them in a folder."""
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    (tmp_path / "in" / "a.csv").write_text(CSV)
    (tmp_path / "in" / "deeper" / "b.csv").write_text(CSV)
    monkeypatch.chdir(tmp_path / "in")
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        (".", ["a.csv", "deeper/b.csv"]),
        ("./", ["a.csv", "deeper/b.csv"]),
        ("deeper/.", ["b.csv"]),
        ("deeper/..", ["a.csv", "deeper/b.csv"]),
        ("../in/./a.csv", ["a.csv"]),
        ("a.csv", ["a.csv"]),
        ("file://{folder}/.", ["a.csv", "deeper/b.csv"]),
        ("file://{folder}/deeper/b.csv", ["b.csv"]),
    ],
)
def test_each_way_to_write_a_path(folder: Path, path: str, keys: list[str]) -> None:
    listing = find_files(path.format(folder=folder), StopSignal())
    assert [stat.key for stat in listing.stats] == keys


def opened(folder: Path, **settings: Any) -> Source:
    return open_source(DataConfig(path=str(folder), **settings), scratch=folder, stop=StopSignal())


def partitions_of(folder: Path, **settings: Any) -> dict[str, list[str]]:
    """The files of each partition."""
    return {part.name: [file.key for file in part.files] for part in opened(folder, **settings).partitions}


def test_what_is_not_there_is_named(folder: Path) -> None:
    for path in ("none.csv", "./none/.", f"file://{folder}/none", "file:///none", "/none"):
        with pytest.raises(DataError, match="does not exist"):
            find_files(path, StopSignal())


def test_a_name_that_is_not_utf8_matters_only_as_an_input(folder: Path) -> None:
    (folder / os.fsdecode(b"caf\xe9.txt")).touch()
    assert partitions_of(folder) == {"flat": ["a.csv", "deeper/b.csv"]}
    (folder / os.fsdecode(b"caf\xe9.csv")).touch()
    with pytest.raises(DataError, match=r"not UTF-8: caf\\udce9\.csv") as caught:
        partitions_of(folder)
    str(caught.value).encode()


@pytest.mark.parametrize("path", ["/", "s3://bucket", "s3://", ""])
def test_a_tokenizer_is_a_file(path: str) -> None:
    with pytest.raises(ConfigError, match="does not name a folder or file"):
        given_tokenizer(DataConfig(tokenizer=TokenizerConfig(path=path)), None, StopSignal())


def write_files(folder: Path, *keys: str) -> None:
    for key in keys:
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_text(CSV + f"q,{key},yes\n")


@pytest.mark.parametrize("name", ["part-00000", "part-2.txt", "a.csv.1", "b.csv.zst", "B.CSV.ZIP", "dt=2026-11-19"])
def test_a_file_of_unknown_suffix_is_refused_not_left_out(folder: Path, name: str) -> None:
    write_files(folder, name)
    with pytest.raises(DataError, match=re.escape(f"1 of 3 files in {folder} have no known suffix")) as caught:
        partitions_of(folder)
    assert name in caught.value.seen and "--data.format csv" in caught.value.next_command
    assert partitions_of(folder, format="csv") == {"flat": sorted(["a.csv", "deeper/b.csv", name])}


@pytest.mark.parametrize("name", ["A.CSV", "a.Csv.GZ", "a.NDJSON", "a.PQ", "a.tsv.gz", "README.csv", "_x=1/a.csv"])
def test_a_known_suffix_in_any_case_is_read(folder: Path, name: str) -> None:
    write_files(folder, name)
    assert name in partitions_of(folder)["flat"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((name, "x") for name in ("_SUCCESS", "deeper/_SUCCESS", "_temporary/0/p.csv", ".p-0.csv.crc", "._a.csv")),
        *((name, "x") for name in (".DS_Store", ".git/x.json", "README.md", "LICENSE", "SHA256SUMS", "a.csv.md5")),
        *((name, "") for name in ("dt=2026-11-19_$folder$", "empty", "empty.txt")),
    ],
)
def test_what_holds_no_rows_is_passed_over_and_named(folder: Path, name: str, content: str) -> None:
    write_files(folder, name)
    (folder / name).write_text(content)
    source = opened(folder)
    assert [file.key for file in source.files] == ["a.csv", "deeper/b.csv"]
    assert source.skipped == (name,)
    assert not source.warnings


def test_a_link_is_a_file_and_a_broken_one_is_refused(folder: Path) -> None:
    (folder / "c.csv").symlink_to(folder / "a.csv")
    (folder / "d.csv").touch()  # a known suffix: it is read
    (folder / "again").symlink_to(folder)
    (folder / "_gone").symlink_to(folder / "nowhere")
    assert partitions_of(folder) == {"flat": ["a.csv", "c.csv", "d.csv", "deeper/b.csv"]}
    (folder / "deeper" / "d.csv").symlink_to(folder / "nowhere.csv")
    with pytest.raises(DataError, match=r"are not regular files: deeper/d\.csv"):
        partitions_of(folder)
    (folder / "deeper" / "d.csv").unlink()
    os.mkfifo(folder / "pipe.csv")
    with pytest.raises(DataError, match=r"are not regular files: pipe\.csv"):
        partitions_of(folder)


@pytest.mark.parametrize(
    ("above", "below"),
    [("", ""), ("market=us/", ""), ("", "hour=05/"), ("a/b/market=us/", "market=us/"), ("_x=1/", "")],
)
def test_days_are_found_at_any_level(tmp_path: Path, above: str, below: str) -> None:
    keys = [f"{above}dt=2026-11-{day}/{below}a.csv" for day in (19, 20)]
    write_files(tmp_path, *keys, *(key.replace("=us", "=uk") for key in keys))
    assert partitions_of(tmp_path) == {
        f"dt=2026-11-{day}": sorted({key.replace("=us", market) for market in ("=uk", "=us")})
        for day, key in zip((19, 20), keys, strict=True)
    }
    assert any("not read as columns" in text for text in opened(tmp_path).warnings) is ("=" in above + below)


DAYS = """DT=2026-11-19 dt=20261119 dt=2026-11-9 dt%3D2026-11-19 event_date=2026_11_19 2026-11-19 2026/11/19
year=2026/month=11/day=9 market=us/date=2026-11-19 dt=__HIVE_DEFAULT_PARTITION__ snapshot-2026-11-19 load_20261119
day_11.19.2026 2026-W47"""
NO_DAYS = "v2 part=1 2026 model-2026-large shop=1234567 99/99 12/19 v1.2.2026.3 id-120261119 q1-2026"


@pytest.mark.parametrize("folders", DAYS.split())
def test_a_day_by_another_name_is_refused(tmp_path: Path, folders: str) -> None:
    write_files(tmp_path, f"{folders}/a.csv", f"{folders}/more/b.csv")
    with pytest.raises(DataError, match="in a folder that looks like a date"):
        partitions_of(tmp_path)
    write_files(tmp_path, "dt=2026-11-20/a.csv")
    with pytest.raises(DataError):
        partitions_of(tmp_path)


@pytest.mark.parametrize("folders", NO_DAYS.split())
def test_other_folders_are_no_days(tmp_path: Path, folders: str) -> None:
    write_files(tmp_path, f"{folders}/a.csv")
    assert partitions_of(tmp_path) == {"flat": [f"{folders}/a.csv"]}


@pytest.mark.parametrize(
    ("keys", "path", "words"),
    [
        (["dt=2026-11-19/a.csv"], "dt=2026-11-19", "is read as undated although file names contain dates"),
        (["_delta_log/0.json", "a.parquet"], "", "is a Delta or Hudi table"),
        ([".hoodie/hoodie.properties", "a.parquet"], "", "is a Delta or Hudi table"),
        (["2026-11-19.csv", "2026-11-20.csv"], "", "is read as undated although file names contain dates"),
        *((["a.csv", name], "", f"hidden: {name}") for name in ("_late.csv", ".late.jsonl", "_old/c.parquet")),
    ],
)
def test_an_input_that_is_nearly_something_else_is_a_warning(
    tmp_path: Path, keys: list[str], path: str, words: str
) -> None:
    write_files(tmp_path, *keys)
    (warning,) = opened(tmp_path / path).warnings
    assert words in warning


def test_the_same_file_under_two_days_is_a_warning(tmp_path: Path) -> None:
    for day in (19, 20):
        (tmp_path / f"dt=2026-11-{day}").mkdir()
        (tmp_path / f"dt=2026-11-{day}" / "a.csv").write_text(CSV + "q,t,no\n" * 500)
        (tmp_path / f"dt=2026-11-{day}" / "only-a-header.csv").write_text(CSV[:18])
    (warning,) = opened(tmp_path).warnings
    assert "dt=2026-11-20/a.csv equals dt=2026-11-19/a.csv" in warning


def test_what_other_readers_made_has_another_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are named by the version of the readers too; the synthetic catalogue has none."""

    def content_ids(config: DataConfig) -> list[str]:
        return [part.content_id for part in open_source(config, scratch=folder, stop=StopSignal()).partitions]

    files, made = DataConfig(path=str(folder)), DataConfig()
    before = content_ids(files), content_ids(made)
    monkeypatch.setattr("pipeline.data.input_files.READER_VERSION", 99)
    assert content_ids(files) != before[0] and content_ids(made) == before[1]


@pytest.mark.stage
def test_keys_with_empty_parts_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of S3 that end in a slash and hold rows; markers of consoles are folders."""
    keys = ["days/dt=2026-11-19/a.csv", "days/dt=2026-11-20//b.csv", "days//dt=2026-11-21/c.csv", "days/dt=2026-11-21/"]
    with MotoServer("sources") as server:
        lead_to(server.url, monkeypatch)
        for key in keys:
            server.client.put_object(Bucket="sources", Key=key, Body=b"" if key.endswith("/") else CSV.encode())
        config = DataConfig(path="s3://sources/days")
        source = open_source(config, scratch=tmp_path, stop=StopSignal())
        assert {one.name: [file.key for file in one.files] for one in source.partitions} == {
            "dt=2026-11-19": ["dt=2026-11-19/a.csv"],
            "dt=2026-11-20": ["dt=2026-11-20//b.csv"],
            "dt=2026-11-21": ["/dt=2026-11-21/c.csv"],
        }
        for one in source.partitions:
            assert sum(len(batch.rows) for batch in source.read(one.files[0])) == 1
        for path in ("s3://sources/days//", "s3://sources/days//dt=2026-11-21", "s3://sources//days"):
            with pytest.raises(DataError, match="empty folder name"):
                find_files(path, StopSignal())
        server.client.put_object(Bucket="sources", Key="days/dt=2026-11-22/", Body=CSV.encode())
        with pytest.raises(DataError, match=r"1 of 4 files in .* have no known suffix"):
            open_source(config, scratch=tmp_path, stop=StopSignal())
        server.client.put_object(Bucket="sources", Key="one.csv", Body=b"")  # the marker of a folder
        server.client.put_object(Bucket="sources", Key="one.csv/a.csv", Body=CSV.encode())
        assert [stat.key for stat in find_files("s3://sources/one.csv", StopSignal()).stats] == ["a.csv"]
        server.client.put_object(Bucket="sources", Key="one.csv", Body=CSV.encode())
        with pytest.raises(DataError, match="is both a file and a folder") as caught:
            find_files("s3://sources/one.csv", StopSignal())
        path = caught.value.next_command.split()[1]
        assert [stat.key for stat in find_files(path, StopSignal()).stats] == ["a.csv"]
