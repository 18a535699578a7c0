"""What a machine is asked about itself. Tests give a `Host` with other answers."""

import errno
import math
import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.io.errors import os_errors
from pipeline.proc.tree import host_memory_bytes

SHM = Path("/dev/shm")  # noqa: S108 - looked at, not written


@dataclass(frozen=True)
class Memory:
    """`total_bytes` of the machine; `usable_bytes` for this container; `available_bytes` of the machine now."""

    total_bytes: int
    usable_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Disk:
    """A file system; `device` is equal for two folders on the same one."""

    device: int
    total_bytes: int
    free_bytes: int


def num_cpus() -> int:
    """Logical CPUs of the machine, whatever this container may use."""
    return os.cpu_count() or 1


def memory() -> Memory:
    now = psutil.virtual_memory()
    return Memory(now.total, host_memory_bytes(), now.available)


def disk(folder: Path) -> Disk:
    """The file system a folder is on, or will be on. Raises ConfigError or TransientError when it cannot be asked."""
    with os_errors("asking for the free space of", f"file://{folder}"):
        while not folder.exists():
            folder = folder.parent
        found, device = os.statvfs(folder), folder.stat().st_dev
    return Disk(device, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def shared_memory() -> Disk | None:
    """None where there is no such thing (macOS)."""
    return disk(SHM) if SHM.is_dir() else None


def open_files() -> float:
    """The soft limit: what a process gets that does not ask for more."""
    return _soft_limit(resource.RLIMIT_NOFILE)


def locked_memory() -> float:
    """The soft limit in bytes; infinite when there is none."""
    return _soft_limit(resource.RLIMIT_MEMLOCK)


def port_holder(number: int) -> str | None:
    """Who keeps us from listening on a port: `name (pid 7)`, or `another process`; None when it is free."""
    with socket.socket() as listener:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as torch does: a dead connection does not count
        try:
            listener.bind(("", number))
            listener.listen(1)
            return None
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    with suppress(psutil.Error):  # only root sees all
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == number and one.pid:
                return f"{psutil.Process(one.pid).name()} (pid {one.pid})"
    return "another process"


@dataclass(frozen=True)
class Host:
    """The questions of host.py, and who answers them."""

    num_cpus: Callable[[], int] = num_cpus
    memory: Callable[[], Memory] = memory
    disk: Callable[[Path], Disk] = disk
    shared_memory: Callable[[], Disk | None] = shared_memory
    open_files: Callable[[], float] = open_files
    locked_memory: Callable[[], float] = locked_memory
    port_holder: Callable[[int], str | None] = port_holder
    clock: Callable[[], float] = time.monotonic


def _soft_limit(which: int) -> float:
    soft, _ = resource.getrlimit(which)
    return math.inf if soft == resource.RLIM_INFINITY else soft
