"""An AWS account in moto, in a process of its own: Terraform and jobs reach it by its address."""

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.kit.ports import free_port

START_S = 300.0


@contextmanager
def moto_account(log: Path) -> Iterator[str]:
    """Its URL. AWS's own policies are there; jobs of Batch end at once."""
    url = f"http://127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", url.rpartition(":")[2]]
    env = os.environ | {"MOTO_IAM_LOAD_MANAGED_POLICIES": "true"}
    with log.open("w") as output, subprocess.Popen(words, env=env, stdout=output, stderr=output) as server:
        try:
            _wait_for(url, server, log)
            config = urllib.request.Request(
                f"{url}/moto-api/config", b'{"batch": {"use_docker": false}}', method="POST"
            )
            urllib.request.urlopen(config).close()
            yield url
        finally:
            server.terminate()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/moto-api/data.json").close()
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
        else:
            return
    raise AssertionError(f"moto did not start within {START_S:.0f} s: {log.read_text()}")
