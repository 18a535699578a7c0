"""Outside programs: each ends with all processes below it, within limits of time and output.

neuron_parallel_compile does not end what it started: killed, it leaves compilers running. Ranks of a trial run sit in
sessions of their own (torchrun is started so), where a signal to the process group does not reach them, and have lost
their parents when those died first. So members are known by a mark in their environment, too.
A sick device makes its tools hang, print half an answer or flood; none of that may hang or crash the check.
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
MARK_VARIABLE, FOLDER_VARIABLE = "TRN_PROCESS_TREE", "TRN_GUARD"  # not TRNPIPE_: those are settings
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NOT_INSTALLED = "is not installed"
_SEEN_LENGTH = 300


class ProcessTree:
    """A running program, the leader of its own session, and whatever it started."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> None:
        """Starts it. Raises OSError."""
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
        """The exit code of the program itself, None while it runs."""
        return self._process.poll()

    def members(self) -> list[psutil.Process]:
        """Living processes of its session, with its mark, or below one of these."""
        processes = {one.pid: one for one in psutil.process_iter(["ppid", "status"])}
        found = {pid for pid in processes if _session(pid) == self._process.pid}
        found |= processes.keys() & processes_with_mark(MARK_VARIABLE, self._mark.__eq__)[0]
        while more := {pid for pid, one in processes.items() if one.info["ppid"] in found} - found:
            found |= more
        ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        return [processes[pid] for pid in found if processes[pid].info["status"] not in ended]

    def end(self, grace_s: float, *, kill_wait_s: float = 3.0) -> None:
        """SIGTERM to all, after `grace_s` SIGKILL to who is left, and at most `kill_wait_s` for their end."""
        for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, kill_wait_s)):
            until = time.monotonic() + wait_s
            told: set[psutil.Process] = set()
            while members := self.members():
                for process in members:
                    if process not in told:
                        with suppress(psutil.NoSuchProcess):
                            process.send_signal(signum)
                        told.add(process)
                self._process.poll()  # takes the program's exit code, so that it is no zombie
                if time.monotonic() >= until:
                    break
                time.sleep(0.1)
        if not members:
            end_marked(MARK_VARIABLE, self._mark.__eq__)  # what was just being started
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)


@contextmanager
def process_tree(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> Iterator[ProcessTree]:
    """Start `command` with both outputs in the file `log`; at the end no process of it is left, whatever happened."""
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
    """Memory of this machine, or of the container where that is less."""
    total = psutil.virtual_memory().total
    for path in limits:
        with suppress(OSError, ValueError):  # no such controller, or "max"
            total = min(total, int(path.read_text()))
    return total


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # gone meanwhile, or another user's
        return None


@dataclass(frozen=True)
class ToolRun:
    """How a program ended.

    exit_code: None if it did not end by itself. failure: why it could not be started or was ended by us, else empty.
    num_left: processes of it that SIGKILL did not end, as one stuck in a driver.
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
        """One line: how it ended and its last words."""
        how = self.failure or f"exit code {self.exit_code}"
        stuck = f"; {self.num_left} of its processes cannot be killed" if self.num_left else ""
        words = last_line(self.stderr) or last_line(self.stdout) or "no output"
        return f"{Path(self.command[0]).name}: {how}{stuck}: {words}"


def run_tool(
    command: Sequence[str],
    *,
    timeout_s: float,
    stop: StopSignal,
    env: Mapping[str, str] | None = None,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
) -> ToolRun:
    """Run `command` to its end or a limit. Raises Preempted on the stop signal, and nothing for what a tool does.

    Args:
        env: its environment; None is ours.
        output_limit_bytes: of standard output and error each; more ends it, and is cut off.
    """
    environment = dict(os.environ if env is None else env)
    found = shutil.which(command[0], path=os.pathsep.join((environment.get("PATH", os.defpath), *TOOL_FOLDERS)))
    if found is None:
        return ToolRun(tuple(command), failure=NOT_INSTALLED)
    words, started = (found, *command[1:]), time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=temporary_folder(), ignore_cleanup_errors=True) as folder:
            outputs = Path(folder) / "stdout", Path(folder) / "stderr"
            # Two files: warnings in the middle of an answer would spoil it.
            with outputs[0].open("wb") as to_out, outputs[1].open("wb") as to_err:
                tree = ProcessTree(words, cwd=Path(folder), env=environment, out=to_out, err=to_err)
            failure, pause_s = "", 0.01
            try:
                while not failure:
                    code = tree.poll()
                    stop.raise_if_set(f"running {Path(found).name}")
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
            return ToolRun(words, code, stdout, stderr, failure, num_left, seconds)
    except OSError as error:  # not a program for this machine, no memory for a process, no space for its output
        why = f"could not be run: {error.strerror or error}"
        return ToolRun(tuple(command), failure=why, seconds=time.monotonic() - started)


def _read(file: Path, limit_bytes: int) -> str:
    with file.open("rb") as content:
        return content.read(limit_bytes).decode(errors="replace")


def last_line(text: str) -> str:
    """The last line with words, printable and cut to a length that fits a message."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    line = next((line for line in lines if line), "")
    return "".join(char if char.isprintable() else " " for char in line).strip()[:_SEEN_LENGTH]


# Child processes and temporary files that are gone when we are. kill -9 removes neither the children of a process nor
# its files. The next start does: it sweeps the folder, on which the owner holds a lock while it lives, and kills the
# processes that carry the mark of a folder that is gone.

LOCKED_AFTER_S = 1.0
"""A folder is locked by its owner before; what nobody holds then is of a dead one, whose processes may hold devices."""


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started inside; restore the earlier values on leaving."""
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
    """Yield a folder for the temporary files of this process and of all it starts inside. One at a time in a process.

    On leaving, the folder is removed and what was started inside is killed. Raises TransientError if no folder can be
    made.
    """
    place = Path()
    try:
        place = Path(tempfile.gettempdir())
        sweep_temps(place, LOCKED_AFTER_S)
        kill_marked(FOLDER_VARIABLE, lambda folder: not Path(folder).exists())
        folder = temp_path_for(place / "health")
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TransientError(
            f"the checks cannot be started: {error}",
            expected=f"a folder for temporary files that can be written ({place})",
            next_command="look at that machine; the job itself may be retried elsewhere",
        ) from error
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        with suppress(OSError):  # a file system without locks: the folder is never swept
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(end_marked, FOLDER_VARIABLE, str(folder).__eq__)
        # Children get the mark; their temporary files and ours go into the folder.
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(folder)
        stack.enter_context(temporary_environment({FOLDER_VARIABLE: str(folder), "TMPDIR": str(folder)}))
        yield folder
