"""A workspace on files and one on S3, each fresh."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, open_storage
from tests.kit.s3 import MotoServer, lead_to
from tests.registry.cases import make_checkpoint

FAST = RetryPolicy(first_wait_s=0.01, max_wait_s=0.02, total_deadline_s=60.0)
Make = Callable[..., str]
ON_BOTH = pytest.mark.parametrize("workspace_uri", ["file", "s3"], indirect=True)


@pytest.fixture(scope="session")
def server() -> Iterator[MotoServer]:
    with MotoServer("registry") as server:
        yield server


@pytest.fixture
def s3_uri(server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    lead_to(server.url, monkeypatch)
    yield f"s3://{server.bucket}/ws-{secrets.token_hex(4)}"
    server.watcher = None


@pytest.fixture
def workspace_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """On files, unless a test asks for both: a request to the S3 server takes 10 ms."""
    on_s3 = getattr(request, "param", "file") == "s3"
    uri: str = request.getfixturevalue("s3_uri") if on_s3 else f"file://{tmp_path}/workspace"
    return uri


@pytest.fixture
def workspace(workspace_uri: str) -> Storage:
    return open_storage(workspace_uri, retry=FAST)


@pytest.fixture
def make(workspace: Storage, tmp_path: Path) -> Make:
    """Commit a checkpoint in the workspace."""

    def made(folder: str, step: int = 1, **changes: Any) -> str:
        return make_checkpoint(workspace, tmp_path, folder, step, **changes)

    return made
