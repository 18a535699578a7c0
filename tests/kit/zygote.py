"""`python -m <module>` without the imports: forked from a process of this worker that has them behind it.

Torch, pyarrow and boto3 take 3 s of processor time to import, torch._dynamo as much again. torch_xla stays out: it is
there, or not, before the first backward pass. A forked child is a real process: session leader, with its own
environment, output and exit code, killed for real. It differs from `python -m` in what is decided before the first line
of Python: /proc shows the command line and environment of the zygote, hash seeds are the zygote's, and PYTHON...
variables do nothing. And it leaves without taking its modules down, which costs a second more; what is to run at exit
runs. So a test that proves something about these, or compares with a run that shall differ in them, takes a process of
its own.
"""

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
IMPORTED = (
    "boto3",
    "pyarrow.parquet",
    "torch._dynamo",  # 3 s, which the first optimizer of a rank would take
    "hypothesis",  # with pytest: modules of tests, in which ranks find their cases
    "pytest",
    "pipeline.stages.train",
    "pipeline.stages.embed",
    "pipeline.stages.evaluate",
)
STANDARD_INPUT, STANDARD_OUTPUT, STANDARD_ERROR = range(3)
REQUEST_BYTES = 2**20


class Forked:
    """What `subprocess.Popen` is to a child of this process, for one of the zygote."""

    def __init__(
        self,
        module: str,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        stdout: IO[Any],
        stderr: IO[Any],
        stdin: IO[Any] | None = None,
        zygote: str = "",
    ) -> None:
        """`zygote` is the socket of another process's."""
        self.args = ["python", "-m", module, *words]
        self.returncode: int | None = None
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(zygote or zygote_socket())
        request = json.dumps({"module": module, "words": list(words), "env": dict(env), "cwd": str(cwd)}).encode()
        streams = [stdout, stderr, *([stdin] if stdin else [])]
        socket.send_fds(self._line, [request], [stream.fileno() for stream in streams])
        self.pid = int(self._read())

    def poll(self) -> int | None:
        return self._end(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._end(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._line], [], [], timeout_s)[0]:
            self.returncode = int(self._read())
            self._line.close()
        return self.returncode

    def _read(self) -> bytes:
        """One number, ended by a newline; two of them never come without something between."""
        data = b""
        while not data.endswith(b"\n"):
            block = self._line.recv(1)
            assert block, "the zygote has ended"
            data += block
        return data


def run(
    module: str, *words: str, env: Mapping[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 400.0
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` with `python -m` gives. `env`: changes to this process's."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = Forked(module, words, env={**os.environ, **(env or {})}, cwd=cwd, stdout=out, stderr=err)
        try:
            code = child.wait(timeout_s)
        finally:
            child.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(child.args, code, out.read().decode(), err.read().decode())


@cache
def zygote_socket() -> str:
    """The socket of this process's zygote, which ends with it."""
    path = str(Path(tempfile.mkdtemp(prefix="trnpipe-zygote-")) / "socket")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kit.zygote", path]
    zygote = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert zygote.stdin and zygote.stdout
    assert zygote.stdout.readline() == b"ready\n"
    _KEPT.append(zygote)
    return path


_KEPT: list[subprocess.Popen[bytes]] = []


def serve(path: str) -> str:
    """Fork for every request. Returns in the children alone: the module that each is to run."""
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # a collection in a child would copy every page of what was imported
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.write(STANDARD_OUTPUT, b"ready\n")
    while True:
        ready, _, _ = select.select([listener.fileno(), STANDARD_INPUT], [], [], 1.0)
        if STANDARD_INPUT in ready:  # closed: the worker has ended
            shutil.rmtree(Path(path).parent)
            os._exit(0)
        if listener.fileno() in ready:
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _attend(line)
            line.close()
        while _reaped():
            pass


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _attend(line: socket.socket) -> str:
    """Start the child, tell its number, and how it ends."""
    data, descriptors, _, _ = socket.recv_fds(line, REQUEST_BYTES, 3)
    request = json.loads(data)
    child = os.fork()
    if child:
        line.sendall(b"%d\n" % child)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        line.sendall(b"%d\n" % code)
        os._exit(0)
    os.setsid()
    line.close()
    output, error, *given = descriptors
    standard_input = given[0] if given else os.open(os.devnull, os.O_RDONLY)
    for descriptor, standard in zip((standard_input, output, error), range(3), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = [request["module"], *request["words"]]
    module: str = request["module"]
    return module


def _leave(code: object) -> None:
    """What sys.exit(code) does, less taking the interpreter down."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    try:
        runpy.run_module(serve(sys.argv[1]), run_name="__main__", alter_sys=True)
    except SystemExit as end:
        _leave(end.code)
    _leave(None)
