"""One cache entry in a storage that many nodes write: `<entry>/<content id>/<files>`, then `<entry>/MANIFEST.json`.

Two nodes that compile the same graph make different bytes (a NEFF holds times and ids). So files lie in a folder named
by their content, and the marker, created once, names the winner's. An empty marker withdraws an entry that was found
damaged: the next node that has it replaces the marker.
"""

from collections.abc import Mapping
from pathlib import Path

from pipeline import __version__
from pipeline.compile.cache_entry import CacheEntry, EntryName, EntryState, entry_state
from pipeline.compile.cache_ledger import ENTRY_KIND
from pipeline.core.errors import DataError
from pipeline.core.manifest import MANIFEST_NAME, FileRecord, Manifest
from pipeline.io import atomic
from pipeline.io.commit import (
    bad_file,
    check_record,
    check_sizes,
    file_record,
    hash_bytes,
    require_manifest,
    verify_dir,
)
from pipeline.io.storage import KeyNotFound, Storage, join_key, os_errors

WITHDRAWN = b""


def is_committed(remote: CacheEntry | None) -> bool:
    """True when the entry has a marker that was not withdrawn."""
    return remote is not None and remote.sizes.get(MANIFEST_NAME, 0) > 0


def publish(
    storage: Storage,
    prefix: str,
    name: EntryName,
    folder: Path,
    records: Mapping[str, FileRecord],
    remote: CacheEntry | None,
) -> bool:
    """Upload the files, then the marker. False when another node's marker was first; its entry then stays.

    `remote`: what was listed there. What an interrupted upload of the same content left is not sent again.
    """
    base, content = join_key(prefix, name.key), _content_id(records)
    marker = join_key(base, MANIFEST_NAME)
    manifest = Manifest(
        kind=ENTRY_KIND,
        created_by=f"trnpipe {__version__}",
        fields={"entry": name.key},
        files={f"{content}/{file}": record for file, record in records.items()},
    )
    before = storage.stat(marker)
    if before is not None and before.size_bytes:
        return False
    # Without a marker, files of this content are what an upload left that was killed; a withdrawn entry proves nothing.
    there = remote.sizes if remote is not None and before is None else {}
    sent = [file for file, record in sorted(records.items()) if there.get(f"{content}/{file}") != record.size_bytes]
    target = storage.local_path(join_key(base, content))
    if target is not None:
        atomic.sweep_temps(target)
    storage.upload_dir(join_key(base, content), folder, sent)
    try:
        check_sizes(storage, base, manifest)
    except DataError:
        # A node with the same bytes may have lost meanwhile to a third one, and have tidied up.
        now = storage.stat(marker)
        if now is not None and now.size_bytes:
            return False
        raise
    storage.stop.raise_if_set(f"publishing {name.key}")
    data = manifest.to_json()
    if storage.write_if_match(marker, data, before.etag) if before else storage.write_if_absent(marker, data):
        return True
    if not _is_named(storage, marker, content):
        storage.delete(join_key(base, f"{content}/{file}") for file in records)
    return False


def fetch(storage: Storage, prefix: str, name: EntryName, staging: Path) -> tuple[Path, dict[str, FileRecord]]:
    """Download a committed entry into `staging`; the folder with its verified files, and their records.

    DataError when the marker or a file is damaged: a file that arrives wrong is got once more first.
    """
    base = join_key(prefix, name.key)
    manifest = require_manifest(storage, base)
    content = next(iter(manifest.files), "").partition("/")[0]
    folder = staging / content
    records = {file.removeprefix(f"{content}/"): record for file, record in manifest.files.items()}
    if (
        manifest.fields.get("entry") != name.key
        or any("/" in file for file in records)
        or entry_state(records, compiler=name.compiler) is not EntryState.DONE
    ):
        raise bad_file(storage.uri(join_key(base, MANIFEST_NAME)), "is not that of this entry, finished", "its files")
    storage.download_dir(join_key(base, content), folder, sorted(records))
    storage.download_dir(join_key(base, content), folder, _damaged(folder, records, storage))
    for file, record in sorted(records.items()):
        with os_errors("reading", f"file://{folder / file}"):
            seen = file_record(folder / file, storage.stop)
        check_record(storage.uri(join_key(base, f"{content}/{file}")), record, seen)
    return folder, records


def problem_of(storage: Storage, prefix: str, name: EntryName) -> str | None:
    """What is wrong with a committed entry, read in full; None when nothing is."""
    try:
        verify_dir(storage, join_key(prefix, name.key), deep=True)
    except DataError as error:
        return error.seen
    return None


def marker_etag(storage: Storage, prefix: str, name: EntryName) -> str:
    """The marker's version; '' when it is missing. Taken before an entry is judged, given to `withdraw`."""
    stat = storage.stat(join_key(join_key(prefix, name.key), MANIFEST_NAME))
    return stat.etag if stat is not None else ""


def withdraw(storage: Storage, prefix: str, name: EntryName, etag: str) -> bool:
    """Take the marker back; False when it is no longer the one that was judged."""
    return storage.write_if_match(join_key(join_key(prefix, name.key), MANIFEST_NAME), WITHDRAWN, etag)


def _is_named(storage: Storage, marker: str, content: str) -> bool:
    """True when the winner's bytes are also ours. Read as text: a damaged marker is for the next reader to judge."""
    try:
        return f'"{content}/'.encode() in storage.read_bytes(marker)
    except KeyNotFound:
        return False


def _content_id(records: Mapping[str, FileRecord]) -> str:
    """32 hex digits that name the bytes of all files."""
    text = "\n".join(f"{file} {record.size_bytes} {record.xxh3_128}" for file, record in sorted(records.items()))
    return hash_bytes(text.encode())


def _damaged(folder: Path, records: Mapping[str, FileRecord], storage: Storage) -> list[str]:
    with os_errors("reading", f"file://{folder}"):
        return [file for file, record in sorted(records.items()) if file_record(folder / file, storage.stop) != record]
