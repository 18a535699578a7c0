"""However a checkpoint is named, the same one is meant."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.core.errors import ConfigError
from pipeline.io.storage import Storage, open_storage
from pipeline.registry.checkpoints import key_in, locate, locate_start, prefix_in
from pipeline.settings import Settings

PREFIX = "checkpoints/c/step-1"


@pytest.fixture
def workspace(tmp_path: Path) -> Storage:
    (tmp_path / "ws").mkdir()
    return open_storage(str(tmp_path / "ws"))


@pytest.mark.parametrize("form", ["{prefix}", "{prefix}/", "{root}/{prefix}", "{path}/{prefix}", "{relative}/{prefix}"])
def test_what_lies_in_the_workspace_is_found_by_its_key(
    workspace: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    named = form.format(prefix=PREFIX, root=workspace.root, path=tmp_path / "ws", relative="ws")
    assert key_in(workspace, named) == PREFIX == prefix_in(workspace, named)
    storage, prefix = locate(named, Settings(), workspace)
    assert storage is workspace and prefix == PREFIX
    assert locate_start(named, Settings(), workspace) == (workspace, PREFIX)


def test_what_lies_elsewhere_is_a_folder_and_a_name(workspace: Storage, tmp_path: Path) -> None:
    other = tmp_path / "other" / PREFIX
    storage, prefix = locate(str(other), Settings(), workspace)
    assert storage.uri(prefix) == f"file://{other}" and key_in(workspace, str(other)) is None
    with pytest.raises(ConfigError, match="not in the workspace"):
        prefix_in(workspace, "s3://bucket/ws/checkpoints/c/step-1")


@pytest.mark.parametrize("named", ["checkpoints/../../c", "checkpoints/c/\x1b[0m"])
def test_a_name_that_leads_out_or_cannot_be_printed_is_refused(workspace: Storage, named: str) -> None:
    with pytest.raises(ConfigError):
        locate(named, Settings(), workspace)


def test_a_place_without_a_scheme_is_a_prefix_and_a_uri_no_path(
    workspace: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert prefix_in(workspace, "models/step-1/") == "models/step-1"
    monkeypatch.chdir(tmp_path / "ws")
    assert key_in(workspace, "s3://bucket/step-1") is None
    assert key_in(workspace, PREFIX.removeprefix("checkpoints/")) == "c/step-1"


def test_a_path_is_no_key_of_a_workspace_on_s3() -> None:
    on_s3: Any = SimpleNamespace(root="s3://bucket/ws", local_path=lambda key: None)
    assert key_in(on_s3, f"/ws/{PREFIX}") is None
    assert key_in(on_s3, f"s3://bucket/ws/{PREFIX}") == PREFIX
    assert key_in(on_s3, f"s3://bucket/ws-2/{PREFIX}") is None


def test_nothing_is_meant_by_scratch_or_before_a_promotion(workspace: Storage) -> None:
    assert locate_start("scratch", Settings(), workspace) is None
    assert locate_start("incumbent", Settings(), workspace) is None
