"""Clients for AWS Batch and CloudWatch Logs that handle pagination, request limits, retries and errors.

The permissions that they require are listed in infra/modules/roles/policies.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from botocore import exceptions as boto

from jobs.targets.batch.requests import Request
from pipeline.core.errors import ConfigError, TransientError, TrnpipeError
from pipeline.core.format import quotable
from pipeline.core.stop import StopSignal
from pipeline.io import s3_client
from pipeline.io.requests import RetryPolicy, call_with_retry
from pipeline.io.s3_client import RETRYABLE_CODES, S3_ERRORS, error_code, http_status

READ_TIMEOUT_S = 20
SECRET_RETRY = RetryPolicy(max_wait_s=2.0, total_deadline_s=10.0)
"""Secrets are read while a cycle is closed, which must not wait long for a notification."""


def connect(service: str) -> Any:
    """Return a boto3 client for a service whose requests may take up to 20 s. Raises the errors of `new_client`."""
    return s3_client.new_client(service, read_timeout=READ_TIMEOUT_S)


def secret_text(name: str) -> str:
    """Return the value of a secret in AWS Secrets Manager by name or ARN.

    Raises ConfigError if it cannot be read, and TransientError if AWS does not answer within about 10 s.
    """
    client = AwsClient(connect("secretsmanager"), policy=SECRET_RETRY)
    try:
        return str(client.call(f"reading secret {name}", "get_secret_value", SecretId=name).get("SecretString", ""))
    except ConfigError as error:
        raise ConfigError(
            f"cannot read secret {name}: {error.seen}",
            expected="a secret that this role may read (secretsmanager:GetSecretValue)",
            next_command=f"aws secretsmanager describe-secret --secret-id {name}",
        ) from error


_BAD_CREDENTIALS = frozenset(
    {"UnrecognizedClient", "InvalidSignature", "ExpiredToken", "InvalidClientTokenId", "MissingAuthenticationToken"}
)
_THROTTLED = frozenset({"TooManyRequests", "Throttling", "RequestLimitExceeded", "SlowDown"})


class UnknownOutcome(TransientError):
    """Raised if a request that is not idempotent may or may not have been executed."""


def is_unknown(error: BaseException) -> bool:
    return isinstance(error, UnknownOutcome)


def name_of(error: BaseException) -> str:
    """Return the error code without the suffix `Exception`, or an empty string if the service did not respond."""
    return error_code(error).removesuffix("Exception")


def message_of(error: BaseException) -> str:
    return str(error.response.get("Error", {}).get("Message", "")) if isinstance(error, boto.ClientError) else ""


def is_missing(error: BaseException) -> bool:
    """Return whether the error means that a resource does not exist. The message texts are taken from user reports."""
    message = message_of(error).casefold()
    texts = ("not found", "could not find", "does not exist")
    return name_of(error) == "ResourceNotFound" or any(text in message for text in texts)


def is_retryable(error: BaseException) -> bool:
    """Return whether the error is due to throttling, a server error, a timeout or a broken connection."""
    return s3_client.is_retryable(error) or name_of(error) in RETRYABLE_CODES | {"Server"}


def was_not_done(error: BaseException) -> bool:
    """Return whether a request was definitely not executed, because it was throttled or there was no connection."""
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return True
    return name_of(error) in _THROTTLED or http_status(error) == 429


def translate(error: Exception, doing: str) -> TrnpipeError:
    """Translate an AWS error that remains after the last retry.

    `doing` describes the request in the message, for example `submitting a job`.
    """
    status = http_status(error)
    name = f"{error_code(error) or type(error).__name__}" + (f", HTTP {status}" if status else "")
    if is_retryable(error):
        return TransientError(
            f"AWS: {name} while {doing}, retries exhausted",
            next_command="run the same command again; check AWS_ENDPOINT_URL and the network if it repeats",
        )
    # Only include the message of the service. The text of boto3 may contain an endpoint with a password.
    message = str(error) if isinstance(error, boto.ParamValidationError) else message_of(error) or "no answer"
    has_no_credentials = (
        isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError) or name_of(error) in _BAD_CREDENTIALS
    )
    if has_no_credentials or status == 403 or name_of(error) == "AccessDenied":
        trouble = "no usable AWS credentials" if has_no_credentials else "AWS: access denied"
        return ConfigError(
            f"{trouble} while {doing} ({name}): {message}",
            expected="credentials of a role with the policies of infra/modules/roles",
            next_command="aws sts get-caller-identity; correct the policy of that role",
        )
    return ConfigError(
        f"AWS refused {doing} ({name}): {message}",
        expected="a request that AWS accepts",
        next_command="check the queue, the region and AWS_ENDPOINT_URL; trnjobs plan --json shows the requests",
    )


MAX_DESCRIBED = 100  # maximum number of ids or names in one Describe call
MAX_REASON_CHARACTERS = 1024
Detail = Mapping[str, Any]
"""The description of a job, definition, queue or other resource, as returned by AWS."""
T = TypeVar("T")


class AwsClient:
    """A wrapper around a boto3 client that retries requests and translates errors.

    `raw` is the boto3 client, or a fake in tests.
    """

    def __init__(self, raw: Any, *, policy: RetryPolicy | None = None, stop: StopSignal | None = None) -> None:
        self._raw, self._policy, self._stop = raw, policy or RetryPolicy(), stop or StopSignal()

    def repeat(self, doing: str, work: Callable[[], T], retryable: Callable[[BaseException], bool]) -> T:
        return call_with_retry(work, self._policy, retryable=retryable, stop=self._stop, doing=doing)

    def call(
        self, doing: str, operation: str, *, accepted: Callable[[BaseException], bool] | None = None, **request: Any
    ) -> Detail:
        """Send a request that is safe to repeat and return the response.

        If the request fails with an error for which `accepted` returns True, the response is empty.
        """
        try:
            send = getattr(self._raw, operation)
            answer: Detail = self.repeat(doing, lambda: send(**request), is_retryable)
            return answer
        except S3_ERRORS as error:
            if accepted is not None and accepted(error):
                return {}
            raise translate(error, doing) from error


_DESCRIBED = {  # operation, key of the items in the response, argument that takes the names
    "queues": ("describe_job_queues", "jobQueues", "jobQueues"),
    "compute environments": ("describe_compute_environments", "computeEnvironments", "computeEnvironments"),
    "scheduling policies": ("describe_scheduling_policies", "schedulingPolicies", "arns"),
}


class BatchClient(AwsClient):
    """A client for AWS Batch."""

    def active_definitions(self, name: str) -> list[Detail]:
        request = {"jobDefinitionName": name, "status": "ACTIVE"}
        return list(self._pages("describing job definitions", "describe_job_definitions", "jobDefinitions", request))

    def submit_job(self, request: Request, renew: Callable[[], None]) -> str:
        """Submit a job and return its id. `renew` is called before each request, and raises if the lease was lost.

        SubmitJob does not support a client token, so the request is only repeated if it was definitely not executed.
        Raises UnknownOutcome if it may have been executed, in which case the caller should look up the job by name. AWS
        Batch lists a new job only after a few seconds, so this waits for the longest wait between two attempts first.
        """
        doing = f"submitting {request['jobName']}"

        def send() -> Detail:
            renew()
            answer: Detail = self._raw.submit_job(**request)
            return answer

        try:
            answer = self.repeat(doing, send, was_not_done)
        except S3_ERRORS as error:
            if is_retryable(error) and not was_not_done(error):
                self._stop.wait(self._policy.max_wait_s)
                raise UnknownOutcome(f"{type(error).__name__} while {doing}", next_command="trnjobs submit") from error
            raise translate(error, doing) from error
        return str(answer["jobId"])

    def describe_jobs(self, ids: Sequence[str]) -> dict[str, Detail]:
        """Return the descriptions of jobs by id. Jobs that AWS Batch does not know yet or has forgotten are omitted."""
        jobs: dict[str, Detail] = {}
        for chunk in _chunks(ids):
            answer = self.call("describing jobs", "describe_jobs", jobs=chunk)
            jobs |= {job["jobId"]: job for job in answer["jobs"]}
        return jobs

    def jobs_named(self, queue: str, name: str, kind: Literal["job", "service_job"] = "job") -> list[Detail]:
        """Return the jobs with exactly this name, excluding array children and nodes.

        The names are compared again here, because the filter of AWS Batch ignores case.
        """
        request = {"jobQueue": queue, "filters": [{"name": "JOB_NAME", "values": [name]}]}
        jobs = self._pages(f"listing {kind.replace('_', ' ')}s", f"list_{kind}s", "jobSummaryList", request)
        return [job for job in jobs if job["jobName"] == name and not {":", "#"} & {*job["jobId"]}]

    def terminate_job(self, job_id: str, reason: str, kind: Literal["job", "service_job"] = "job") -> None:
        """End a job, regardless of its state. Does nothing if it has already ended."""
        text = quotable(reason)[:MAX_REASON_CHARACTERS]
        self.call(f"ending {kind.replace('_', ' ')} {job_id}", f"terminate_{kind}", jobId=job_id, reason=text)

    def described(self, what: str, names: Sequence[str]) -> list[Detail]:
        """Return descriptions of the resources that exist, by name or ARN.

        `what` is the type of resource, which is a key of _DESCRIBED such as `queues`.
        """
        operation, members, argument = _DESCRIBED[what]
        pages = (self._pages(f"describing {what}", operation, members, {argument: chunk}) for chunk in _chunks(names))
        return [detail for page in pages for detail in page]

    def _pages(self, doing: str, operation: str, members: str, request: Request) -> Iterator[Detail]:
        page: Request = {}
        while True:
            answer = self.call(doing, operation, **request, **page)
            yield from answer.get(members, ())
            if not answer.get("nextToken"):
                return
            page = {"nextToken": answer["nextToken"]}


def _chunks(names: Sequence[str]) -> Iterator[list[str]]:
    for first in range(0, len(names), MAX_DESCRIBED):
        yield list(names[first : first + MAX_DESCRIBED])


class LogsClient(AwsClient):
    """A client for CloudWatch Logs."""

    def streams(self, group: str, prefix: str) -> list[str]:
        """Return the sorted names of all streams with this prefix, or an empty list if the group does not exist."""
        request: Request = {"logGroupName": group, "logStreamNamePrefix": prefix}
        answer = self.call(f"listing logs {group} {prefix}", "describe_log_streams", accepted=is_missing, **request)
        return sorted(str(stream["logStreamName"]) for stream in answer.get("logStreams", ()))

    def lines(self, group: str, stream: str, more: Callable[[], bool]) -> Iterator[str]:
        """Yield all lines of a stream, oldest first.

        At the end of the stream, `more()` is called to decide whether to check for newer lines. Raises ConfigError if
        the stream does not exist.
        """
        request: Request = {"logGroupName": group, "logStreamName": stream, "startFromHead": True}
        while True:
            answer = self.call(f"reading log {group} {stream}", "get_log_events", accepted=is_missing, **request)
            if not answer:
                raise ConfigError(
                    f"no log stream {stream} in {group}",
                    expected="a job that has started, within the retention period of the group",
                    next_command="trnjobs status",
                )
            yield from (str(event["message"]) for event in answer["events"])
            # The end of the stream is reached when the token repeats. Note that earlier pages may be empty too.
            if answer["nextForwardToken"] == request.get("nextToken") and not more():
                return
            request["nextToken"] = answer["nextForwardToken"]
