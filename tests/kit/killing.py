"""Work in a forked child that dies at a chosen point."""

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

FORK = multiprocessing.get_context("fork")
FILE_CHANGES = frozenset({"open to write", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "fcntl.flock"})


def killed_at(number: int, work: Callable[[], object], events: frozenset[str] = FILE_CHANGES) -> int:
    """Kill -9 the child just before its n-th audited event of these; its exit code."""
    seen = count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        to_write = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
        if events & {event, "open to write" if to_write else event} and next(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def child() -> None:
        sys.addaudithook(hook)
        work()

    return _exit_code_of(child)


def killed_at_byte(size_bytes: int, work: Callable[[], object]) -> int:
    """Let the kernel end the child (SIGXFSZ) at exactly that byte of a file it writes; its exit code."""

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        work()

    return _exit_code_of(child)


def _exit_code_of(child: Callable[[], object]) -> int:
    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode
