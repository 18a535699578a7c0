"""The interruption notice of a Spot instance, from a server that answers as EC2's instance metadata does."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3

from jobs.node import spot
from pipeline.core.stop import StopSignal
from tests.jobs.node.entries import READY, entry, job_env, python, read_until
from tests.jobs.targets.local.waiting import until
from tests.kit.ports import free_port


class Metadata(ThreadingHTTPServer):
    """Instance metadata: a token is valid until `expire` is called."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.notice, self.token, self.asked = b"", "token-1", 0

    @property
    def env(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self.server_port}/"
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": url, "AWS_EC2_METADATA_DISABLED": "false", "AWS_BATCH_JOB_ID": "j"}


class Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_PUT(self) -> None:
        assert (self.path, self.headers["x-aws-ec2-metadata-token-ttl-seconds"]) == ("/latest/api/token", "21600")
        self._answer(200, self.server.token.encode())

    def do_GET(self) -> None:
        self.server.asked += 1
        is_known = self.headers["x-aws-ec2-metadata-token"] == self.server.token
        path_is_right = self.path == "/latest/meta-data/spot/instance-action"
        self._answer(401 if not is_known else 200 if path_is_right and self.server.notice else 404, self.server.notice)

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@contextmanager
def metadata() -> Iterator[Metadata]:
    with Metadata() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def test_a_notice_sets_the_stop_signal_also_after_the_token_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spot, "POLL_S", 0.02)
    with metadata() as server:
        stop = StopSignal()
        spot.watch_spot_notice(stop, server.env)
        until(lambda: server.asked > 2)
        assert not stop.is_set()
        server.token = "token-2"
        server.notice = b'{"action": "terminate", "time": "2026-11-20T08:22:00Z"}'
        assert stop.wait(20)
        assert stop.reason == spot.SPOT_NOTICE


def test_failures_that_are_apart_do_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these is a single timeout. In a long job, the token expires in between."""
    timeout = urllib3.exceptions.TimeoutError()
    answers: list[Any] = [
        *((200, b"token"), timeout, (404, b""), timeout, (404, b""), timeout, (401, b"")),
        *(timeout, (200, b"token"), (200, b"{}")),
    ]

    class Pool:
        def __init__(self, **_: object) -> None:
            """Remember nothing."""

        def request(self, *_: object, **__: object) -> SimpleNamespace:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(status=answer[0], data=answer[1])

    monkeypatch.setattr(spot, "POLL_S", 0.001)
    monkeypatch.setattr(urllib3, "PoolManager", Pool)
    stop = StopSignal()
    spot._poll(stop, "http://127.0.0.1")
    assert stop.reason == spot.SPOT_NOTICE and not answers


@pytest.mark.parametrize(
    "env",
    [{}, {"AWS_BATCH_JOB_ID": "j", "AWS_EC2_METADATA_DISABLED": "true"}, {"AWS_BATCH_JOB_ID": "j"}],
    ids=["not on AWS Batch", "disabled", "not reachable"],
)
def test_the_thread_does_not_run_where_there_are_no_notices(env: dict[str, str]) -> None:
    endpoint = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    spot.watch_spot_notice(StopSignal(), endpoint | env)
    until(lambda: "spot notice" not in [thread.name for thread in threading.enumerate()])


@pytest.mark.fault
def test_a_job_saves_and_ends_as_preempted_after_a_notice(tmp_path: Path) -> None:
    code = READY + "signal.signal(15, lambda *_: (print('saved', flush=True), sys.exit(143))); time.sleep(100)"
    with metadata() as server:
        process = entry(*python(code), env=job_env(tmp_path) | server.env)
        read_until(process, "ready")
        server.notice = b'{"action": "terminate"}'
        out, err = process.finish()
    assert (process.returncode, out) == (143, "saved\n")
    assert "stopping the command: the Spot instance will be reclaimed" in err
    assert not (tmp_path / "cycles/2026-11-20/jobs/post-mortem").exists()
