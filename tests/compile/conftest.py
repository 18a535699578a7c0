"""An S3 server and a storage of each kind, to sync compile caches with."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage
from tests.compile.cache_cases import ONE, TWO, done_files, opened, write_entry
from tests.s3 import MotoServer, lead_to

BUCKET = "graphs"


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    with MotoServer(BUCKET) as server:
        yield server.url


@pytest.fixture
def s3_uri(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh prefix; the environment leads to the server, here and in child processes."""
    lead_to(moto_url, monkeypatch)
    return f"s3://{BUCKET}/run-{secrets.token_hex(4)}"


@pytest.fixture(params=["file", "s3"])
def storage_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of an empty storage of either kind."""
    if request.param == "file":
        return f"file://{tmp_path}/shared storage"
    uri: str = request.getfixturevalue("s3_uri")
    return uri


@pytest.fixture
def stop() -> StopSignal:
    return StopSignal()


@pytest.fixture
def storage(storage_uri: str, stop: StopSignal) -> Storage:
    return opened(storage_uri, stop)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The cache of a machine that compiled two graphs."""
    write_entry(tmp_path / "here", ONE, done_files("a"))
    write_entry(tmp_path / "here", TWO, done_files("b"))
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """The cache of a machine with an empty disk."""
    return tmp_path / "there"
