"""Atomic, durable local files (temp file next to the target, fsync, rename), and locks between processes."""

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
# A temp file is created shortly before it is locked, so younger ones are not swept.
SWEEP_MIN_AGE_S = 10.0


def is_temp(name: str) -> bool:
    """Return whether a file name, without its folder, is that of a temp file."""
    return name.startswith(TEMP_PREFIX)


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dirs(path: Path) -> None:
    """Create a folder and its parents, durably: the new entries survive a power cut."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def temp_path_for(path: Path) -> Path:
    """Return a new hidden name in the folder of `path`."""
    return path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")


@contextmanager
def temp_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Open a locked temp file in the folder of `path`. It is removed on exit unless it was renamed."""
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
    """Create a locked temp folder next to `path`. It is removed with its content on exit."""
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
    """Create a temp folder inside `folder`, which writers may share, after sweeping those of dead writers."""
    make_dirs(folder)
    sweep_temps(folder)
    with temp_dir(folder / "staged") as temp:
        yield temp


def write_atomic(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Replace `path` with the bytes that `fill` writes. If it raises OSError, the temp file is removed."""
    with temp_file(path) as (file, temp):
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        temp.replace(path)
    fsync_path(path.parent)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    write_atomic(path, lambda file: file.write(data))


def create_atomic(path: Path, data: bytes) -> bool:
    """Create `path` with `data`. Return False if it exists. Exactly one of several racing writers gets True."""
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
    """Copy the bytes of `source`, polling `stop` every 8 MiB."""
    with source.open("rb") as file:
        while block := file.read(COPY_BLOCK_BYTES):
            stop.raise_if_set(f"copying {source}")
            target.write(block)


def publish_file(source: Path, path: Path, stop: StopSignal) -> None:
    """Publish `source` at `path` atomically, as a hard link if possible, else as a copy. `source` is kept.

    The target of a symbolic link is copied, because its owner may change it.
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
                # Another file system, or one without hard links. The copy reports any real fault of the target.
                write_atomic(path, lambda out: copy_into(source, out, stop))
                return
            # rename() does nothing if both names are one file, so the temp name must be removed below.
            temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    fsync_path(path.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder: rename it to a temp name, then delete it. After a kill, a later commit sweeps the rest."""
    doomed = temp_path_for(folder)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        mark_in_use(descriptor)
        folder.rename(doomed)
        fsync_path(folder.parent)
        shutil.rmtree(doomed)
    finally:
        os.close(descriptor)


def sweep_temps(folder: Path, min_age_s: float | None = None) -> int:
    """Remove unlocked temp files and folders of dead writers directly in `folder`. Return their number.

    `min_age_s`: seconds since their last change (default: SWEEP_MIN_AGE_S). A living writer locks its file by then.
    """
    if not folder.is_dir():
        return 0
    removed = 0
    for path in [Path(entry.path) for entry in os.scandir(folder) if is_temp(entry.name)]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # removed since the scan, or owned by another user
            continue
        try:
            # The change time, not the modification time: a new hard link has an old mtime.
            if time.time() - os.fstat(descriptor).st_ctime < (SWEEP_MIN_AGE_S if min_age_s is None else min_age_s):
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            removed += 1
        except OSError:  # locked by a living writer, or a file system without locks
            continue
        finally:
            os.close(descriptor)
    return removed


def mark_in_use(descriptor: int) -> None:
    """Take a shared lock on a temp file, so that it is not swept. Without lock support nothing is ever swept."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return


# A lock between processes of one machine (or of one file system with flock). The kernel releases it when they die.

POLL_S = 0.05


@contextmanager
def exclusive(path: Path, stop: StopSignal) -> Iterator[None]:
    """Lock a folder, or a file that is created if missing. Raises Preempted if stopped while waiting."""
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
                stop.raise_if_set(f"waiting for the lock of {path}")
        yield
    finally:
        os.close(descriptor)
