"""An S3 endpoint (moto) and a storage of each kind, to sync compile caches with."""

import logging
import secrets
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage
from tests.graphs.cache_cases import ONE, TWO, done_files, opened, write_entry

BUCKET = "graphs"


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    url = "http://{}:{}".format(*server.get_host_and_port())
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing-secret", "region_name": "us-east-1"}
    boto3.session.Session(**keys).client("s3", endpoint_url=url).create_bucket(Bucket=BUCKET)
    yield url
    server.stop()


@pytest.fixture
def s3_uri(moto_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fresh prefix; the environment leads to the server, here and in child processes."""
    for name, value in {
        "AWS_ENDPOINT_URL_S3": moto_url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
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
