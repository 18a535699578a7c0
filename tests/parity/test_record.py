"""Recorded sides that are missing, damaged, or not what they say."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.io.storage import Storage, open_storage
from pipeline.parity.record import load_side
from tests.parity.case import Case

pytestmark = pytest.mark.stage


@pytest.fixture
def place(case: Case, tmp_path: Path) -> Storage:
    """A copy of a recorded side, as if it came from another machine."""
    recorded = case.side(case.task())
    shutil.copytree(recorded.uri.removeprefix("file://"), tmp_path / "copy")
    return open_storage(str(tmp_path / "copy"))


def test_a_copy_is_as_good_as_the_side(case: Case, place: Storage, tmp_path: Path) -> None:
    copy = load_side(place, tmp_path / "cache")
    assert copy.record == case.side(case.task()).record
    assert copy.uri == place.root


def test_an_empty_folder_says_how_to_record(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no recorded side") as caught:
        load_side(open_storage(str(tmp_path / "none")), tmp_path / "cache")
    assert "xla, neuron, cpu, cuda" in caught.value.expected
    assert "--to" in caught.value.next_command


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"schema_version": 2}'])
def test_rubbish_for_a_record_is_named(place: Storage, tmp_path: Path, content: bytes) -> None:
    place.write_bytes("record.json", content)
    with pytest.raises(DataError, match=r"record\.json is not a record of a side"):
        load_side(place, tmp_path / "cache")


def test_a_record_without_an_evaluation_is_none(place: Storage, tmp_path: Path) -> None:
    content = json.loads(place.read_bytes("record.json"))
    place.write_bytes("record.json", json.dumps(content | {"evaluations": []}).encode())
    with pytest.raises(DataError, match="evaluations"):
        load_side(place, tmp_path / "cache")


def test_scores_that_are_missing_damaged_or_of_another_record(place: Storage, tmp_path: Path) -> None:
    content = json.loads(place.read_bytes("record.json"))
    place.write_bytes("record.json", json.dumps(content | {"scores": "other"}).encode())
    with pytest.raises(DataError, match="are not the scores"):
        load_side(place, tmp_path / "cache")
    place.write_bytes("record.json", json.dumps(content).encode())
    scores = place.read_bytes("scores/scores.safetensors")
    place.write_bytes("scores/scores.safetensors", scores[:-1] + bytes([scores[-1] ^ 1]))
    with pytest.raises(DataError, match=r"scores\.safetensors has \d+ bytes and xxh3_128"):
        load_side(place, tmp_path / "cache")
    place.delete(["scores/MANIFEST.json"])
    with pytest.raises(DataError, match=r"MANIFEST\.json"):
        load_side(place, tmp_path / "cache")
