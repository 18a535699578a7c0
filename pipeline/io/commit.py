"""Commit, verify and fetch artifacts.

An artifact is a folder with a MANIFEST.json. To commit one, we first write all files, then verify their sizes in the
final location, and finally write the manifest. Readers ignore folders without a manifest. This means that a writer can
be killed at any time, because it only leaves behind an uncommitted folder and can simply run again.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import xxhash
from pydantic import JsonValue

from pipeline import __version__
from pipeline.core.errors import DataError
from pipeline.core.manifest import MANIFEST_NAME, FileRecord, Manifest
from pipeline.core.progress import Advance
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.requests import run_parallel
from pipeline.io.storage import KeyNotFound, Storage, check_key, folder_key, join_key, key_not_found, os_errors

# Files are hashed with xxh3_128. It is not cryptographic, but fast enough that hashing is limited by the disk.

BLOCK_BYTES = 8 * 2**20


def hash_bytes(data: bytes) -> str:
    """Return the xxh3_128 checksum of `data` in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def stream_record(
    file: BinaryIO,
    stop: StopSignal | None = None,
    advance: Advance = lambda count: None,
    also: Callable[[bytes], object] = lambda block: None,
) -> FileRecord:
    """Read a stream to its end and return its size and checksum.

    `stop` is polled every 8 MiB, and `advance` and `also` are called with the size and the content of each such block.
    """
    hasher, size_bytes = xxhash.xxh3_128(), 0
    while block := file.read(BLOCK_BYTES):
        if stop is not None:
            stop.raise_if_set("checking a file")
        hasher.update(block)
        also(block)
        size_bytes += len(block)
        advance(len(block))
    return FileRecord(size_bytes=size_bytes, xxh3_128=hasher.hexdigest())


def file_record(path: Path, stop: StopSignal | None = None) -> FileRecord:
    """Return the size and the checksum of a local file."""
    with path.open("rb") as file:
        return stream_record(file, stop)


# Verify the files of a committed folder against its manifest.

NUM_VERIFY_THREADS = 4


def read_manifest(storage: Storage, prefix: str) -> Manifest | None:
    """Return the manifest of a folder, or None if the folder is not committed.

    Raises DataError if the manifest is damaged.
    """
    key = join_key(prefix, MANIFEST_NAME)
    try:
        data = storage.read_bytes(key)
    except KeyNotFound:
        return None
    return Manifest.from_json(data, source=storage.uri(key))


def require_manifest(storage: Storage, prefix: str) -> Manifest:
    """Return the manifest of a folder. Raises KeyNotFound, which is a DataError, if the folder is not committed."""
    manifest = read_manifest(storage, prefix)
    if manifest is None:
        raise key_not_found(storage.uri(join_key(prefix, MANIFEST_NAME)))
    return manifest


def verify_dir(storage: Storage, prefix: str, *, deep: bool, sha256: dict[str, str] | None = None) -> Manifest:
    """Verify the files of a committed folder and return its manifest.

    The sizes of all files are verified with a single listing. If `deep` is set, all files are read to verify their
    checksums as well, and their SHA-256 are added to `sha256` by name. Raises DataError with the name of the first bad
    file, or KeyNotFound if the folder is not committed.
    """
    manifest = require_manifest(storage, prefix)
    check_sizes(storage, prefix, manifest)
    if deep:
        names = sorted(manifest.files)

        def check(name: str) -> None:
            key, hasher = join_key(prefix, name), hashlib.sha256()
            with os_errors("reading", storage.uri(key)), storage.open_read(key) as file:
                also = (lambda block: None) if sha256 is None else hasher.update
                check_record(storage.uri(key), manifest.files[name], stream_record(file, storage.stop, also=also))
            if sha256 is not None:
                sha256[name] = hasher.hexdigest()

        run_parallel(
            check,
            names,
            num_threads=NUM_VERIFY_THREADS,
            stop=storage.stop,
            doing=f"verifying {prefix}",
            size_bytes=lambda name: manifest.files[name].size_bytes,
        )
    return manifest


def check_sizes(storage: Storage, prefix: str, manifest: Manifest) -> None:
    """Raise DataError if a file is missing or has the wrong size."""
    sizes = _sizes(storage, prefix, manifest)
    for name, record in sorted(manifest.files.items()):
        if sizes.get(name) != record.size_bytes:
            seen = f"has {sizes[name]} bytes" if name in sizes else "is missing"
            raise bad_file(storage.uri(join_key(prefix, name)), seen, f"{record.size_bytes} bytes")


def _sizes(storage: Storage, prefix: str, manifest: Manifest) -> dict[str, int]:
    """Return the sizes of all files that exist.

    This avoids `Storage.list` for local storage, because it would hash files in order to return their etags.
    """
    folder = storage.local_path(prefix)
    if folder is not None:
        return {name: (folder / name).stat().st_size for name in manifest.files if (folder / name).is_file()}
    cut = len(join_key(prefix, ""))
    return {stat.key[cut:]: stat.size_bytes for stat in storage.list(prefix)}


def check_record(uri: str, expected: FileRecord, actual: FileRecord) -> None:
    """Raise DataError if the size or the checksum of a file is wrong."""
    if actual != expected:
        raise bad_file(
            uri,
            f"has {actual.size_bytes} bytes and xxh3_128 {actual.xxh3_128}",
            f"{expected.size_bytes} bytes and xxh3_128 {expected.xxh3_128}",
        )


def bad_file(uri: str, seen: str, expected: str) -> DataError:
    """Return the error for a file that does not match its manifest."""
    return DataError(
        f"{uri} {seen}",
        expected=f"{expected}, as listed in {MANIFEST_NAME}",
        next_command="delete that folder, then rerun the stage that wrote it",
    )


# Fetch a committed folder to a local cache, which all processes on a machine may share.


def fetch_dir(storage: Storage, prefix: str, cache_dir: Path, *, deep: bool = True) -> Path:
    """Return a local folder with the verified files of a committed folder.

    If the storage is local, this is the folder itself. Otherwise, the files are downloaded to `cache_dir/<digest>`. An
    interrupted download continues with the files that are still missing. If several processes fetch the same folder at
    the same time, it is downloaded only once.

    If `deep` is False, only the sizes are verified for files that are already local. Downloaded files are always
    verified in full. Raises DataError with the name of a bad file, or KeyNotFound if the folder is not committed.
    """
    real = storage.local_path(prefix)
    if real is not None:
        verify_dir(storage, prefix, deep=deep)
        return real
    manifest = require_manifest(storage, prefix)
    folder = cache_dir.absolute() / manifest.digest
    marker = folder / MANIFEST_NAME
    with os_errors("writing", f"file://{folder}"):
        if marker.exists() and not _bad_names(folder, manifest, storage, deep=deep):
            return folder
        atomic.make_dirs(folder)
        with atomic.exclusive(folder.with_suffix(".lock"), storage.stop):
            # Without a manifest the files may be from a process that was killed, so we can't rely on their sizes.
            missing = _bad_names(folder, manifest, storage, deep=deep or not marker.exists())
            if missing:
                _download(storage, prefix, folder, manifest, missing)
            if not marker.exists():
                atomic.write_bytes_atomic(marker, manifest.to_json())
    return folder


def _download(storage: Storage, prefix: str, folder: Path, manifest: Manifest, names: list[str]) -> None:
    """Download some files of a folder. A file that arrives damaged is downloaded again before an error is raised."""
    for part in {folder, *((folder / name).parent for name in names)}:
        atomic.sweep_temps(part)
    storage.download_dir(prefix, folder, names)
    damaged = _bad_names(folder, manifest, storage, deep=True)
    storage.download_dir(prefix, folder, damaged)
    for name in damaged:
        try:
            check_record(storage.uri(join_key(prefix, name)), manifest.files[name], file_record(folder / name))
        except DataError:
            (folder / name).unlink()
            raise


def _bad_names(folder: Path, manifest: Manifest, storage: Storage, *, deep: bool) -> list[str]:
    """Return the sorted names of files that are missing or don't match the manifest."""

    def is_bad(name: str) -> bool:
        path, record = folder / name, manifest.files[name]
        if not path.is_file() or path.stat().st_size != record.size_bytes:
            return True
        return deep and file_record(path, storage.stop) != record

    names = sorted(manifest.files)
    bad = run_parallel(
        is_bad,
        names,
        num_threads=NUM_VERIFY_THREADS,
        stop=storage.stop,
        doing=f"verifying {folder}",
        size_bytes=lambda name: manifest.files[name].size_bytes,
    )
    return [name for name, flag in zip(names, bad, strict=True) if flag]


NUM_HASH_THREADS = 4


def commit_dir(
    storage: Storage, local_dir: Path, prefix: str, *, kind: str, fields: Mapping[str, JsonValue]
) -> Manifest:
    """Commit all files in a local folder to `prefix` and return the manifest.

    On S3, the files are uploaded and `local_dir` is kept. On file://, the files are moved (or copied, if `local_dir` is
    on a different file system) and `local_dir` is left empty. If `local_dir` already is the target folder, its files
    are only fsynced.

    If the target has already been committed, the old manifest is deleted first, so that readers never see a mix of old
    and new files. Raises DataError if `local_dir` doesn't exist.
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
    manifest = _manifest(kind, fields, dict(zip(names, records, strict=True)))
    marker = manifest.to_json()
    storage.delete([join_key(prefix, MANIFEST_NAME)])
    target = storage.local_path(prefix)
    if target is None:
        storage.upload_dir(prefix, local_dir, names)
    else:
        with os_errors("writing", storage.uri(prefix)):
            _move_into_place(storage, local_dir, target, names)
    check_sizes(storage, prefix, manifest)
    storage.write_bytes(join_key(prefix, MANIFEST_NAME), marker)
    if target is not None and not local_dir.samefile(target):
        with os_errors("emptying", f"file://{local_dir}"):
            _remove_sources(local_dir, names)
    return manifest


def commit_files(
    storage: Storage, prefix: str, *, kind: str, fields: Mapping[str, JsonValue], files: Mapping[str, FileRecord]
) -> Manifest:
    """Commit files that have already been stored under `prefix` by writing their manifest.

    It is safe for several processes to commit the same files concurrently, because they all write the same manifest.
    Raises DataError if a file is missing or has the wrong size.
    """
    manifest = _manifest(kind, fields, {name: files[name] for name in sorted(files)})
    check_sizes(storage, prefix, manifest)
    storage.write_bytes(join_key(prefix, MANIFEST_NAME), manifest.to_json())
    return manifest


def _manifest(kind: str, fields: Mapping[str, JsonValue], files: dict[str, FileRecord]) -> Manifest:
    return Manifest(kind=kind, created_by=f"trnpipe {__version__}", fields=dict(fields), files=files)


def _names(local_dir: Path) -> list[str]:
    """Return the sorted relative paths of all files to commit. The manifest and temp files are skipped."""
    if not local_dir.is_dir():
        raise DataError(f"{local_dir} is not a folder", expected="a folder with the files to commit")
    paths = (path.relative_to(local_dir) for path in local_dir.rglob("*") if path.is_file())
    names = [path.as_posix() for path in paths if not any(atomic.is_temp(part) for part in path.parts)]
    return sorted(name for name in names if name != MANIFEST_NAME)


def _move_into_place(storage: Storage, local_dir: Path, target: Path, names: list[str]) -> None:
    """Publish the files in their final location and fsync them. The sources are kept until the manifest is written."""
    atomic.make_dirs(target)
    for folder in {target.parent, target, *((target / name).parent for name in names)}:
        atomic.sweep_temps(folder)
    atomic.fsync_path(target)  # ensure that the old manifest is really gone before its files change
    if not local_dir.samefile(target):
        for name in names:
            storage.stop.raise_if_set(f"committing {target}")
            atomic.publish_file(local_dir / name, target / name, storage.stop)
        return
    for name in names:
        atomic.fsync_path(target / name)
    for folder in sorted({(target / name).parent for name in names} | {target}):
        atomic.fsync_path(folder)
    atomic.fsync_path(target.parent)


def _remove_sources(local_dir: Path, names: list[str]) -> None:
    """Delete the source files that have been committed, and any folders that are empty as a result."""
    for name in names:
        (local_dir / name).unlink(missing_ok=True)
    folders = sorted((path for path in local_dir.rglob("*") if path.is_dir()), reverse=True)
    for folder in [*folders, local_dir]:
        if not any(folder.iterdir()):
            folder.rmdir()
