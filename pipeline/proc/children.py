"""Shutdown timeouts for processes, and helpers to find and kill processes that carry a mark.

A mark is an environment variable with a value that identifies the processes. Note that this module only imports from
the standard library, because node_keeper.py of the local target imports it in a bare interpreter.
"""
# We also avoid pathlib and shutil, because they would double the start-up time of a node keeper.
# ruff: noqa: PTH112, PTH115, PTH123, PTH208

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

# How many seconds each process has between SIGTERM and SIGKILL, from the outermost process to the innermost. Every
# process gets less time than its parent, so that the parent can still clean up after it.
PLATFORM_S = 30.0  # a container on AWS Batch or a job of the local target
ENGINE_MARGIN_S = 10.0  # additional time for the command that runs local jobs, so that the jobs exit first
MARGIN_S = 5.0  # additional time for a node keeper to stop its node, before the node keeper is considered hung
EXPLAIN_S = PLATFORM_S - 1.0  # trnjobs-entry, including its post-mortem
COMMAND_S = PLATFORM_S - 5.0  # the command that trnjobs-entry runs
PROMISED_S = PLATFORM_S - 10.0  # any trnpipe command on any platform
LAUNCHER_S = PROMISED_S - 1.0  # the launcher, which starts the ranks
LAST_HOOK_S = 3.0  # the last hook of a rank, which logs the reason for the shutdown
RANK_S = LAUNCHER_S - LAST_HOOK_S - 1.0  # a rank, which saves its state and exits
TOOL_S = 8.0  # a tool that a rank runs, including the cleanup of its files

PAUSE_S = 0.02
SETTLE_S = 0.5  # until exec has finished, the environment of a new process in /proc is empty
LIMIT_S = 5.0  # how long to wait for a process that SIGKILL doesn't end, for example because it hangs in a driver
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
CONTAINER_OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")  # cgroup v2, v1
MACHINE_OOM_FILES = ("/proc/vmstat",)


def processes_with_mark(name: str, matches: Callable[[str], bool]) -> tuple[list[int], bool]:
    """Find all other processes with a mark.

    Descendants keep their mark even if they start a new session, and even if their parent dies.

    Args:
        name: the environment variable that contains the mark.
        matches: returns whether the value of the variable is the mark to look for.

    Returns:
        The process IDs, and whether the list is complete. It is incomplete if a process that is just starting has no
        environment yet. Without /proc, as on macOS, the list is empty.
    """
    pids, is_settled, prefix = [], True, os.fsencode(name) + b"="
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ())):
        try:
            environ = _environ(pid)
            if not environ:
                os.readlink(f"/proc/{pid}/exe")  # fails for kernel threads and zombies
                is_settled = False
        except OSError:  # the process has exited or belongs to a different user
            continue
        marks = (variable[len(prefix) :] for variable in environ.split(b"\0") if variable.startswith(prefix))
        if any(matches(os.fsdecode(mark)) for mark in marks) and pid != os.getpid():
            pids.append(pid)
    return pids, is_settled


def _environ(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()


def kill_marked(name: str, matches: Callable[[str], bool]) -> tuple[int, bool]:
    """Send SIGKILL to all processes with a mark. Return their number and whether all processes could be checked."""
    pids, is_settled = processes_with_mark(name, matches)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids), is_settled


def end_marked(name: str, matches: Callable[[str], bool], quiet_s: float = 0.0) -> int:
    """Kill processes with a mark until no new ones have appeared for `quiet_s` seconds.

    Returns the number of processes that could not be killed.
    """
    quiet_since = time.monotonic()
    limit = quiet_since + LIMIT_S
    while True:
        now = time.monotonic()  # take the time before the scan, because this process may be suspended during the scan
        number, is_settled = kill_marked(name, matches)
        if number:
            quiet_since = now
        elif now - quiet_since >= (quiet_s if is_settled else max(quiet_s, SETTLE_S)):
            return 0
        if now >= limit:
            return number
        time.sleep(PAUSE_S)


def adopt_orphans() -> None:
    """Make this process the parent of all its orphaned descendants, so that it can keep track of them.

    By default, PID 1 adopts orphaned processes.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def oom_kill_count(files: Sequence[str] = CONTAINER_OOM_FILES) -> int | None:
    """Return how many processes the kernel has killed because memory ran out, or None if it doesn't report this."""
    for path in files:
        try:
            with open(path) as file:
                return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except (OSError, ValueError, StopIteration):
            continue
    return None
