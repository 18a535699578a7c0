"""A workspace on S3 (moto): the same record as on local disk, and scoring and training share what they fetch."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.io.storage import open_storage
from pipeline.parity.compare import compare_sides
from tests.parity.case import PARITY, Case
from tests.s3 import MotoServer, lead_to

pytestmark = pytest.mark.stage


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MotoServer]:
    with MotoServer("parity-tests") as server:
        lead_to(server.url, monkeypatch)
        yield server


def test_the_same_as_on_local_disk(case: Case, server: MotoServer, tmp_path: Path) -> None:
    good = case.side(case.task())
    local, remote = open_storage(case.settings.workspace), open_storage("s3://parity-tests/workspace")
    for folder in ("tokens", "checkpoints", "cycles/c1/prepare", "cycles/c1/train"):
        for stat in local.list(folder):
            remote.write_bytes(stat.key, local.read_bytes(stat.key))
    settings = case.settings.model_copy(
        update={"workspace": "s3://parity-tests/workspace", "scratch": str(tmp_path / "scratch")}
    )
    there = Case(tmp_path, settings)
    asked: Counter[str] = Counter()
    server.watcher = lambda method, path: asked.update([f"{method} {path}"])
    task = there.task()
    assert task.place.startswith("s3://parity-tests/workspace/cycles/c1/parity/sides/")
    side = there.side(task)
    server.watcher = None
    assert side.record.curve == good.record.curve
    assert compare_sides(good, side, PARITY).passed
    shards = {path: count for path, count in asked.items() if path.endswith(".safetensors") and "/tokens/" in path}
    assert {path for path in shards if path.startswith("GET")}
    assert set(shards.values()) == {1}
    assert [stat.key for stat in remote.list("cycles/c1/parity") if "/checkpoints/" in stat.key] == []
