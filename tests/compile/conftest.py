"""Compile caches of two machines; the S3 server and the storages are those of tests/storages."""

from pathlib import Path

import pytest

from tests.compile import traces
from tests.compile.cache_cases import ONE, TWO, done_files, write_entry
from tests.kit.storages import aws, moto_address, s3_uri, stop, storage, storage_uri

__all__ = ["aws", "moto_address", "s3_uri", "stop", "storage", "storage_uri"]


@pytest.fixture(scope="session", autouse=True)
def _traces(shared: Path) -> None:
    traces.FOLDER = shared / "traces"


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
