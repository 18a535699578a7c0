"""The boto3 client: one place for its settings, its counting and its retries."""

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import boto3
import botocore.loaders
import botocore.session
from botocore.config import Config

from pipeline.core.stop import StopSignal
from pipeline.io.counts import Operation, RequestCounts
from pipeline.io.retry import RetryPolicy, call_with_retry
from pipeline.io.s3_errors import S3_ERRORS, is_retryable, translate

T = TypeVar("T")

# Batch gives 30 s from SIGTERM to SIGKILL and we promise 20: a thread in a dead connection must end within it.
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 10
MAX_CONNECTIONS = 32

# Each client has a session of its own, with the credentials of that moment, but they share the parsed service model
# (0.2 s to load). Making a client is not thread-safe; using one is.
_LOADER = botocore.loaders.create_loader()
_MAKING = threading.Lock()


class S3Client:
    """A boto3 client with its retry policy; `raw` is boto3's. Thread-safe, and usable after a fork.

    Counts every request that is sent. boto3's own retries are off, so that the counts and the deadline are true.
    """

    def __init__(self, policy: RetryPolicy, stop: StopSignal) -> None:
        self.policy, self.stop, self.requests = policy, stop, RequestCounts()
        self._pid = os.getpid()
        self._raw = self._connect()

    @property
    def raw(self) -> Any:
        """boto3's client. A forked child gets a new one: two processes must not talk on one connection."""
        if self._pid != os.getpid():
            self._raw, self._pid = self._connect(), os.getpid()
        return self._raw

    def call(self, doing: str, uri: str, request: Callable[[Any], T]) -> T:
        """`request(raw)` under the retry policy; an error at the end becomes one of the family."""
        try:
            return self.attempt(doing, uri, request)
        except S3_ERRORS as error:
            raise translate(error, doing, uri) from error

    def attempt(self, doing: str, uri: str, request: Callable[[Any], T]) -> T:
        """As call(), but boto3's own error comes through, for callers that give it a meaning."""
        return call_with_retry(
            lambda: request(self.raw),
            self.policy,
            retryable=is_retryable,
            stop=self.stop,
            doing=f"{doing} {uri}",
            on_retry=self.requests.add_retry,
        )

    def _connect(self) -> Any:
        """A client from the standard AWS environment; sends nothing yet."""
        custom = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        config = Config(
            retries={"total_max_attempts": 1},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            max_pool_connections=MAX_CONNECTIONS,
            tcp_keepalive=True,
            # bucket.host does not resolve on most servers that are not AWS.
            s3={"addressing_style": "path"} if custom else None,
            user_agent_extra="trnpipe",
        )
        with _MAKING:
            core = botocore.session.Session()
            core.register_component("data_loader", _LOADER)
            raw = boto3.session.Session(botocore_session=core).client("s3", config=config)
        raw.meta.events.register("before-send.s3", self._count)
        return raw

    def _count(self, event_name: str, **_: object) -> None:
        self.requests.add(_operation(event_name.rsplit(".", 1)[-1]))


def _operation(name: str) -> Operation:
    for prefix, operation in _OPERATIONS:
        if name.startswith(prefix):
            return operation
    return "put"


_OPERATIONS: tuple[tuple[str, Operation], ...] = (
    ("Get", "get"),
    ("Head", "head"),
    ("List", "list"),
    ("Delete", "delete"),
    ("Abort", "delete"),
)
