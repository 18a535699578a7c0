"""Atomic, durable local files (temp file beside the target, fsync, rename), and locks between processes."""

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
# A temp file is created a moment before it is locked; younger ones are left alone.
SWEEP_MIN_AGE_S = 10.0


def is_temp(name: str) -> bool:
    """True for the last part of a name that only a writer may see."""
    return name.startswith(TEMP_PREFIX)


def fsync_path(path: Path) -> None:
    """Flush a file or a folder to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dirs(path: Path) -> None:
    """mkdir -p whose new entries survive a power cut."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        fsync_path(folder.parent)


def temp_path_for(path: Path) -> Path:
    """A fresh hidden name in the folder of `path`."""
    return path.with_name(f"{TEMP_PREFIX}{secrets.token_hex(8)}")


@contextmanager
def temp_file(path: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A locked temp file beside `path`, removed on leaving unless it was renamed."""
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
    """A locked temp folder beside `path`, removed on leaving with all that is in it."""
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
    """A temp folder within `folder`, which writers may share; what dead ones left there is swept first."""
    make_dirs(folder)
    sweep_temps(folder)
    with temp_dir(folder / "staged") as temp:
        yield temp


def write_atomic(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Replace `path` by what `fill` writes. OSError passes through, the temp file removed."""
    with temp_file(path) as (file, temp):
        fill(file)
        file.flush()
        os.fsync(file.fileno())
        temp.replace(path)
    fsync_path(path.parent)


def write_bytes_atomic(path: Path, data: bytes) -> None:
    write_atomic(path, lambda file: file.write(data))


def create_atomic(path: Path, data: bytes) -> bool:
    """Create `path` with `data`; False when it exists. Of many racing writers exactly one gets True."""
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
    """Put `source` at `path` atomically: a hard link where the file system has them, else a copy. Source stays.

    What a symbolic link points to is copied: it belongs to somebody else, who may change it.
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
                # Also another file system, or one without hard links: the copy reports any real fault of the target.
                write_atomic(path, lambda out: copy_into(source, out, stop))
                return
            # rename() does nothing when both names are one file, so the temp name must be removed below.
            temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)
    fsync_path(path.parent)


def remove_tree(folder: Path) -> None:
    """Remove a folder: a rename makes it vanish at once; what a kill leaves is hidden, and swept by a later commit."""
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
    """Remove what dead writers left in `folder` (not below it): old temp names that nobody locks. Returns how many.

    `min_age_s`: since their last change (default: SWEEP_MIN_AGE_S); a living writer locks its name by then.
    """
    if not folder.is_dir():
        return 0
    removed = 0
    for path in [Path(entry.path) for entry in os.scandir(folder) if is_temp(entry.name)]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or not ours to open: not ours to remove either
            continue
        try:
            # The change time, not the modification time: a hard link made just now has an old mtime.
            if time.time() - os.fstat(descriptor).st_ctime < (SWEEP_MIN_AGE_S if min_age_s is None else min_age_s):
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            removed += 1
        except OSError:  # locked by a living writer, or a file system without locks: leave it
            continue
        finally:
            os.close(descriptor)
    return removed


def mark_in_use(descriptor: int) -> None:
    """Mark a temp file as alive. Without lock support it is simply never swept."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return


# A lock between processes of one machine (or of one file system with flock), released by the kernel at death.

POLL_S = 0.05


@contextmanager
def exclusive(path: Path, stop: StopSignal) -> Iterator[None]:
    """Hold the lock of an existing folder, or of a file that is created, with the folders above it.

    Raises Preempted when stopped while waiting.
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
                stop.raise_if_set(f"waiting for the lock of {path}")
        yield
    finally:
        os.close(descriptor)
