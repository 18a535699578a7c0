"""Who a machine is: firmware, metadata service, host name."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeline.health import host
from pipeline.health.host import Identity, ask_imds, read_identity

NITRO = {"sys_vendor": "Amazon EC2", "board_asset_tag": "i-0123456789abcdef0", "product_name": "trn1.32xlarge"}
ANSWERS = {"instance-id": "i-0fedcba9876543210", "instance-type": "trn1.2xlarge"}
BATCH = {"AWS_BATCH_JOB_ID": "7f"}


def found(
    env: dict[str, str] | None = None, dmi: dict[str, str] | None = None, imds: dict[str, str] | None = None
) -> tuple[Identity, list[str]]:
    """The identity, and what the metadata service was asked for."""
    asked: list[str] = []

    def ask(path: str) -> str:
        asked.append(path)
        return (imds or {}).get(path, "")

    who = read_identity(env or {}, dmi=lambda name: (dmi or {}).get(name, ""), imds=ask, host_name=lambda: "box")
    return who, asked


def test_the_firmware_of_nitro_machines_knows() -> None:
    assert found(BATCH, NITRO, ANSWERS) == (Identity("i-0123456789abcdef0", "trn1.32xlarge"), [])


@pytest.mark.parametrize(("env", "dmi"), [(BATCH, {}), ({}, {"sys_vendor": "Amazon EC2"})])
def test_on_ec2_the_metadata_service_is_asked(env: dict[str, str], dmi: dict[str, str]) -> None:
    assert found(env, dmi, ANSWERS)[0] == Identity("i-0fedcba9876543210", "trn1.2xlarge")
    assert found(env, dmi)[0] == Identity("box")
    assert found({**env, "AWS_EC2_METADATA_DISABLED": "True"}, dmi, ANSWERS) == (Identity("box"), [])


def test_elsewhere_nobody_is_asked() -> None:
    laptop = {"sys_vendor": "LENOVO", "board_asset_tag": "Not Available", "product_name": "20XW.x"}
    assert found({}, laptop, ANSWERS) == (Identity("box"), [])


def test_an_answer_that_is_no_instance_id_is_not_believed() -> None:
    portal = dict.fromkeys(ANSWERS, "<html>Please log in</html>")
    assert found(BATCH, {}, portal)[0] == Identity("box")


class _Metadata(BaseHTTPRequestHandler):
    """Version 2 of the service, which answers only with a token."""

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_PUT(self) -> None:
        self._answer(200, "secret" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else "")

    def do_GET(self) -> None:
        allowed = self.headers["X-aws-ec2-metadata-token"] == "secret"
        text = ANSWERS.get(self.path.rpartition("/")[2], "") if allowed else ""
        self._answer(200 if text else 401, f"{text}\n")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def service() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Metadata) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/latest"
        server.shutdown()
        thread.join()


def test_the_service_is_asked_as_it_wants(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "IMDS", service)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # never through a proxy
    assert ask_imds("instance-id") == "i-0fedcba9876543210"
    assert ask_imds("spot/termination-time") == ""
    monkeypatch.setattr(host, "IMDS", "http://127.0.0.1:9/latest")
    assert ask_imds("instance-id") == ""
