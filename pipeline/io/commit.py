"""The one helper that stages and commits every artefact.

Rule of commit: the files first, their sizes checked where they lie, then MANIFEST.json as the only marker. Readers
trust nothing without it. A writer killed at any byte leaves a folder that is not committed, and may simply run again.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from pipeline import __version__
from pipeline.core.errors import DataError
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.io import atomic
from pipeline.io.errors import os_errors
from pipeline.io.fetch import fetch_dir
from pipeline.io.hashing import file_record
from pipeline.io.keys import check_key, folder_key, is_temp, join_key
from pipeline.io.parallel import run_parallel
from pipeline.io.storage import Storage
from pipeline.io.verify import check_sizes, read_manifest, verify_dir

__all__ = ["commit_dir", "fetch_dir", "file_record", "read_manifest", "verify_dir"]

NUM_HASH_THREADS = 4


def commit_dir(
    storage: Storage, local_dir: Path, prefix: str, *, kind: str, fields: Mapping[str, JsonValue]
) -> Manifest:
    """Publish every file below `local_dir` under `prefix` and return the manifest, which is written last.

    On S3 the files are uploaded and `local_dir` stays. On file:// they are moved into place (copied from another file
    system) and `local_dir` is emptied, unless it is the target itself: then they are only made durable. A folder
    committed earlier is withdrawn first, so nobody sees old and new files under one manifest.
    Raises DataError when `local_dir` is missing, DiskFull, TransientError, ConfigError, Preempted.
    """
    prefix = check_key(folder_key(prefix))
    names = _names(local_dir)
    with os_errors("reading", f"file://{local_dir}"):
        records = run_parallel(
            lambda name: file_record(local_dir / name, storage.stop),
            names,
            num_threads=NUM_HASH_THREADS,
            stop=storage.stop,
            doing=f"hashing {local_dir}",
            size_bytes=lambda name: (local_dir / name).stat().st_size,
        )
    manifest = Manifest(
        kind=kind,
        created_by=f"trnpipe {__version__}",
        fields=dict(fields),
        files=dict(zip(names, records, strict=True)),
    )
    marker = manifest.to_json()
    storage.delete([join_key(prefix, MANIFEST_NAME)])
    target = storage.local_path(prefix)
    if target is None:
        storage.upload_dir(prefix, local_dir, names)
    else:
        with os_errors("writing", storage.uri(prefix)):
            _place(storage, local_dir, target, names)
    check_sizes(storage, prefix, manifest)
    storage.write_bytes(join_key(prefix, MANIFEST_NAME), marker)
    if target is not None and not _same_dir(local_dir, target):
        with os_errors("emptying", f"file://{local_dir}"):
            _remove(local_dir, names)
    return manifest


def _names(local_dir: Path) -> list[str]:
    """Every file to commit, relative and sorted; not the marker itself, nor what dead writers left."""
    if not local_dir.is_dir():
        raise DataError(f"{local_dir} is not a folder", expected="the folder with the files to commit")
    paths = (path.relative_to(local_dir) for path in local_dir.rglob("*") if path.is_file())
    names = [path.as_posix() for path in paths if not any(is_temp(part) for part in path.parts)]
    return sorted(name for name in names if name != MANIFEST_NAME)


def _same_dir(left: Path, right: Path) -> bool:
    return right.exists() and left.samefile(right)


def _place(storage: Storage, local_dir: Path, target: Path, names: list[str]) -> None:
    """Files under their final names, durable, with no marker yet. Sources stay until the marker is there."""
    atomic.make_dirs(target)
    for folder in {target.parent, target, *((target / name).parent for name in names)}:
        atomic.sweep_temps(folder)
    atomic.fsync_path(target)  # an earlier marker is gone for good before its files change
    if not _same_dir(local_dir, target):
        for name in names:
            storage.stop.raise_if_set(f"committing {target}")
            atomic.publish_file(local_dir / name, target / name, storage.stop)
        return
    for name in names:
        atomic.fsync_path(target / name)
    for folder in sorted({(target / name).parent for name in names} | {target}):
        atomic.fsync_path(folder)
    atomic.fsync_path(target.parent)


def _remove(local_dir: Path, names: list[str]) -> None:
    """Take away the committed sources and the folders they leave empty."""
    for name in names:
        (local_dir / name).unlink(missing_ok=True)
    folders = sorted((path for path in local_dir.rglob("*") if path.is_dir()), reverse=True)
    for folder in [*folders, local_dir]:
        if not any(folder.iterdir()):
            folder.rmdir()
