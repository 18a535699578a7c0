"""Code in processes that have the stand-in device."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent, indent

import pytest

from tests.kit.ports import free_port
from tests.native.standin import ROOT, environment

OPEN = """
import torch
from torch import nn
from pipeline.backends import module_device, on_neuron, open_backend, process_group
from pipeline.core.errors import ConfigError
backend = open_backend("neuron")
"""

InChild = Callable[..., str]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    env = environment(tmp_path_factory.mktemp("device"))
    words = [sys.executable, "-m", "tests.native.server"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def in_child(request: pytest.FixtureRequest, tmp_path: Path) -> InChild:
    """What code wrote in a process of its own, which has to succeed; `missing`: operators the device does not have.

    All of one test share a cache of compiled programs.
    """
    server: subprocess.Popen[str] = request.getfixturevalue("server")  # now: without settings from outside

    def run_in_child(code: str, *, missing: tuple[str, ...] = ()) -> str:
        assert server.stdin and server.stdout
        said = tmp_path / "said"
        asked = {"code": dedent(code), "said": str(said), "cache": str(tmp_path / "neff"), "missing": missing}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        ended = server.stdout.readline().strip()
        text = said.read_text() if said.exists() else ""
        assert ended == "0", f"exit {ended or 'of the server'}: {text[-8000:]}"
        return text

    return run_in_child


@pytest.fixture
def opened(in_child: InChild) -> InChild:
    """The same, with `backend` open."""

    def run_opened(code: str, *, missing: tuple[str, ...] = ()) -> str:
        return in_child(OPEN + dedent(code), missing=missing)

    return run_opened


TWO = """
import os
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "%d", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
other = os.fork()
os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if other else "1"
def both():
    import torch
    import torch.distributed as dist
%s
if other:
    both()
    assert os.waitpid(other, 0)[1] == 0, "rank 1 has failed"
else:
    import traceback
    try:
        both()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
"""


@pytest.fixture
def in_two_ranks(in_child: InChild) -> InChild:
    """The same as in_child, of code that two ranks run, with torchrun's variables."""

    def run_in_two_ranks(code: str, *, missing: tuple[str, ...] = ()) -> str:
        return in_child(TWO % (free_port(), indent(dedent(code), "    ")), missing=missing)

    return run_in_two_ranks
