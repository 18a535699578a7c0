"""An S3 server (moto) in this process that can be told to fail for a while."""

import random
import time
from collections.abc import Iterable
from typing import Any

from tests.kit.s3 import MotoServer

BUSY = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>reduce</Message></Error>"
FAILED = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>again</Message></Error>"
HEADERS = [("Content-Type", "application/xml")]


class FailingServer(MotoServer):
    """Within `fail_for`, requests are refused (503), or carried out and answered with 500."""

    def __init__(self, bucket: str, dice: random.Random) -> None:
        super().__init__(bucket)
        self.failed = 0
        self._dice, self._until, self._share = dice, 0.0, 0.0

    def fail_for(self, seconds: float, share: float) -> None:
        """From now on, that share of the requests."""
        self._until, self._share = time.monotonic() + seconds, share

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if time.monotonic() > self._until or self._dice.random() > self._share:
            return super()._serve(environ, start_response)
        self.failed += 1
        if self._dice.random() < 0.3:
            b"".join(super()._serve(environ, lambda *answer: None))
            start_response("500 Internal Server Error", HEADERS)
            return [FAILED]
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("503 Slow Down", HEADERS)
        return [BUSY]
