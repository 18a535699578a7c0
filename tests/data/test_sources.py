"""What a path in the settings names: a file, a folder, or nothing that can be read."""

import json
import os
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, DataError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.input_files import find_files
from pipeline.data.sources import open_source
from pipeline.data.tokenizer import given_tokenizer

CSV = "query,title,label\nq,t,yes\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: two files, one of them in a folder."""
    (tmp_path / "in" / "deeper").mkdir(parents=True)
    (tmp_path / "in" / "a.csv").write_text(CSV)
    (tmp_path / "in" / "deeper" / "b.csv").write_text(CSV)
    monkeypatch.chdir(tmp_path / "in")
    return tmp_path / "in"


@pytest.mark.unit
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


@pytest.mark.unit
def test_what_is_not_there_is_named(folder: Path) -> None:
    for path in ("none.csv", "./none/.", f"file://{folder}/none", "file:///none", "/none"):
        with pytest.raises(DataError, match="does not exist"):
            find_files(path, StopSignal())


@pytest.mark.unit
def test_a_name_that_is_not_utf8_matters_only_as_an_input(folder: Path) -> None:
    config = DataConfig(path=str(folder))
    (folder / os.fsdecode(b"caf\xe9.txt")).touch()
    assert [file.key for file in open_source(config, scratch=folder, stop=StopSignal()).partitions[0].files] == [
        "a.csv",
        "deeper/b.csv",
    ]
    (folder / os.fsdecode(b"caf\xe9.csv")).touch()
    with pytest.raises(DataError, match=r"not UTF-8: caf\\udce9\.csv") as caught:
        open_source(config, scratch=folder, stop=StopSignal())
    str(caught.value).encode()


@pytest.mark.unit
@pytest.mark.parametrize("path", ["./tokenizer.json", "deeper/../tokenizer.json", "file://{folder}/tokenizer.json"])
def test_each_way_to_name_a_tokenizer(folder: Path, path: str) -> None:
    vocab = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocab}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {**model, "max_input_chars_per_word": 9}})
    )
    config = DataConfig(tokenizer=TokenizerConfig(path=path.format(folder=folder)))
    found = given_tokenizer(config, None, StopSignal())
    assert found is not None and found.vocab_size == 6


@pytest.mark.unit
@pytest.mark.parametrize("path", ["/", "s3://bucket", "s3://", ""])
def test_a_tokenizer_is_a_file(path: str) -> None:
    with pytest.raises(ConfigError, match="names no folder or file"):
        given_tokenizer(DataConfig(tokenizer=TokenizerConfig(path=path)), None, StopSignal())
