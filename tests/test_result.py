"""Stored results, and where the parent is found."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.context import StageResult, Status, load_result, result_key, store_result
from pipeline.core.errors import CheckpointError, DataError
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.checkpoints import locate_start, parent_tokenizer
from pipeline.settings import Settings
from pipeline.train.config import TrainConfig

POINTER = "registry/relevance/production.json"


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def result(status: Status = "done") -> StageResult:
    now = datetime.now(UTC)
    return StageResult(
        stage="prepare",
        cycle="c1",
        status=status,
        inputs={"a": "1"},
        figures={"rows": 3, "loss": 0.5, "labels": "x,y", "late": False},
        settings_hash="h",
        code_version="v",
        started=now,
        finished=now,
    )


def test_a_result_comes_back(workspace: Storage) -> None:
    assert load_result(workspace, "c1", "prepare") is None
    stored = store_result(workspace, result())
    assert load_result(workspace, "c1", "prepare") == stored
    assert load_result(workspace, "c2", "prepare") is None


def test_already_done_is_never_stored(workspace: Storage) -> None:
    store_result(workspace, result("already_done"))
    loaded = load_result(workspace, "c1", "prepare")
    assert loaded is not None
    assert loaded.status == "done"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"schema_version": 2}'])
def test_a_broken_result_is_a_data_error(workspace: Storage, content: bytes) -> None:
    workspace.write_bytes(result_key("c1", "prepare"), content)
    with pytest.raises(DataError, match="is not a stage result"):
        load_result(workspace, "c1", "prepare")


def test_no_parent_without_an_incumbent_or_from_scratch(workspace: Storage) -> None:
    assert parent_tokenizer(Settings(), workspace) is None
    workspace.write_bytes(POINTER, b'{"checkpoint": "checkpoints/c0/step-1"}')
    assert parent_tokenizer(Settings(train=TrainConfig(start="scratch")), workspace) is None


def test_the_incumbent_gives_the_tokenizer(workspace: Storage) -> None:
    workspace.write_bytes(POINTER, b'{"checkpoint": "checkpoints/c0/step-1", "more": 1}')
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        parent_tokenizer(Settings(), workspace)
    workspace.write_bytes("checkpoints/c0/step-1/tokenizer.json", b"T")
    assert parent_tokenizer(Settings(), workspace) == b"T"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"3",
        b"\xff",
        b'{"checkpoint": 3}',
        b'{"checkpoint": "../other/step-1"}',
        b'{"checkpoint": "/checkpoints/c0/step-1"}',
        b'{"checkpoint": "s3://bucket/step-1"}',
    ],
)
def test_a_broken_pointer_is_a_checkpoint_error(workspace: Storage, content: bytes) -> None:
    workspace.write_bytes(POINTER, content)
    with pytest.raises(CheckpointError, match="not a valid pointer"):
        parent_tokenizer(Settings(), workspace)


def test_a_named_parent_may_lie_elsewhere(workspace: Storage, tmp_path: Path) -> None:
    settings = Settings(train=TrainConfig(start=f"file://{tmp_path}/other/step-3/"))
    place = locate_start(settings.train.start, settings, workspace)
    assert place is not None
    assert place[0].uri(place[1]) == f"file://{tmp_path}/other/step-3"
