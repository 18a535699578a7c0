"""An account of AWS in this process."""

from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.io.s3_client import new_client
from tests.jobs.targets.batch.moto_account import make_account
from tests.s3 import empty_account


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fair-share queue `relevance`, a bucket, and a log group; boto3's client of Batch."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # no test looks at images
    with empty_account():
        make_account()
        yield new_client("batch")
