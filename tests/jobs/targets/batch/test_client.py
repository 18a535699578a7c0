"""Pages, chunks, retries, and what an error of AWS means to the user."""

from pathlib import Path
from typing import Any

import pytest
from botocore import exceptions as boto

from jobs.targets.batch import client
from jobs.targets.batch.client import BatchClient, UnknownOutcome, connect
from pipeline.core.errors import ConfigError, Preempted, TransientError, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy
from tests.jobs.targets.batch.fake_batch import FakeBatch
from tests.jobs.targets.faults import FAST, Clock, Faults, client_error

ONCE = RetryPolicy(first_wait_s=1e-5, max_wait_s=1e-4, total_deadline_s=0)


@pytest.mark.parametrize(
    ("error", "family", "words"),
    [
        (client_error("TooManyRequestsException", status=429), TransientError, "TooManyRequestsException, HTTP 429"),
        (client_error("ServerException", status=500), TransientError, "HTTP 500"),
        (client_error("", status=503), TransientError, "HTTP 503"),
        (boto.ReadTimeoutError(endpoint_url="http://user:hunter2@batch"), TransientError, "ReadTimeoutError"),
        (boto.EndpointConnectionError(endpoint_url="http://u:hunter2@x"), TransientError, "EndpointConnectionError"),
        (client_error("AccessDeniedException", "no batch:X", status=403), ConfigError, "AWS: access denied"),
        (client_error("ExpiredTokenException", status=403), ConfigError, "no usable AWS credentials"),
        (boto.NoCredentialsError(), ConfigError, "no usable AWS credentials"),
        (client_error("ClientException", "JobQueue q not found."), ConfigError, "JobQueue q not found."),
        (boto.ParamValidationError(report="Unknown parameter"), ConfigError, "Unknown parameter"),
    ],
)
def test_errors_become_members_of_the_family(error: Exception, family: type[TrnpipeError], words: str) -> None:
    fake = FakeBatch(Clock())
    fake.faults = Faults(errors={1: (error, False)})
    with pytest.raises(family) as caught:
        BatchClient(fake, policy=ONCE).describe_jobs(["1"])
    assert type(caught.value) is family
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_stop_ends_the_waiting() -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="describing jobs"):
        BatchClient(FakeBatch(Clock()), policy=FAST, stop=stop).describe_jobs(["1"])


def test_a_submission_without_an_answer_leaves_time_for_the_job_to_be_listed() -> None:
    """Otherwise, the caller does not find the job by name, and submits it twice."""
    waits = list[float]()

    class Recorder(StopSignal):
        def wait(self, timeout_s: float) -> bool:
            waits.append(timeout_s)
            return False

    fake = FakeBatch(Clock())
    fake.faults = Faults(errors={1: (boto.ReadTimeoutError(endpoint_url="http://batch"), False)})
    with pytest.raises(UnknownOutcome):
        BatchClient(fake, policy=FAST, stop=Recorder()).submit_job(
            {"jobName": "train", "jobQueue": "q", "jobDefinition": "train:1"}, lambda: None
        )
    assert waits == [FAST.max_wait_s]


def test_a_job_is_not_submitted_if_the_lease_was_lost_while_requests_were_throttled() -> None:
    renewals = list[str]()

    def renew() -> None:
        renewals.append("renewed")
        if len(renewals) == 3:
            raise TransientError("another process has taken over")

    fake = FakeBatch(Clock())
    throttled = client_error("TooManyRequestsException", status=429), False
    fake.faults = Faults(errors={1: throttled, 2: throttled})
    with pytest.raises(TransientError, match="taken over"):
        BatchClient(fake, policy=FAST).submit_job(
            {"jobName": "train", "jobQueue": "q", "jobDefinition": "train:1"}, renew
        )
    assert fake.faults.calls == ["SubmitJob"] * 2 and not fake.jobs


def test_a_hundred_jobs_a_call() -> None:
    fake = FakeBatch(Clock(), lag=-1)
    for number in range(250):
        fake.add({"jobId": f"{number}"})
    found = BatchClient(fake, policy=FAST).describe_jobs([f"{i}" for i in range(0, 500, 2)])
    assert sorted(found, key=int) == [f"{i}" for i in range(0, 250, 2)]
    assert fake.faults.calls == ["DescribeJobs"] * 3
    assert BatchClient(fake, policy=FAST).describe_jobs([]) == {}


def test_names_are_compared_exactly_and_all_pages_are_read() -> None:
    fake = FakeBatch(Clock(), page=1, lag=-1)
    for number, name in enumerate(["train", "Train", "train-2", "train"]):
        whole: dict[str, Any] = {"jobName": name, "jobQueue": "arn/q", "status": "FAILED", "createdAt": number}
        fake.add(whole | {"jobId": f"{number}"})
        fake.add(whole | {"jobId": f"{number}:0"})
    assert [one["jobId"] for one in BatchClient(fake, policy=FAST).jobs_named("q", "train")] == ["3", "0"]


def test_no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(ConfigError, match="AWS_DEFAULT_REGION"):
        connect("batch")


@pytest.mark.parametrize("kind", ["half of the credentials", "damaged file"])
def test_credentials_and_files_that_are_no_use(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    if kind == "damaged file":
        (tmp_path / "config").write_text("[default\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(ConfigError, match="aws configure list"):
        connect("batch")


@pytest.mark.parametrize(
    ("errors", "result"),
    [
        ([boto.ReadTimeoutError(endpoint_url="http://secrets")], "json://one.example"),
        ([client_error("ThrottlingException", status=400)] * 10_000, TransientError),
        ([client_error("ResourceNotFoundException", status=400)], ConfigError),
    ],
)
def test_a_secret(errors: list[Exception], result: str | type[TrnpipeError], monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret is read again after an error that may pass. Only an error that will not pass is one of configuration."""

    class Secrets:
        def get_secret_value(self, SecretId: str) -> dict[str, str]:
            assert SecretId == "team"
            if errors:
                raise errors.pop()
            return {"SecretString": "json://one.example"}

    policy = RetryPolicy(first_wait_s=1e-5, max_wait_s=1e-4, total_deadline_s=0.05)
    monkeypatch.setattr(client, "SECRET_RETRY", policy, raising=False)
    monkeypatch.setattr(client, "connect", lambda service: Secrets())
    if isinstance(result, str):
        assert client.secret_text("team") == result
        return
    with pytest.raises(result, match="secret team"):
        client.secret_text("team")
