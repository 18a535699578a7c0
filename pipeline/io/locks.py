"""A lock between processes of one machine (or of one file system with flock), released by the kernel at death."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.core.stop import StopSignal

POLL_S = 0.05


@contextmanager
def exclusive(path: Path, stop: StopSignal) -> Iterator[None]:
    """Hold the lock of an existing folder, or of a file that is created. Preempted when stopped while waiting."""
    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop.wait(POLL_S)
                stop.raise_if_set(f"waiting for the lock of {path}")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Hold the lock of a file, which is created, unless another process does: then False, at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
