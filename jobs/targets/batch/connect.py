"""boto3 clients from the usual AWS environment: AWS_DEFAULT_REGION, AWS_ENDPOINT_URL, credentials."""

from typing import Any

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from pipeline.core.errors import ConfigError

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20


def connect(service: str) -> Any:
    """A client of `batch` or `logs`; sends nothing yet. Raises ConfigError without a region.

    boto3's own retries are off: SubmitJob must not be repeated blindly, and our deadline must be the true one.
    """
    config = Config(
        retries={"total_max_attempts": 1},
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        user_agent_extra="trnpipe",
    )
    try:
        return boto3.session.Session().client(service, config=config)
    except (boto.NoRegionError, boto.InvalidRegionError, boto.ProfileNotFound) as error:
        raise ConfigError(
            f"no client for AWS {service}: {type(error).__name__}",
            expected="a region and a profile that exist",
            next_command="export AWS_DEFAULT_REGION=us-west-2",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"no client for AWS {service}: AWS_ENDPOINT_URL is no URL",
            expected="https://host, or the variable not set",
            next_command="unset AWS_ENDPOINT_URL",
        ) from error
