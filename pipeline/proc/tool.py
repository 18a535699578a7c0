"""Outside programs: each ends with all processes below it, within limits of time and output.

neuron_parallel_compile does not end what it started: killed, it leaves compilers running. Ranks of a trial run sit in
sessions of their own (torchrun is started so), where a signal to the process group does not reach them, and have lost
their parents when those died first. So members are known by a mark in their environment, too.
A sick device makes its tools hang, print half an answer or flood; none of that may hang or crash the check.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Annotated

import psutil
from pydantic import Field

from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.paths import temporary_folder
from pipeline.proc.children import end_marked, processes_with_mark

# Not on PATH under every container entry point.
TOOL_FOLDERS = ("/opt/aws/neuron/bin", "/opt/amazon/efa/bin")
OUTPUT_LIMIT_BYTES = 8 * 2**20
MARK_VARIABLE = "TRN_PROCESS_TREE"  # not TRNPIPE_: those are settings
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
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

    exit_code: None where it did not end by itself. timed_out: the time limit ended it. failure: why it could not be
    started or was ended by us; empty where it ended by itself or had said enough. num_left: processes of it that
    SIGKILL did not end, as one stuck in a driver.
    """

    command: tuple[str, ...]
    exit_code: int | None = None
    stdout: str = ""
    stderr: str = ""
    missing: bool = False
    timed_out: bool = False
    failure: str = ""
    num_left: int = 0
    seconds: float = 0.0

    @property
    def output(self) -> str:
        return f"{self.stdout}\n{self.stderr}"

    def told(self) -> str:
        """One line: how it ended and its last words."""
        how = self.failure or ("ended when asked" if self.exit_code is None else f"exit code {self.exit_code}")
        words = last_line(self.stderr) or last_line(self.stdout)
        stuck = f"; {self.num_left} of its processes cannot be killed" if self.num_left else ""
        name = Path(self.command[0]).name
        if self.missing:
            return f"{name} {how}"
        return f"{name}: {how}{stuck}" + (f": {words}" if words else ", no output")


def run_tool(
    command: Sequence[str],
    *,
    timeout_s: float,
    stop: StopSignal,
    env: Mapping[str, str] | None = None,
    output_limit_bytes: int = OUTPUT_LIMIT_BYTES,
    enough: Callable[[str], bool] | None = None,
) -> ToolRun:
    """Run `command` to its end or a limit. Raises Preempted on the stop signal, and nothing for what a tool does.

    Args:
        env: its environment; None is ours.
        output_limit_bytes: of standard output and error each; more ends it, and is cut off.
        enough: given the standard output so far, says that the program may be ended (for one that runs for ever).
    """
    environment = dict(os.environ if env is None else env)
    folders = os.pathsep.join((environment.get("PATH", os.defpath), *TOOL_FOLDERS))
    found = shutil.which(command[0], path=folders)
    if found is None:
        return ToolRun(tuple(command), missing=True, failure="is not installed")
    started = time.monotonic()
    try:
        with TemporaryDirectory(dir=temporary_folder(), ignore_cleanup_errors=True) as folder:
            out, err = Path(folder) / "stdout", Path(folder) / "stderr"
            # Two files: warnings in the middle of a JSON answer would spoil it.
            with out.open("wb") as to_out, err.open("wb") as to_err:
                words = (found, *command[1:])
                tree = ProcessTree(words, cwd=Path(folder), env=environment, out=to_out, err=to_err)
            timed_out, failure, name = False, "", Path(found).name
            too_much = f"wrote more than {output_limit_bytes} bytes"
            try:
                size, pause_s = 0, 0.01
                while tree.poll() is None:
                    stop.raise_if_set(f"running {name}")
                    if _size(out, err) > output_limit_bytes:
                        failure = too_much
                        break
                    if enough and _size(out) != size:
                        size = _size(out)
                        if enough(_read(out, output_limit_bytes)):
                            break
                    if time.monotonic() >= started + timeout_s:
                        timed_out, failure = True, f"did not end within {timeout_s:g} s"
                        break
                    stop.wait(pause_s)
                    pause_s = min(0.1, 1.5 * pause_s)
                code = tree.poll()
            finally:
                tree.end(0.0)
            if not failure and _size(out, err) > output_limit_bytes:
                failure = too_much
            return ToolRun(
                words,
                exit_code=code,
                stdout=_read(out, output_limit_bytes),
                stderr=_read(err, output_limit_bytes),
                timed_out=timed_out,
                failure=failure,
                num_left=len(tree.members()) if timed_out else 0,
                seconds=time.monotonic() - started,
            )
    except OSError as error:  # not a program for this machine, no memory for a process, no space for its output
        why = f"could not be run: {error.strerror or error}"
        return ToolRun(tuple(command), failure=why, seconds=time.monotonic() - started)


def _size(*files: Path) -> int:
    return max(file.stat().st_size for file in files)


def _read(file: Path, limit_bytes: int) -> str:
    with file.open("rb") as content:
        return content.read(limit_bytes).decode(errors="replace")


Count = Annotated[int, Field(ge=0, lt=2**63)]
"""A number that a tool counts: more is none, and breaks arithmetic."""


def last_line(text: str) -> str:
    """The last line with words, printable and cut to a length that fits a message."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    line = next((line for line in lines if line), "")
    return "".join(char if char.isprintable() else " " for char in line).strip()[:_SEEN_LENGTH]


def json_in(text: str) -> object:
    """The JSON value a tool printed, maybe after lines of other text; None where there is none or it is cut off."""
    # Only at the start of a line: an inner object of one that is cut off must not pass for the whole.
    for start in _JSON_START.finditer(text):
        try:
            return json.JSONDecoder().raw_decode(text, start.start())[0]
        except (ValueError, RecursionError):
            continue
    return None


_JSON_START = re.compile(r"^[\[{]", re.MULTILINE)
