"""Checksums of local cache entries, kept beside them: the compiler writes none, and reads whatever it finds.

One manifest per finished entry lies under `<root>/.trnpipe-sync/`, outside the folders the compiler looks into. It is
written when an entry is first seen finished, or came from a storage. A new `model.done` means a new compile: then the
old checksums no longer apply.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline import __version__
from pipeline.compile.cache_entry import DONE_NAME, CacheEntry, EntryName
from pipeline.core.errors import DataError
from pipeline.core.manifest import FileRecord, Manifest
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.commit import file_record
from pipeline.io.storage import os_errors

LEDGER_DIR = ".trnpipe-sync"
ENTRY_KIND = "compile-cache-entry"


@contextmanager
def cache_lock(root: Path, stop: StopSignal) -> Iterator[Path]:
    """Nobody else syncs or repairs this root; the folder of the records. Released by the kernel at death."""
    folder = root / LEDGER_DIR
    with os_errors("writing", f"file://{folder}"):
        atomic.make_dirs(folder)
        with atomic.exclusive(folder, stop):
            yield folder


def take(root: Path, entry: CacheEntry, stop: StopSignal) -> dict[str, FileRecord]:
    """The checksums of a finished entry as they are now, written down. KeyNotFound when it vanishes meanwhile."""
    records = records_of(root, entry, stop)
    write(root, entry.name, records)
    return records


def problem_of(root: Path, entry: CacheEntry, *, deep: bool, stop: StopSignal) -> str | None:
    """What is wrong with a finished entry by its checksums, or by its sizes alone; None when all is well or unknown."""
    known = read(root, entry)
    if known is None:
        return None
    for name, record in sorted(known.items()):
        size_bytes = entry.sizes.get(name)
        if size_bytes is None:
            return f"{name} is missing"
        if size_bytes != record.size_bytes:
            return f"{name} has {size_bytes} bytes, recorded were {record.size_bytes}"
    for name, record in sorted(known.items()) if deep else ():
        stop.raise_if_set(f"checking {entry.name.key}")
        seen = _record(root / entry.name.key / name, stop)
        if seen != record:
            return f"{name} has xxh3_128 {seen.xxh3_128}, recorded was {record.xxh3_128}"
    return None


def records_of(root: Path, entry: CacheEntry, stop: StopSignal) -> dict[str, FileRecord]:
    """Size and checksum of every file the compiler wrote, locks left out."""
    records = {}
    for file in entry.without_locks().files:
        stop.raise_if_set(f"checking {entry.name.key}")
        if "/" not in file.name:
            records[file.name] = _record(root / entry.name.key / file.name, stop)
    return records


def read(root: Path, entry: CacheEntry) -> dict[str, FileRecord] | None:
    """The checksums taken of this very compile; None when there are none, or none that can be read."""
    path = _path(root, entry.name)
    try:
        manifest = Manifest.from_json(path.read_bytes(), source=str(path))
    except (FileNotFoundError, DataError):
        return None  # a damaged record proves nothing: the entry counts as one never recorded
    return dict(manifest.files) if manifest.fields.get("done_mtime_ns") == _done_mtime_ns(root, entry.name) else None


def write(root: Path, name: EntryName, records: Mapping[str, FileRecord]) -> None:
    """Keep the checksums of a finished entry."""
    manifest = Manifest(
        kind=ENTRY_KIND,
        created_by=f"trnpipe {__version__}",
        fields={"entry": name.key, "done_mtime_ns": _done_mtime_ns(root, name)},
        files=dict(records),
    )
    path = _path(root, name)
    with os_errors("writing", f"file://{path}"):
        atomic.write_bytes_atomic(path, manifest.to_json())


def forget(root: Path, name: EntryName) -> None:
    """Drop the checksums of an entry that was removed."""
    path = _path(root, name)
    with os_errors("deleting", f"file://{path}"):
        path.unlink(missing_ok=True)


def _path(root: Path, name: EntryName) -> Path:
    return root / LEDGER_DIR / name.version_dir / f"{name.module_dir}.json"


def _done_mtime_ns(root: Path, name: EntryName) -> int:
    """The compile's identity: -1 without a marker."""
    try:
        return (root / name.key / DONE_NAME).stat().st_mtime_ns
    except FileNotFoundError:
        return -1


def _record(path: Path, stop: StopSignal) -> FileRecord:
    with os_errors("reading", f"file://{path}"):
        return file_record(path, stop)
