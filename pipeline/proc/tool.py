"""Run external programs with limits on their time and output, and end them together with all their descendants.

Killing a program is not enough. For example, if neuron_parallel_compile is killed, its compilers keep running. The
ranks of a trial run are in separate sessions, so signals to the process group don't reach them, and they lose their
parent if it dies first. This is why we also identify descendants by a mark in their environment.

On a faulty device, tools may hang, print only half of their output, or print far too much. None of this may cause our
health check to hang or crash.
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

# Some container entry points don't include these in PATH.
TOOL_FOLDERS = ("/opt/aws/neuron/bin", "/opt/amazon/efa/bin")
OUTPUT_LIMIT_BYTES = 8 * 2**20
MARK_VARIABLE, FOLDER_VARIABLE = "TRN_PROCESS_TREE", "TRN_GUARD"  # not TRNPIPE_, because these are not settings
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NOT_INSTALLED = "is not installed"
_MAX_LINE_LENGTH = 300


class ProcessTree:
    """A running program and all its descendants. The program is started in a new session."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> None:
        """Start the program. Raises OSError if it can't be started."""
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
        """Return the exit code of the program itself, or None while it is running."""
        return self._process.poll()

    def members(self) -> list[psutil.Process]:
        """Return all running processes that are in the program's session or carry its mark, and their descendants."""
        processes = {process.pid: process for process in psutil.process_iter(["ppid", "status"])}
        pids = {pid for pid in processes if _session(pid) == self._process.pid}
        pids |= processes.keys() & processes_with_mark(MARK_VARIABLE, self._mark.__eq__)[0]
        while children := {pid for pid, process in processes.items() if process.info["ppid"] in pids} - pids:
            pids |= children
        ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return [processes[pid] for pid in pids if processes[pid].info["status"] not in ended]

    def end(self, grace_s: float, *, kill_wait_s: float = 3.0) -> None:
        """End all members.

        This sends SIGTERM, waits up to `grace_s` seconds for them to exit, sends SIGKILL to those that are left, and
        waits up to `kill_wait_s` seconds for those.
        """
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
            end_marked(MARK_VARIABLE, self._mark.__eq__)  # a process that was just starting may have been missed above
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)


@contextmanager
def process_tree(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> Iterator[ProcessTree]:
    """Start a program and write its output and errors to a log file. All its processes are killed on exit."""
    with log.open("wb") as out:
        try:
            tree = ProcessTree(command, cwd=cwd, env=env, out=out, err=out)
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(
                f"{command[0]} cannot be started: {error.strerror}",
                expected="the Neuron tools on PATH (torch-neuronx and neuronx-cc, as in the neuron image)",
                next_command="run this in the neuron image on a Trainium instance, or use a different --backend",
            ) from error
    try:
        yield tree
    finally:
        tree.end(0.0)


def host_memory_bytes(limits: Sequence[Path] = CGROUP_LIMITS) -> int:
    """Return the total memory of this host, or the memory limit of the container if it is lower."""
    total = psutil.virtual_memory().total
    for path in limits:
        with suppress(OSError, ValueError):  # the file doesn't exist, or it contains "max"
            total = min(total, int(path.read_text()))
    return total


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # the process has exited or belongs to a different user
        return None


@dataclass(frozen=True)
class ToolRun:
    """The result of running a program.

    `exit_code` is None if the program was killed, and `failure` is empty unless the program was killed or could not be
    started. `num_left` is the number of processes that survived SIGKILL, for example because they hang in a driver.
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
        """Return a single line with the outcome and the last line of the output."""
        outcome = self.failure or f"exit code {self.exit_code}"
        stuck = f"; {self.num_left} of its processes could not be killed" if self.num_left else ""
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
    """Run a program until it exits or exceeds a limit. Failures are returned instead of raised.

    Args:
        command: the command line.
        timeout_s: the program is killed after this many seconds.
        stop: the stop signal. Raises Preempted if it is set.
        env: environment of the program (default: the environment of this process).
        output_limit_bytes: the program is killed if either standard output or standard error exceeds this size, and the
            output is truncated.
    """
    environment = dict(os.environ if env is None else env)
    program = shutil.which(command[0], path=os.pathsep.join((environment.get("PATH", os.defpath), *TOOL_FOLDERS)))
    if program is None:
        return ToolRun(tuple(command), failure=NOT_INSTALLED)
    full_command, started = (program, *command[1:]), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=temporary_folder(), ignore_cleanup_errors=True) as folder:
            outputs = Path(folder) / "stdout", Path(folder) / "stderr"
            # Use separate files, so that warnings don't end up in the middle of the output.
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
    # The program may be built for a different architecture, or there is not enough memory or disk space to run it.
    except OSError as error:
        failure = f"could not be run: {error.strerror or error}"
        return ToolRun(tuple(command), failure=failure, seconds=time.monotonic() - started)


def _read(file: Path, limit_bytes: int) -> str:
    with file.open("rb") as content:
        return content.read(limit_bytes).decode(errors="replace")


def last_line(text: str) -> str:
    """Return the last non-blank line without control characters, truncated to 300 characters."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    line = next((line for line in lines if line), "")
    return "".join(char if char.isprintable() else " " for char in line).strip()[:_MAX_LINE_LENGTH]


# Clean up child processes and temporary files when this process exits. If it is killed with SIGKILL, it can't do so.
# Therefore the next process removes folders that their owner no longer locks, and kills processes that carry the mark
# of a folder that no longer exists.

LOCKED_AFTER_S = 1.0
"""Processes lock their folder within this time. If an older folder isn't locked, its owner has died."""


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the context and restore their previous values on exit."""
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
    """Create a folder for all temporary files of this process and of its child processes.

    On exit, the folder is removed and all child processes that were started inside the context are killed. Contexts
    can't be nested. Raises TransientError if the folder can't be created.
    """
    parent = Path()
    try:
        parent = Path(tempfile.gettempdir())
        sweep_temps(parent, LOCKED_AFTER_S)
        kill_marked(FOLDER_VARIABLE, lambda folder: not Path(folder).exists())
        folder = temp_path_for(parent / "trnpipe")
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TransientError(
            f"cannot create a folder for temporary files: {error}",
            expected=f"that {parent} is writable and not full",
            next_command="check this machine, or retry the job on a different one",
        ) from error
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        with suppress(OSError):  # without support for locks, the folder is never removed by other processes
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(end_marked, FOLDER_VARIABLE, str(folder).__eq__)
        # Child processes inherit the mark and TMPDIR. The latter only affects this process if `tempdir` is set as well.
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(folder)
        stack.enter_context(temporary_environment({FOLDER_VARIABLE: str(folder), "TMPDIR": str(folder)}))
        yield folder
