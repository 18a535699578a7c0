"""Places to run the tiny case in, and one S3 server per test process."""

import fcntl
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest

from pipeline.parallel.network import MASTER_PORT
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


@pytest.fixture
def rendezvous_port() -> Iterator[None]:
    """Nodes of a job meet at one fixed port: one such test at a time on this machine.

    The system hands the same port out to servers and connections of other tests; those are waited for.
    """
    with (Path(gettempdir()) / "trnpipe-tests-rendezvous.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        limit = time.monotonic() + 120
        while not _is_free() and time.monotonic() < limit:
            time.sleep(0.2)
        yield


def _is_free() -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", MASTER_PORT))
        except OSError:
            return False
    return True


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server
