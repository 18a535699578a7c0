"""A program with all processes below it, ended as a whole.

neuron_parallel_compile does not end what it started: killed, it leaves compilers running. Ranks of a trial run sit in
sessions of their own (torchrun is started so), where a signal to the process group does not reach them, and have lost
their parents when those died first. So members are known by a mark in their environment, too.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pipeline.core.errors import ConfigError

MARK_VARIABLE = "TRN_PROCESS_TREE"  # not TRNPIPE_: those are settings
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class ProcessTree:
    """A running program, the leader of its own session, and whatever it started."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str) -> None:
        self._process = process
        self._mark = mark

    def poll(self) -> int | None:
        """The exit code of the program itself, None while it runs."""
        return self._process.poll()

    def members(self) -> list[psutil.Process]:
        """Living processes of its session, with its mark, or below one of these."""
        processes = {process.pid: process for process in psutil.process_iter()}
        parents = {pid: _parent(process) for pid, process in processes.items()}
        found = {pid for pid, process in processes.items() if self._is_ours(process)}
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return [processes[pid] for pid in found if _is_alive(processes[pid])]

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
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.5)

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(OSError, psutil.Error):  # gone meanwhile, or another user's
            return os.getsid(process.pid) == self._process.pid or process.environ().get(MARK_VARIABLE) == self._mark
        return False


@contextmanager
def process_tree(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], log: Path) -> Iterator[ProcessTree]:
    """Start `command` with both outputs in the file `log`; at the end no process of it is left, whatever happened."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(  # noqa: S603 - a list, no shell
                list(command),
                cwd=cwd,
                env={**env, MARK_VARIABLE: mark},
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise ConfigError(
                f"{command[0]} cannot be started: {error.strerror}",
                expected="the Neuron tools on PATH (torch-neuronx and neuronx-cc, as in the neuron image)",
                next_command="run this on a Trainium machine in that image, or with another --backend",
            ) from error
    tree = ProcessTree(process, mark)
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


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.Error:
        return 0
