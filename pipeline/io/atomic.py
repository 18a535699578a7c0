"""Write local files atomically and durably, and lock files across processes.

A file is written to a temp file in the same folder, which is fsynced and then renamed.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from pipeline.core.stop import StopSignal

TEMP_PREFIX = ".trnpipe-tmp-"
COPY_BLOCK_BYTES = 8 * 2**20
# There is a short delay between creating a temp file and locking it, so files younger than this are never removed.
SWEEP_MIN_AGE_S = 10.0


def is_temp(name: str) -> bool:
    """Return whether a file name (without its folder) belongs to a temp file."""
    return name.startswith(TEMP_PREFIX)


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dirs(path: Path) -> None:
    """Create a folder and its parents, and fsync them so that they survive a power failure."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def temp_path_for(path: Path) -> Path:
    """Return a unique hidden path in the same folder as `path`."""
    return path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")


@contextmanager
def temp_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Open and lock a temp file in the same folder as `path`. It is removed on exit unless it has been renamed."""
    make_dirs(path.parent)
    temp = temp_path_for(path)
    try:
        with temp.open("xb+") as file:
            mark_in_use(file.fileno())
            yield file, temp
    finally:
        temp.unlink(missing_ok=True)


@contextmanager
def temp_dir(path: Path) -> Iterator[Path]:
    """Create and lock a temp folder in the same folder as `path`. It is removed on exit along with its contents."""
    temp = temp_path_for(path)
    temp.mkdir()
    descriptor = os.open(temp, os.O_RDONLY)
    try:
        mark_in_use(descriptor)
        yield temp
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def staging_dir(folder: Path) -> Iterator[Path]:
    """Create a temp folder inside `folder`. Several writers may use the same `folder`.

    This first removes the temp folders that were left behind by killed writers.
    """
    make_dirs(folder)
    sweep_temps(folder)
    with temp_dir(folder / "staged") as temp:
        yield temp


def write_atomic(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Replace a file with the bytes that `fill` writes. If `fill` raises, `path` is left unchanged."""
    with temp_file(path) as (file, temp):
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        temp.replace(path)
    fsync_path(path.parent)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    write_atomic(path, lambda file: file.write(data))


def create_atomic(path: Path, data: bytes) -> bool:
    """Create a file, or return False if it already exists.

    If several writers race to create the same file, exactly one of them gets True.
    """
    with temp_file(path) as (file, temp):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        try:
            os.link(temp, path)
        except FileExistsError:
            return False
    fsync_path(path.parent)
    return True


def copy_into(source: Path, target: BinaryIO, stop: StopSignal) -> None:
    """Copy the contents of `source` to an open file. `stop` is polled every 8 MiB."""
    with source.open("rb") as file:
        while block := file.read(COPY_BLOCK_BYTES):
            stop.raise_if_set(f"copying {source}")
            target.write(block)


def publish_file(source: Path, path: Path, stop: StopSignal) -> None:
    """Publish a file at `path` atomically without removing `source`.

    This creates a hard link if possible and falls back to a copy. If `source` is a symbolic link, its target is always
    copied, because the owner of the target may still modify it.
    """
    make_dirs(path.parent)
    temp = temp_path_for(path)
    try:
        with source.open("rb") as file:
            mark_in_use(file.fileno())
            os.fsync(file.fileno())
            try:
                if source.is_symlink():
                    raise OSError(errno.ELOOP, "a symbolic link")
                os.link(source, temp)
            except OSError:
                # The target is on a different file system, or on one without hard links. If there is a real problem
                # with the target, the copy fails as well and reports it.
                write_atomic(path, lambda out: copy_into(source, out, stop))
                return
            # If both names already refer to the same file, rename() does nothing, so remove the temp name below.
            temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    fsync_path(path.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder by renaming it to a temp name and then deleting it.

    As a result, readers never see a partially deleted folder. If the process is killed in between, a later commit
    removes the rest.
    """
    doomed = temp_path_for(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        mark_in_use(descriptor)
        folder.rename(doomed)
        fsync_path(folder.parent)
        shutil.rmtree(doomed)
    finally:
        os.close(descriptor)


def sweep_temps(folder: Path, min_age_s: float | None = None) -> None:
    """Remove temp files and folders that were left behind by killed writers directly in `folder`.

    Args:
        folder: the folder to clean up. Subfolders are not visited.
        min_age_s: minimum number of seconds since the last change (default: SWEEP_MIN_AGE_S). A live writer must have
            locked its file by then.
    """
    if not folder.is_dir():
        return
    for path in [Path(entry.path) for entry in os.scandir(folder) if is_temp(entry.name)]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # removed since the scan, or owned by another user
            continue
        try:
            # Use the change time instead of the modification time, because a new hard link keeps the mtime of its file.
            if time.time() - os.fstat(descriptor).st_ctime < (SWEEP_MIN_AGE_S if min_age_s is None else min_age_s):
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError:  # locked by a live writer, or the file system doesn't support locks
            continue
        finally:
            os.close(descriptor)


def mark_in_use(descriptor: int) -> None:
    """Take a shared lock on a temp file, so that `sweep_temps` doesn't remove it.

    If the file system doesn't support locks, this does nothing, and `sweep_temps` never removes anything either.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return


# A lock for the processes on one machine, or on one file system if it supports flock. The kernel releases the lock when
# its holder dies.

POLL_S = 0.05


@contextmanager
def exclusive(path: Path, stop: StopSignal) -> Iterator[None]:
    """Hold an exclusive lock on a file or a folder. If `path` doesn't exist, it is created as a file.

    Raises Preempted if `stop` is set while waiting for the lock.
    """
    flags = os.O_RDONLY
    if not path.is_dir():
        flags = os.O_RDWR | os.O_CREAT
        make_dirs(path.parent)
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                stop.wait(POLL_S)
                stop.raise_if_set(f"waiting for the lock on {path}")
        yield
    finally:
        os.close(descriptor)
