"""Child processes: how long each gets, whose they are, and how the last of them ends.

The standard library alone: node_keeper.py of the local target imports it in a bare interpreter.
"""
# pathlib and shutil would double the start-up time of a keeper.
# ruff: noqa: PTH112, PTH115, PTH123, PTH208

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

# From SIGTERM to SIGKILL, from outside inwards: each gets less than what is around it, in seconds.
PLATFORM_S = 30.0  # a container of AWS Batch, and a job of this machine
ENGINE_MARGIN_S = 10.0  # more than the jobs of this machine, for the command that runs them: they end first
MARGIN_S = 5.0  # for a keeper to end its node after the grace, before it is taken as one that hangs
EXPLAIN_S = PLATFORM_S - 1.0  # trnjobs-entry, with its post-mortem
COMMAND_S = PLATFORM_S - 5.0  # the command that trnjobs-entry runs
PROMISED_S = PLATFORM_S - 10.0  # a command of ours has ended by then, whatever is around it
LAUNCHER_S = PROMISED_S - 1.0  # the launcher of ranks
LAST_HOOK_S = 3.0  # of a rank, for its last words
RANK_S = LAUNCHER_S - LAST_HOOK_S - 1.0  # a rank: saves its state and ends
TOOL_S = 8.0  # a tool that a rank runs, with the repair of what it leaves behind it

PAUSE_S = 0.02
SETTLE_S = 0.5  # for what is being started: /proc shows an empty environment until it has one
LIMIT_S = 5.0  # for those that SIGKILL does not end, as one stuck in a driver
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
CONTAINER_OOM_FILES = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")  # cgroup v2, v1
MACHINE_OOM_FILES = ("/proc/vmstat",)


def processes_with_mark(name: str, is_ours: Callable[[str], bool]) -> tuple[list[int], bool]:
    """Processes whose variable `name` is such, but this one; and whether all show their environment already.

    A mark is found in sessions of their own too, and when the parent is dead. None without /proc (macOS).
    """
    found, is_settled, prefix = [], True, os.fsencode(name) + b"="
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc") if os.path.isdir("/proc") else ())):
        try:
            environ = _environ(pid)
            if not environ:
                os.readlink(f"/proc/{pid}/exe")  # threads of the kernel and zombies have none
                is_settled = False
        except OSError:  # gone meanwhile, or another user's
            continue
        marks = (one[len(prefix) :] for one in environ.split(b"\0") if one.startswith(prefix))
        if any(is_ours(os.fsdecode(mark)) for mark in marks) and pid != os.getpid():
            found.append(pid)
    return found, is_settled


def _environ(pid: int) -> bytes:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read()


def kill_marked(name: str, is_ours: Callable[[str], bool]) -> tuple[int, bool]:
    """SIGKILL to them, which ends those that are stopped too: how many, and whether that may have been all."""
    found, is_settled = processes_with_mark(name, is_ours)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(found), is_settled


def end_marked(name: str, is_ours: Callable[[str], bool], look_s: float = 0.0) -> int:
    """Kill them, and look for more until there has been none for `look_s`; how many cannot be killed."""
    quiet_since = time.monotonic()
    limit = quiet_since + LIMIT_S
    while True:
        now = time.monotonic()  # before the look: whoever is kept from running after it has seen no more
        number, is_settled = kill_marked(name, is_ours)
        if number:
            quiet_since = now
        elif now - quiet_since >= (look_s if is_settled else max(look_s, SETTLE_S)):
            return 0
        if now >= limit:
            return number
        time.sleep(PAUSE_S)


def adopt_orphans() -> None:
    """Processes whose parent dies become our children, as PID 1 has it anyway, so that none is lost sight of."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def oom_kill_count(files: Sequence[str] = CONTAINER_OOM_FILES) -> int | None:
    """How many processes the kernel has killed for want of memory; None where that is not told."""
    for path in files:
        try:
            with open(path) as file:
                return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        except (OSError, ValueError, StopIteration):
            continue
    return None
