"""Child processes: shutdown times, and finding and killing the processes that carry a mark.

Imports only the standard library, because node_keeper.py of the local target imports this in a bare interpreter.
"""
# pathlib and shutil would double the start-up time of a node keeper.
# ruff: noqa: PTH112, PTH115, PTH123, PTH208

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

# Seconds from SIGTERM to SIGKILL, from the outermost process inwards. Each process gets less time than its parent.
PLATFORM_S = 30.0  # a container of AWS Batch, and a job of the local target
ENGINE_MARGIN_S = 10.0  # additional time of the command that runs local jobs, so that they end first
MARGIN_S = 5.0  # for a node keeper to end its node after the grace, before it is considered hung
EXPLAIN_S = PLATFORM_S - 1.0  # trnjobs-entry, with its post-mortem
COMMAND_S = PLATFORM_S - 5.0  # the command that trnjobs-entry runs
PROMISED_S = PLATFORM_S - 10.0  # every trnpipe command, on any platform
LAUNCHER_S = PROMISED_S - 1.0  # the launcher of ranks
LAST_HOOK_S = 3.0  # the last hook of a rank, which logs why it stops
RANK_S = LAUNCHER_S - LAST_HOOK_S - 1.0  # a rank, which saves its state and exits
TOOL_S = 8.0  # a tool that a rank runs, including the cleanup of its files

PAUSE_S = 0.02
SETTLE_S = 0.5  # a starting process has an empty environment in /proc until exec is done
LIMIT_S = 5.0  # for processes that SIGKILL does not end, such as one stuck in a driver
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
CONTAINER_OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")  # cgroup v2, v1
MACHINE_OOM_FILES = ("/proc/vmstat",)


def processes_with_mark(name: str, matches: Callable[[str], bool]) -> tuple[list[int], bool]:
    """Return the other processes in which `matches` accepts the variable `name`, and whether the list is complete.

    It is incomplete while a starting process has no environment yet. Marks are found in other sessions and after the
    death of the parent. Empty without /proc (macOS).
    """
    pids, is_settled, prefix = [], True, os.fsencode(name) + b"="
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ())):
        try:
            environ = _environ(pid)
            if not environ:
                os.readlink(f"/proc/{pid}/exe")  # fails for kernel threads and zombies
                is_settled = False
        except OSError:  # ended since, or owned by another user
            continue
        marks = (variable[len(prefix) :] for variable in environ.split(b"\0") if variable.startswith(prefix))
        if any(matches(os.fsdecode(mark)) for mark in marks) and pid != os.getpid():
            pids.append(pid)
    return pids, is_settled


def _environ(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()


def kill_marked(name: str, matches: Callable[[str], bool]) -> tuple[int, bool]:
    """Send SIGKILL to the processes with a mark. Return their number and whether the list was complete."""
    pids, is_settled = processes_with_mark(name, matches)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(pids), is_settled


def end_marked(name: str, matches: Callable[[str], bool], quiet_s: float = 0.0) -> int:
    """Kill processes with a mark until none has appeared for `quiet_s`. Return how many cannot be killed."""
    quiet_since = time.monotonic()
    limit = quiet_since + LIMIT_S
    while True:
        now = time.monotonic()  # before the scan: the time during which this process is suspended must not count
        number, is_settled = kill_marked(name, matches)
        if number:
            quiet_since = now
        elif now - quiet_since >= (quiet_s if is_settled else max(quiet_s, SETTLE_S)):
            return 0
        if now >= limit:
            return number
        time.sleep(PAUSE_S)


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, as PID 1 is anyway, so that none is lost."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def oom_kill_count(files: Sequence[str] = CONTAINER_OOM_FILES) -> int | None:
    """Return how many processes the kernel has killed because memory ran out, None if it is not reported."""
    for path in files:
        try:
            with open(path) as file:
                return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except (OSError, ValueError, StopIteration):
            continue
    return None
