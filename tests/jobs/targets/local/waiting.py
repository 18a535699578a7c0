"""Waiting for other processes."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from jobs.targets.local import node_keeper

LIMIT_S, STEP_S = 60.0, 0.01


def until(is_so: Callable[[], object], what: str = "it") -> None:
    """Raises AssertionError when it takes a minute."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:g} s for {what}"
        time.sleep(STEP_S)


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_dead(pid: int) -> None:
    """A killed process loses its memory, and with it its mark, a moment before it is a zombie."""
    until(lambda: not is_alive(pid), f"the end of process {pid}")


def number_in(path: Path) -> int:
    """0 until something has written one there."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else 0


def keepers_of(folder: Path) -> list[int]:
    """Process ids of the living keepers of nodes at or below a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:  # ended meanwhile
            continue
        if node_keeper.__file__ in words and is_alive(process.pid):
            place = Path(words[words.index(node_keeper.__file__) + 1])
            found += [process.pid] if place.is_relative_to(folder) else []
    return found


def until_no_keepers(folder: Path) -> None:
    """A keeper writes down the end of its node a moment before it ends itself."""
    until(lambda: not keepers_of(folder), f"the last keeper below {folder}")


def suspend(pid: int) -> None:
    """Returns when it has stopped: until then SIGTERM would still end it."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the process to stop")
