"""A boto3 client that retries requests until a deadline and translates errors to those of trnpipe."""

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import boto3
import botocore.loaders
import botocore.session
import urllib3.exceptions
from botocore import exceptions as boto
from botocore.config import Config

from pipeline.core.errors import ConfigError, DataError, TransientError, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy, call_with_retry
from pipeline.io.storage import key_not_found

# Determine which S3 errors are retryable and translate them to messages for the user.
#
# Our messages only contain the error code and the HTTP status, because the messages of boto3 may contain the URL of an
# endpoint with a password.

# See "List of error codes" in the S3 API reference. These are listed by name because some of them don't have a
# retryable status. RequestTimeout has status 400, and the two conflicts have status 409.
RETRYABLE_CODES = frozenset(
    {
        "SlowDown",
        "InternalError",
        "ServiceUnavailable",
        "RequestTimeout",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "TooManyRequests",
        "OperationAborted",
        "ConditionalRequestConflict",
    }
)
RETRYABLE_STATUS = frozenset({429, 500, 502, 503, 504})
MISSING_CODES = frozenset({"NoSuchKey", "404", "NotFound"})
RETRYABLE_TYPES: tuple[type[BaseException], ...] = (
    boto.ConnectionError,
    boto.HTTPClientError,
    boto.ReadTimeoutError,
    boto.ResponseStreamingError,
    boto.IncompleteReadError,
    boto.FlexibleChecksumError,
    boto.MetadataRetrievalError,
    boto.CredentialRetrievalError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)
# All errors that a request may raise. This does not include OSError, because a full local disk must not be reported as
# an S3 error.
S3_ERRORS: tuple[type[Exception], ...] = (
    boto.BotoCoreError,
    boto.ClientError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
)


class PartialBody(ConnectionError):
    """Raised if a response has fewer bytes than announced or requested."""


def error_code(error: BaseException) -> str:
    """Return the S3 error code, or an empty string if the error is not a response from S3."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def http_status(error: BaseException) -> int:
    """Return the HTTP status, or 0 if the error is not a response from S3."""
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_retryable(error: BaseException) -> bool:
    """Return whether a request should be retried after this error.

    This includes throttling, server errors, timeouts and broken connections, but no other 4xx status.
    """
    if isinstance(error, boto.ClientError):
        return error_code(error) in RETRYABLE_CODES or http_status(error) in RETRYABLE_STATUS
    return isinstance(error, RETRYABLE_TYPES)


def is_missing(error: BaseException) -> bool:
    """Return whether the error means that the key doesn't exist (as opposed to the bucket)."""
    return error_code(error) in MISSING_CODES


def is_precondition_failed(error: BaseException) -> bool:
    return error_code(error) == "PreconditionFailed" or http_status(error) == 412


def translate(error: Exception, doing: str, uri: str) -> TrnpipeError:
    """Translate an S3 error to a TrnpipeError, after retries have been exhausted or if it is not retryable."""
    code, status = error_code(error), http_status(error)
    name = f"{code or type(error).__name__}" + (f", HTTP {status}" if status else "")
    if is_retryable(error):
        return TransientError(
            f"error while {doing} {uri}: {name} (gave up at the retry deadline)",
            expected="a successful response from S3 within storage.total_deadline_s",
            next_command="run the same command again; if it still fails, check AWS_ENDPOINT_URL and the network",
        )
    if code == "NoSuchBucket":
        return missing_bucket(uri)
    if is_missing(error):
        return key_not_found(uri)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError) or code in (
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "ExpiredToken",
        "InvalidToken",
    ):
        return ConfigError(
            f"no usable AWS credentials for {uri} ({name})",
            expected="a job role, an instance role, a profile, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            next_command="aws sts get-caller-identity",
        )
    if code == "InvalidObjectState":
        return DataError(
            f"{uri} is archived and must be restored before it can be read ({name})",
            expected="an object that can be read immediately",
            next_command="aws s3api restore-object, then run the same command again after the restore",
        )
    if status == 403 or code == "AccessDenied":
        return ConfigError(
            f"access denied while {doing} {uri}: {name}",
            expected="s3:GetObject, PutObject and DeleteObject for the prefix, and s3:ListBucket for the bucket",
            next_command="aws sts get-caller-identity; then check the policy of that role",
        )
    if is_precondition_failed(error):
        return TransientError(
            f"{uri} was replaced by a new version while {doing} it",
            expected="an object that does not change while it is read",
            next_command="run the same command again",
        )
    return ConfigError(
        f"error while {doing} {uri}: {name}",
        expected="a request that S3 accepts",
        next_command="check the bucket name, the region and AWS_ENDPOINT_URL",
    )


def missing_bucket(uri: str) -> ConfigError:
    """Return the error for a bucket that doesn't exist."""
    bucket = uri.removeprefix("s3://").split("/")[0]
    return ConfigError(
        f"bucket {bucket} does not exist (needed for {uri})",
        expected="an existing bucket in this account and at this endpoint",
        next_command=f"aws s3 mb s3://{bucket}; or correct the URI in the settings",
    )


T = TypeVar("T")

# AWS Batch sends SIGKILL 30 s after SIGTERM. Commands must exit within 20 s, even if a thread is waiting for a
# connection that is dead.
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 10
MAX_CONNECTIONS = 32

# Every client has its own session, so that it picks up the current credentials. However, all sessions share one loader
# for the service models, because loading a model takes 0.2 s. Clients are thread-safe, but creating them is not.
_LOADER = botocore.loaders.create_loader()
_CREATE_LOCK = threading.Lock()


def new_client(service: str, **options: Any) -> Any:
    """Create a boto3 client that is configured by the standard AWS environment and doesn't retry.

    This doesn't send any requests to the service. `options` are those of botocore's Config.

    Raises ConfigError if the region, profile, credentials or endpoint is missing or invalid, and TransientError if the
    credentials could not be fetched.
    """
    limits = {"connect_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
    config = Config(retries={"total_max_attempts": 1}, user_agent_extra="trnpipe", **limits | options)
    try:
        with _CREATE_LOCK:
            core = botocore.session.Session()
            core.register_component("data_loader", _LOADER)
            return boto3.session.Session(botocore_session=core).client(service, config=config)
    except (boto.BotoCoreError, ValueError) as error:
        # Omit the text of the error, because it may contain an endpoint with a password.
        raise (TransientError if is_retryable(error) else ConfigError)(
            f"cannot create a client for AWS {service}: {type(error).__name__}",
            expected="an existing region and profile, valid credentials, and AWS_ENDPOINT_URL unset or a URL",
            next_command="aws configure list, or export AWS_DEFAULT_REGION=us-west-2",
        ) from error


class S3Client:
    """A boto3 client that retries requests until a deadline. It is thread-safe and fork-safe."""

    def __init__(self, policy: RetryPolicy, stop: StopSignal) -> None:
        self.policy, self.stop = policy, stop
        self._pid = os.getpid()
        self._raw = self._connect()

    @property
    def raw(self) -> Any:
        """The underlying boto3 client. Forked processes create a new one, because they can't share connections."""
        if self._pid != os.getpid():
            self._raw, self._pid = self._connect(), os.getpid()
        return self._raw

    def call(self, doing: str, uri: str, request: Callable[[Any], T]) -> T:
        """Send a request with retries and return its result. Errors are translated to a TrnpipeError."""
        try:
            return self.attempt(doing, uri, request)
        except S3_ERRORS as error:
            raise translate(error, doing, uri) from error

    def attempt(self, doing: str, uri: str, request: Callable[[Any], T]) -> T:
        """Send a request like `call`, but raise the original boto3 error for callers that need to handle it."""
        return call_with_retry(
            lambda: request(self.raw),
            self.policy,
            retryable=is_retryable,
            stop=self.stop,
            doing=f"{doing} {uri}",
        )

    def _connect(self) -> Any:
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        # Most S3-compatible services don't support virtual-hosted addresses such as bucket.host.
        addresses = {"addressing_style": "path"} if endpoint else None
        return new_client("s3", max_pool_connections=MAX_CONNECTIONS, tcp_keepalive=True, s3=addresses)
