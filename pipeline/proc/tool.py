"""Run external programs within limits of time and output, and end them with all their descendants.

A killed neuron_parallel_compile leaves compilers running. The ranks of a trial run are in separate sessions (torchrun
is started so), which a signal to the process group does not reach, and lose their parents if those die first. So
descendants are also identified by a mark in their environment.
On a faulty device, tools hang, print half a response or flood their output, which must not hang or crash the check.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.atomic import sweep_temps, temp_path_for
from pipeline.io.paths import temporary_folder
from pipeline.proc.children import end_marked, kill_marked, processes_with_mark

# Not on PATH under every container entry point.
TOOL_FOLDERS = ("/opt/aws/neuron/bin", "/opt/amazon/efa/bin")
OUTPUT_LIMIT_BYTES = 8 * 2**20
MARK_VARIABLE, FOLDER_VARIABLE = "TRN_PROCESS_TREE", "TRN_GUARD"  # without the prefix TRNPIPE_ of settings
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NOT_INSTALLED = "is not installed"
_MAX_LINE_LENGTH = 300


class ProcessTree:
    """A running program, which leads a new session, and all its descendants."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> None:
        """Start the program. Raises OSError if it cannot be started."""
        self._mark = f"{os.getpid()}-{time.monotonic_ns()}"
        self._process = subprocess.Popen(  # noqa: S603 - a list, no shell
            list(command),
            cwd=cwd,
            env={**env, MARK_VARIABLE: self._mark},
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def poll(self) -> int | None:
        """Return the exit code of the program itself, None while it runs."""
        return self._process.poll()

    def members(self) -> list[psutil.Process]:
        """Return the living processes of its session or with its mark, and their descendants."""
        processes = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
        pids = {pid for pid in processes if _session(pid) == self._process.pid}
        pids |= processes.keys() & processes_with_mark(MARK_VARIABLE, self._mark.__eq__)[0]
        while children := {pid for pid, process in processes.items() if process.info["ppid"] in pids} - pids:
            pids |= children
        ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return [processes[pid] for pid in pids if processes[pid].info["status"] not in ended]

    def end(self, grace_s: float, *, kill_wait_s: float = 3.0) -> None:
        """Send SIGTERM to all members, SIGKILL after `grace_s` to the remaining ones, and wait up to `kill_wait_s`."""
        for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_wait_s)):
            deadline = time.monotonic() + wait_s
            signalled: set[psutil.Process] = set()
            while members := self.members():
                for process in members:
                    if process not in signalled:
                        with suppress(psutil.NoSuchProcess):
                            process.send_signal(signum)
                        signalled.add(process)
                self._process.poll()  # reaps the program
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.1)
        if not members:
            end_marked(MARK_VARIABLE, self._mark.__eq__)  # processes that were starting during the scan
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)


@contextmanager
def process_tree(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> Iterator[ProcessTree]:
    """Start `command` with its output and errors in the file `log`. On exit all its processes are killed."""
    with log.open("wb") as out:
        try:
            tree = ProcessTree(command, cwd=cwd, env=env, out=out, err=out)
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(
                f"{command[0]} cannot be started: {error.strerror}",
                expected="the Neuron tools on PATH (torch-neuronx and neuronx-cc, as in the neuron image)",
                next_command="run this on a Trainium machine in that image, or with another --backend",
            ) from error
    try:
        yield tree
    finally:
        tree.end(0.0)


def host_memory_bytes(limits: Sequence[Path] = CGROUP_LIMITS) -> int:
    """Return the memory of this machine, or of the container if that is less."""
    total = psutil.virtual_memory().total
    for path in limits:
        with suppress(OSError, ValueError):  # no such controller, or "max"
            total = min(total, int(path.read_text()))
    return total


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # ended since, or owned by another user
        return None


@dataclass(frozen=True)
class ToolRun:
    """The result of running a program.

    exit_code: None if the program was killed. failure: why it could not be started or was killed, else empty.
    num_left: number of its processes that SIGKILL did not end, such as one stuck in a driver.
    """

    command: tuple[str, ...]
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    failure: str = ""
    num_left: int = 0
    seconds: float = 0.0

    @property
    def output(self) -> str:
        return f"{self.stdout}\n{self.stderr}"

    def summary(self) -> str:
        """Return one line with the outcome and the last line of output."""
        outcome = self.failure or f"exit code {self.exit_code}"
        stuck = f"; {self.num_left} of its processes cannot be killed" if self.num_left else ""
        line = last_line(self.stderr) or last_line(self.stdout) or "no output"
        return f"{Path(self.command[0]).name}: {outcome}{stuck}: {line}"


def run_tool(
    command: Sequence[str],
    *,
    timeout_s: float,
    stop: StopSignal,
    env: Mapping[str, str] | None = None,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
) -> ToolRun:
    """Run `command` to its end or a limit. Raises Preempted if stopped. Failures of the program are returned.

    Args:
        env: its environment (default: that of this process).
        output_limit_bytes: limit of standard output and of standard error. A program that exceeds it is killed and its
            output cut.
    """
    environment = dict(os.environ if env is None else env)
    program = shutil.which(command[0], path=os.pathsep.join((environment.get("PATH", os.defpath), *TOOL_FOLDERS)))
    if program is None:
        return ToolRun(tuple(command), failure=NOT_INSTALLED)
    full_command, started = (program, *command[1:]), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=temporary_folder(), ignore_cleanup_errors=True) as folder:
            outputs = Path(folder) / "stdout", Path(folder) / "stderr"
            # Two files, because warnings in the middle of the output would spoil it.
            with outputs[0].open("wb") as out, outputs[1].open("wb") as err:
                tree = ProcessTree(full_command, cwd=Path(folder), env=environment, out=out, err=err)
            failure, pause_s = "", 0.01
            try:
                while not failure:
                    code = tree.poll()
                    stop.raise_if_set(f"running {Path(program).name}")
                    if max(file.stat().st_size for file in outputs) > output_limit_bytes:
                        failure = f"wrote more than {output_limit_bytes} bytes"
                    elif code is not None:
                        break
                    elif time.monotonic() >= started + timeout_s:
                        failure = f"did not end within {timeout_s:g} s"
                    stop.wait(pause_s)
                    pause_s = min(0.1, 1.5 * pause_s)
            finally:
                tree.end(0.0)
            stdout, stderr = (_read(file, output_limit_bytes) for file in outputs)
            seconds, num_left = time.monotonic() - started, len(tree.members()) if failure else 0
            return ToolRun(full_command, code, stdout, stderr, failure, num_left, seconds)
    except OSError as error:  # not a program for this machine, no memory for a process, no space for its output
        failure = f"could not be run: {error.strerror or error}"
        return ToolRun(tuple(command), failure=failure, seconds=time.monotonic() - started)


def _read(file: Path, limit_bytes: int) -> str:
    with file.open("rb") as content:
        return content.read(limit_bytes).decode(errors="replace")


def last_line(text: str) -> str:
    """Return the last line that is not blank, without control characters, cut to 300 characters."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    line = next((line for line in lines if line), "")
    return "".join(char if char.isprintable() else " " for char in line).strip()[:_MAX_LINE_LENGTH]


# Child processes and temporary files that are removed with this process. kill -9 leaves both. The next start sweeps
# folders that their owner no longer locks, and kills the processes with the mark of a folder that does not exist.

LOCKED_AFTER_S = 1.0
"""The owner locks its folder within this time. An unlocked older folder has a dead owner and is swept."""


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes started inside the context. Restores the earlier values on exit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def guarded_temp_folder() -> Iterator[Path]:
    """Create a folder for the temporary files of this process and of those started inside the context.

    On exit the folder is removed and these processes are killed. A process can have one such folder at a time. Raises
    TransientError if no folder can be created.
    """
    parent = Path()
    try:
        parent = Path(tempfile.gettempdir())
        sweep_temps(parent, LOCKED_AFTER_S)
        kill_marked(FOLDER_VARIABLE, lambda folder: not Path(folder).exists())
        folder = temp_path_for(parent / "health")
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TransientError(
            f"the checks cannot be started: {error}",
            expected=f"a writable folder for temporary files ({parent})",
            next_command="check that machine; the job itself may be retried elsewhere",
        ) from error
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        with suppress(OSError):  # a file system without locks: the folder is never swept
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(end_marked, FOLDER_VARIABLE, str(folder).__eq__)
        # Children inherit the mark. Their temporary files and those of this process are created in the folder.
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(folder)
        stack.enter_context(temporary_environment({FOLDER_VARIABLE: str(folder), "TMPDIR": str(folder)}))
        yield folder
