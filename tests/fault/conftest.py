"""Places to run the tiny case in, and one S3 server per test process."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault.harness import Place, closing_places, copy_of_prepared, empty_place, forget
from tests.fault.s3_server import S3Server


@pytest.fixture(scope="session", autouse=True)
def _clean_up() -> Iterator[None]:
    yield
    forget()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """place(backend, flags) -> a fresh workspace with prepared data."""
    yield from closing_places(copy_of_prepared, tmp_path)


@pytest.fixture
def bare_place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    """bare_place(backend, flags) -> an empty workspace."""
    (tmp_path / "bare").mkdir()
    yield from closing_places(empty_place, tmp_path / "bare")


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server
