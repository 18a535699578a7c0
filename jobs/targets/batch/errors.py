"""Which answers of AWS are worth another try, and what the others mean to the user."""

from botocore import exceptions as boto

from pipeline.core.errors import ConfigError, TransientError, TrnpipeError
from pipeline.io import s3_client
from pipeline.io.s3_client import RETRYABLE_CODES, S3_ERRORS, code_of, status_of

AWS_ERRORS = S3_ERRORS
"""What a request may raise."""
_NO_CREDENTIALS = (boto.NoCredentialsError, boto.PartialCredentialsError)
_BAD_CREDENTIALS = frozenset(
    {"UnrecognizedClient", "InvalidSignature", "ExpiredToken", "InvalidClientTokenId", "MissingAuthenticationToken"}
)
_THROTTLED = frozenset({"TooManyRequests", "Throttling", "RequestLimitExceeded", "SlowDown"})


class UnknownOutcome(TransientError):
    """A request that is not idempotent may or may not have been carried out."""


def name_of(error: BaseException) -> str:
    """The error code without its suffix; empty when it is no answer of the service."""
    return code_of(error).removesuffix("Exception")


def is_retryable(error: BaseException) -> bool:
    """Throttling, server faults, time-outs, broken connections."""
    return s3_client.is_retryable(error) or name_of(error) in RETRYABLE_CODES | _THROTTLED | {"Server"}


def was_not_done(error: BaseException) -> bool:
    """Worth another try, and surely not carried out: throttled, or never connected."""
    if isinstance(error, boto.EndpointConnectionError | boto.ConnectTimeoutError):
        return True
    return name_of(error) in _THROTTLED or status_of(error) == 429


def translate(error: Exception, doing: str) -> TrnpipeError:
    """The family member for an error that was not, or no longer, retried. `doing`: as in `submitting a job`."""
    status = status_of(error)
    name = f"{code_of(error) or type(error).__name__}" + (f", HTTP {status}" if status else "")
    if is_retryable(error):
        return TransientError(
            f"AWS: {name} while {doing}, until the retry budget was spent",
            expected="an answer of the service",
            next_command="run the same command again; check AWS_ENDPOINT_URL and the network if it repeats",
        )
    if isinstance(error, _NO_CREDENTIALS) or name_of(error) in _BAD_CREDENTIALS:
        return ConfigError(
            f"no usable AWS credentials while {doing} ({name})",
            expected="a job role, an instance role, a profile or AWS_ACCESS_KEY_ID with its secret",
            next_command="aws sts get-caller-identity",
        )
    if status == 403 or name_of(error) == "AccessDenied":
        return ConfigError(
            f"AWS: {name} while {doing}",
            expected="batch:RegisterJobDefinition, SubmitJob, TagResource, TerminateJob, Describe*, ListJobs and "
            "logs:GetLogEvents",
            next_command="aws sts get-caller-identity; correct the policy of that role",
        )
    return ConfigError(
        f"AWS refused {doing} ({name}): {_message(error)}",
        expected="a request that AWS accepts",
        next_command="check the queue, the region and AWS_ENDPOINT_URL; trnjobs plan --json shows the requests",
    )


def _message(error: Exception) -> str:
    """What the service says. boto3's own text may quote an endpoint with a password; it is left out."""
    if isinstance(error, boto.ClientError):
        return str(error.response.get("Error", {}).get("Message", ""))
    if isinstance(error, boto.ParamValidationError):
        return str(error)
    return "no answer"
