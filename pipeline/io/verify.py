"""Reading the marker of a committed folder and checking the files against it."""

from pipeline.core.errors import DataError
from pipeline.core.manifest import MANIFEST_NAME, FileRecord, Manifest
from pipeline.io.errors import KeyNotFound, key_not_found
from pipeline.io.hashing import record_of
from pipeline.io.keys import join_key
from pipeline.io.parallel import run_parallel
from pipeline.io.storage import Storage

NUM_VERIFY_THREADS = 4


def read_manifest(storage: Storage, prefix: str) -> Manifest | None:
    """The manifest of a committed folder, None when it is not committed, DataError when the manifest is damaged."""
    key = join_key(prefix, MANIFEST_NAME)
    try:
        data = storage.read_bytes(key)
    except KeyNotFound:
        return None
    return Manifest.from_json(data, source=storage.uri(key))


def require_manifest(storage: Storage, prefix: str) -> Manifest:
    """The manifest; KeyNotFound (a DataError) when the folder is not committed."""
    manifest = read_manifest(storage, prefix)
    if manifest is None:
        raise key_not_found(storage.uri(join_key(prefix, MANIFEST_NAME)))
    return manifest


def verify_dir(storage: Storage, prefix: str, *, deep: bool) -> Manifest:
    """Check every file: sizes by one listing, and with `deep` the checksums by reading all bytes.

    Raises DataError naming the first bad file (in name order), KeyNotFound when the folder is not committed.
    """
    manifest = require_manifest(storage, prefix)
    check_sizes(storage, prefix, manifest)
    if deep:
        names = sorted(manifest.files)

        def check(name: str) -> None:
            key = join_key(prefix, name)
            with storage.open_read(key) as file:
                check_record(storage.uri(key), manifest.files[name], record_of(file, storage.stop))

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
    """DataError naming the first file that is missing or has another size."""
    found = _sizes(storage, prefix, manifest)
    for name, record in sorted(manifest.files.items()):
        if found.get(name) != record.size_bytes:
            seen = f"has {found[name]} bytes" if name in found else "is missing"
            raise bad_file(storage.uri(join_key(prefix, name)), seen, f"{record.size_bytes} bytes")


def _sizes(storage: Storage, prefix: str, manifest: Manifest) -> dict[str, int]:
    """Sizes of the files that are there: one listing on S3; no listing on disk, as that would hash for the etags."""
    folder = storage.local_path(prefix)
    if folder is not None:
        return {name: (folder / name).stat().st_size for name in manifest.files if (folder / name).is_file()}
    cut = len(join_key(prefix, ""))
    return {stat.key[cut:]: stat.size_bytes for stat in storage.list(prefix)}


def check_record(uri: str, expected: FileRecord, seen: FileRecord) -> None:
    """DataError when size or checksum differ."""
    if seen != expected:
        raise bad_file(
            uri,
            f"has {seen.size_bytes} bytes and xxh3_128 {seen.xxh3_128}",
            f"{expected.size_bytes} bytes and xxh3_128 {expected.xxh3_128}",
        )


def bad_file(uri: str, seen: str, expected: str) -> DataError:
    """The one wording for a file that is not what its manifest says."""
    return DataError(
        f"{uri} {seen}",
        expected=f"{expected} as in its {MANIFEST_NAME}",
        next_command="delete that folder and run the stage that wrote it again",
    )
