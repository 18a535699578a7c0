"""A proxy before the S3 server that breaks chosen requests."""

import http.client
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from tests.kit.storages import FAST

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>reduce</Message></Error>"
CONFLICT = b"<?xml version='1.0'?><Error><Code>ConditionalRequestConflict</Code><Message>busy</Message></Error>"


@dataclass
class Fault:
    """Break the next `times` requests of `method` whose URL holds `part`.

    kind: slow_down (503), conflict (409), cut (half of the true body, then the connection closes),
    lost (carried out, but the answer never arrives), denied (403).
    """

    kind: str
    method: str
    part: str = ""
    times: int = 1
    then: Callable[[], None] = lambda: None
    hits: int = 0


@dataclass
class Proxy:
    """The faults to come and the requests seen, as (method, path with query)."""

    upstream: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, method: str, path: str) -> Fault | None:
        with self.lock:
            self.seen.append((method, path))
            for fault in self.faults:
                if fault.method == method and fault.part in path and fault.hits < fault.times:
                    fault.hits += 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body go out as two packets: 40 ms each time with it
    proxy: Proxy

    def log_message(self, format: str, *args: object) -> None:
        return

    def _serve(self) -> None:
        if self.headers.get("Expect") == "100-continue":
            pass  # BaseHTTPRequestHandler has answered it
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.proxy.take(self.command, self.path)
        kind = fault.kind if fault else ""
        if fault:
            fault.then()
        if kind in ("slow_down", "conflict", "denied"):
            status, text = {"slow_down": (503, SLOW_DOWN), "conflict": (409, CONFLICT), "denied": (403, b"")}[kind]
            self._answer(status, [], text, len(text))
            return
        upstream = http.client.HTTPConnection(*self.proxy.upstream)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data = answer.read()
        upstream.close()
        if kind == "lost":
            self.close_connection = True
            return
        skip = ("content-length", "transfer-encoding", "connection", "server", "date")
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in skip]
        length = int(answer.getheader("Content-Length") or len(data))
        self._answer(answer.status, headers, data[: len(data) // 2] if kind == "cut" else data, length)
        self.close_connection = self.close_connection or kind == "cut"

    def _answer(self, status: int, headers: list[tuple[str, str]], data: bytes, length: int) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve


@pytest.fixture
def proxy(aws: str, moto_address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """S3 through the proxy."""
    proxy = Proxy(moto_address)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
    yield proxy
    server.shutdown()
    server.server_close()


@pytest.fixture
def s3(proxy: Proxy, s3_uri: str, stop: StopSignal) -> Storage:
    """S3 storage behind the proxy, with a short retry budget."""
    return open_storage(s3_uri, retry=FAST, stop=stop)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small folder to commit."""
    folder = tmp_path / "made"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "sub" / "b.txt").write_bytes(b"second")
    (folder / "empty").write_bytes(b"")
    return folder
