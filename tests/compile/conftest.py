"""Compile caches of two machines."""

from pathlib import Path

import pytest

from tests.compile import traces
from tests.compile.cache_cases import ONE, TWO, done_files, write_entry


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
