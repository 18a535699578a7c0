"""Pages, chunks, retries, and what an error of AWS means to the user."""

from typing import Any

import pytest
from botocore import exceptions as boto

from jobs.targets.batch.client import BatchClient, connect
from pipeline.core.errors import ConfigError, Preempted, TransientError, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy
from tests.jobs.targets.batch.fake_batch import FakeBatch, client_error
from tests.jobs.targets.batch.faults import Faults
from tests.jobs.targets.batch.setting import FAST, Clock

ONCE = RetryPolicy(first_wait_s=1e-5, max_wait_s=1e-4, total_deadline_s=0)
LOST = boto.ReadTimeoutError(endpoint_url="http://user:hunter2@batch")
NO_ROUTE = boto.EndpointConnectionError(endpoint_url="http://user:hunter2@batch")


class Raw:
    """Answers every call with the next error, then with nothing."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __getattr__(self, name: str) -> Any:
        def call(**request: Any) -> dict[str, Any]:
            self.calls += 1
            if self.errors:
                raise self.errors.pop(0)
            return {"jobs": [], "jobId": "1", "jobQueues": []}

        return call


@pytest.mark.parametrize(
    ("error", "family", "words"),
    [
        (client_error("TooManyRequestsException", status=429), TransientError, "TooManyRequestsException, HTTP 429"),
        (client_error("ThrottlingException"), TransientError, "ThrottlingException"),
        (client_error("ServerException", status=500), TransientError, "HTTP 500"),
        (client_error("", status=503), TransientError, "HTTP 503"),
        (LOST, TransientError, "ReadTimeoutError"),
        (NO_ROUTE, TransientError, "EndpointConnectionError"),
        (client_error("AccessDeniedException", status=403), ConfigError, "TerminateJob"),
        (client_error("UnrecognizedClientException", status=403), ConfigError, "no usable AWS credentials"),
        (client_error("ExpiredTokenException", status=403), ConfigError, "no usable AWS credentials"),
        (boto.NoCredentialsError(), ConfigError, "no usable AWS credentials"),
        (client_error("ClientException", "JobQueue q not found."), ConfigError, "JobQueue q not found."),
        (boto.ParamValidationError(report="Unknown parameter"), ConfigError, "Unknown parameter"),
    ],
)
def test_errors_become_members_of_the_family(error: Exception, family: type[TrnpipeError], words: str) -> None:
    with pytest.raises(family) as caught:
        BatchClient(Raw(error), policy=ONCE).describe_jobs(["1"])
    assert type(caught.value) is family
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_stop_ends_the_waiting() -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="describing jobs"):
        BatchClient(Raw(), policy=FAST, stop=stop).describe_jobs(["1"])


def test_a_hundred_jobs_a_call() -> None:
    fake = FakeBatch(Clock())
    fake.jobs = {f"{i}": {"jobId": f"{i}"} for i in range(250)}
    fake._seen_at = dict.fromkeys(fake.jobs, 0)
    fake.faults = faults = Faults()
    found = BatchClient(fake, policy=FAST).describe_jobs([f"{i}" for i in range(0, 500, 2)])
    assert sorted(found, key=int) == [f"{i}" for i in range(0, 250, 2)]
    assert faults.calls == ["DescribeJobs"] * 3
    assert BatchClient(fake, policy=FAST).describe_jobs([]) == {}


def test_names_are_compared_exactly_and_all_pages_are_read() -> None:
    fake = FakeBatch(Clock(), page=1)
    for number, name in enumerate(["train", "Train", "train-2", "train"]):
        whole: dict[str, Any] = {
            "jobId": f"{number}",
            "jobName": name,
            "jobQueue": "arn/q",
            "status": "FAILED",
            "createdAt": number,
        }
        fake.jobs |= {whole["jobId"]: whole, f"{number}:0": whole | {"jobId": f"{number}:0"}}
    fake._seen_at = dict.fromkeys(fake.jobs, 0)
    found = BatchClient(fake, policy=FAST).jobs_named("q", "train")
    assert [one["jobId"] for one in found] == ["3", "0"]


def test_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(ConfigError, match="AWS_DEFAULT_REGION"):
        connect("batch")
