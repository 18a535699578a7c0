"""A verified entry put before the eyes of a compiler that may be reading the cache: whole, or not finished yet."""

import errno
from pathlib import Path

from pipeline.compile.cache_entry import DONE_NAME, LOG_NAME, EntryName
from pipeline.compile.cache_scan import list_entry
from pipeline.io import atomic
from pipeline.io.errors import os_errors

NOT_EMPTY_ERRNOS = frozenset({errno.ENOTEMPTY, errno.EEXIST})


def place_entry(root: Path, name: EntryName, folder: Path) -> bool:
    """Move the files of `folder` (on the same file system) to the entry; False when that is locked.

    A missing entry appears by one rename. Into one that exists (traced, failed, half written) the files go one by
    one, `model.done` last; the log of an earlier failure is taken away before it.
    """
    target = root / name.key
    with os_errors("writing", f"file://{target}"):
        atomic.make_dirs(target.parent)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in NOT_EMPTY_ERRNOS:
                raise
            if list_entry(root, name).locks:
                return False
            _fill(target, folder)
        atomic.fsync_path(target)
        atomic.fsync_path(target.parent)
    return True


def _fill(target: Path, folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    (target / DONE_NAME).unlink(missing_ok=True)
    for file in sorted(names - {DONE_NAME}):
        (folder / file).replace(target / file)
    if LOG_NAME not in names:
        (target / LOG_NAME).unlink(missing_ok=True)
    atomic.fsync_path(target)
    (folder / DONE_NAME).replace(target / DONE_NAME)
