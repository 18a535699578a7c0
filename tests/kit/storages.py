"""Fixtures of an S3 server and of one empty storage of each kind, for the packages that write to either."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, open_storage

BUCKET = "tests"
FAST = RetryPolicy(first_wait_s=0.01, max_wait_s=0.02, total_deadline_s=60.0)


@pytest.fixture(scope="session")
def moto_address() -> Iterator[tuple[str, int]]:
    from tests.kit.s3 import MotoServer  # a second, which most tests need not wait

    with MotoServer(BUCKET) as server:
        yield server.address


@pytest.fixture
def aws(moto_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> str:
    """The environment of an S3 endpoint with the bucket `tests`, here and in child processes; the endpoint's URL."""
    from tests.kit.s3 import lead_to

    url = "http://{}:{}".format(*moto_address)
    lead_to(url, monkeypatch)
    return url


@pytest.fixture
def s3_uri(aws: str) -> str:
    """A fresh prefix."""
    return f"s3://{BUCKET}/run-{secrets.token_hex(4)}"


@pytest.fixture(params=["file", "s3"])
def storage_uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of an empty root of either kind."""
    if request.param == "file":
        return f"file://{tmp_path}/root folder"
    uri: str = request.getfixturevalue("s3_uri")
    return uri


@pytest.fixture
def stop() -> StopSignal:
    return StopSignal()


@pytest.fixture
def storage(storage_uri: str, stop: StopSignal) -> Storage:
    return open_storage(storage_uri, retry=FAST, stop=stop)
