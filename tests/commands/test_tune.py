"""`trnpipe tune`: what it prints and refuses; workspaces on S3."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands import ToolCall
from pipeline.commands import tune as command
from pipeline.core.errors import EXIT_OK, ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.settings import Settings, resolve
from tests.s3 import MotoServer, lead_to
from tests.tune.case import TUNE, make_workspace, settings_of

pytestmark = pytest.mark.stage
BUCKET = "s3://tune-tests/workspace"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_workspace(tmp_path_factory.mktemp("tune"))


def run(settings: Settings) -> list[str]:
    said: list[str] = []
    assert command.run(settings, StopSignal(), said.append, ToolCall()) == EXIT_OK
    return said


def test_it_prints_table_and_places(workspace: Path, tmp_path: Path) -> None:
    said = run(settings_of(workspace, tmp_path, trials=2))
    folder = tmp_path / TUNE.name
    assert said[0] == "search default: ndcg on valid, best first"
    assert [line.split()[1] for line in said[2:4]] == ["complete", "complete"]
    assert said[-2:] == [
        f"table {folder}/table.json",
        f"best settings {folder}/best.toml: give it to trnpipe train as the last --config",
    ]
    assert resolve([folder / "best.toml"], {}, []).sources["train.loss.temperature"] == f"{folder}/best.toml"


def test_without_a_folder_it_lies_in_a_local_workspace(workspace: Path, tmp_path: Path) -> None:
    settings = settings_of(workspace, tmp_path, trials=1, name="inside")
    run(settings.model_copy(update={"tune": settings.tune.model_copy(update={"folder": None})}))
    assert (workspace / "tune" / "inside" / "table.json").exists()


def test_without_optuna_it_names_the_extra(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    for module in ("pipeline.tune.study", "pipeline.tune.journal"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigError, match="pip install 'optuna>=4'"):
        run(settings_of(workspace, tmp_path))


@pytest.fixture
def remote(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The workspace on S3 (moto)."""
    with MotoServer("tune-tests") as server:
        lead_to(server.url, monkeypatch)
        local, remote = open_storage(str(workspace)), open_storage(BUCKET)
        for folder in ("tokens", "cycles/c1/prepare"):
            for stat in local.list(folder):
                remote.write_bytes(stat.key, local.read_bytes(stat.key))
        yield remote


def test_a_workspace_on_s3_needs_a_folder_for_the_search(remote: Any, tmp_path: Path) -> None:
    settings = settings_of(Path(), tmp_path, trials=2).model_copy(update={"workspace": BUCKET})
    with pytest.raises(
        ConfigError, match=r"s3://tune-tests/workspace cannot hold a search[\s\S]*--tune\.folder FOLDER"
    ):
        run(settings.model_copy(update={"tune": settings.tune.model_copy(update={"folder": None})}))
    run(settings)
    for name in ("table.json", "best.toml"):
        assert remote.read_bytes(f"tune/default/{name}") == (tmp_path / "default" / name).read_bytes()
    assert {stat.key for stat in remote.list("tune")} == {"tune/default/best.toml", "tune/default/table.json"}
    assert not list(remote.list("checkpoints"))
