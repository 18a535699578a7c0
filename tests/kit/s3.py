"""A moto S3 server on 127.0.0.1, and the environment that leads to it."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
from moto import mock_aws
from moto.core.base_backend import BackendDict
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.models import FakeKey, FakeMultipart, s3_backends
from werkzeug.serving import make_server

from pipeline.io.s3_client import new_client


def s3_env(url: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def lead_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let S3 clients in this process and its children use the server."""
    for name, value in s3_env(url).items():
        monkeypatch.setenv(name, value)


@contextmanager
def empty_account() -> Iterator[None]:
    """An empty account of AWS in this process. mock_aws alone would take the buckets of servers in it away for good."""
    kept, names = dict(s3_backends), dict(s3_backends.bucket_accounts)
    files: tuple[Any, ...] = (FakeKey, FakeMultipart)  # every one that was made is closed, whoever it belongs to
    tracked = [kind.instances_tracked for kind in files]
    s3_backends.clear()
    s3_backends.bucket_accounts.clear()
    for kind in files:
        kind.instances_tracked = []
    try:
        with mock_aws(config={"batch": {"use_docker": False}}):
            yield
    finally:
        s3_backends.clear()
        s3_backends.update(kept)
        s3_backends.bucket_accounts.clear()
        s3_backends.bucket_accounts.update(names)
        for kind, instances in zip(files, tracked, strict=True):
            kind.instances_tracked = instances
        in_use: list[Any] = BackendDict._instances  # type: ignore[misc] # generic, and of the class
        if kept and not any(one is s3_backends for one in in_use):
            in_use.append(s3_backends)


class MotoServer:
    """Serves one bucket while inside `with`. `watcher(method, path)` is called before a request is carried out."""

    def __init__(self, bucket: str) -> None:
        self.watcher: Callable[[str, str], None] | None = None
        self.bucket = bucket
        self._app = DomainDispatcherApplication(create_backend_app)
        # S3 carries out one request of a key after the other; moto looks at If-Match and writes in two steps.
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._under_way, self._changed = 0, threading.Condition()
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True, request_handler=MotoRequestHandler)
        self.address = ("127.0.0.1", self._server.server_port)
        self.url = "http://{}:{}".format(*self.address)
        with pytest.MonkeyPatch.context() as patch:
            lead_to(self.url, patch)
            self.client: Any = new_client("s3")

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with self._noted():
            watcher = self.watcher
            if watcher is not None:
                watcher(environ["REQUEST_METHOD"], environ["PATH_INFO"])
            with self._locks[environ["PATH_INFO"]]:
                answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    @contextmanager
    def _noted(self) -> Iterator[None]:
        with self._changed:
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def settle(self) -> None:
        """Until all requests are carried out: those of a client that was killed, too."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._under_way == 0, 60)

    def __enter__(self) -> Self:
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.client.create_bucket(Bucket=self.bucket)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
