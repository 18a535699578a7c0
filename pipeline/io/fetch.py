"""A committed folder as verified local files, shared by the processes of one machine."""

from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.io import atomic, locks
from pipeline.io.errors import os_errors
from pipeline.io.hashing import file_record
from pipeline.io.keys import join_key
from pipeline.io.parallel import run_parallel
from pipeline.io.storage import Storage
from pipeline.io.verify import NUM_VERIFY_THREADS, check_record, require_manifest, verify_dir


def fetch_dir(storage: Storage, prefix: str, cache_dir: Path, *, deep: bool = True) -> Path:
    """A local folder with the verified files of a committed one: itself under file://, else `cache_dir/<digest>`.

    A download resumes file by file, is verified and marked with the manifest. Processes that fetch the same content
    at the same time download it once. `deep=False` trusts sizes of files that are already local; a download is
    always checked in full. Raises DataError naming the bad file, KeyNotFound when the folder is not committed.
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
        with locks.exclusive(folder.with_suffix(".lock"), storage.stop):
            # Without the marker a file may be a dead writer's: only its checksum proves it.
            missing = _bad_names(folder, manifest, storage, deep=deep or not marker.exists())
            if missing:
                _download(storage, prefix, folder, manifest, missing)
            if not marker.exists():
                atomic.write_bytes_atomic(marker, manifest.to_json())
    return folder


def _download(storage: Storage, prefix: str, folder: Path, manifest: Manifest, names: list[str]) -> None:
    """Get the named files; one that arrives damaged is got once more before it is called bad."""
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
    """Files that are missing or differ from the manifest, in name order."""

    def is_bad(name: str) -> bool:
        path, record = folder / name, manifest.files[name]
        if not path.is_file() or path.stat().st_size != record.size_bytes:
            return True
        return deep and file_record(path, storage.stop) != record

    names = sorted(manifest.files)
    doing = f"verifying {folder}"
    bad = run_parallel(
        is_bad,
        names,
        num_threads=NUM_VERIFY_THREADS,
        stop=storage.stop,
        doing=doing,
        size_bytes=lambda name: manifest.files[name].size_bytes,
    )
    return [name for name, flag in zip(names, bad, strict=True) if flag]
