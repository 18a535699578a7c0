"""A moto S3 server whose requests can be watched: to act in the middle of an upload, which no delay can time."""

import logging
import threading
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from tests.fault.harness import TINY, Place, prepared

BUCKET = "fault"
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing-secret", "AWS_DEFAULT_REGION": "us-east-1"}

Watcher = Callable[[str, str], None]


class S3Server:
    """Serves on 127.0.0.1 while inside `with`. `watcher(method, path)` is called before a request is carried out."""

    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self._names = count()
        self.env = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}"}

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        watcher = self.watcher
        if watcher is not None:
            watcher(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def __enter__(self) -> "S3Server":
        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._client().create_bucket(Bucket=BUCKET)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()

    def _client(self) -> Any:
        return boto3.session.Session(KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]).client(
            "s3", endpoint_url=self.env["AWS_ENDPOINT_URL"], region_name=KEYS["AWS_DEFAULT_REGION"]
        )

    def place(
        self, folder: Path, backend: str = "cpu", *, flags: tuple[str, ...] = TINY, with_data: bool = True
    ) -> Place:
        """A workspace under a prefix of its own, with prepared data in it or empty. `env` must be set here too."""
        name = f"ws-{next(self._names)}"
        if with_data:
            base = prepared(flags)
            for path in (path for path in base.rglob("*") if path.is_file() and ".scratch" not in path.parts):
                self._client().put_object(
                    Bucket=BUCKET, Key=f"{name}/{path.relative_to(base).as_posix()}", Body=path.read_bytes()
                )
        return Place(f"s3://{BUCKET}/{name}", folder, (*flags, f"--backend={backend}"), self.env)
