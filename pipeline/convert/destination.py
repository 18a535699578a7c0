"""Where an export goes: written under a hidden name, then shown whole. Nobody's files are overwritten."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import JsonValue

from pipeline.convert.record import KIND
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.errors import os_errors
from pipeline.io.place import place_of
from pipeline.io.retry import RetryPolicy
from pipeline.io.storage import Storage, join_key, open_storage

CLAIM = ".trnpipe-export"
"""Marks a folder on S3 as ours from before its first file until its manifest is there."""


@contextmanager
def destination(
    text: str, *, retry: RetryPolicy, workspace: Storage, scratch: Path, fields: Mapping[str, JsonValue]
) -> Iterator[Path]:
    """A folder to fill, which takes its place at `text` when the block ends well.

    An earlier export there is replaced; on S3, where nothing can be renamed, it is withdrawn first.
    Raises ConfigError for a folder of others, DiskFull, TransientError, Preempted.
    """
    storage, name = place_of(text, retry=retry, stop=workspace.stop, follow_links=True)
    check_free(storage, name)
    final = storage.local_path(name)
    if final is None:
        folder = scratch / "export"
        folder.mkdir(parents=True)
        yield folder
        _upload(storage, name, folder, fields)
        return
    with os_errors("writing", storage.uri(name)):
        atomic.make_dirs(final.parent)
        atomic.sweep_temps(final.parent)
        with atomic.temp_dir(final) as home:
            folder = home / "new"
            folder.mkdir()
            yield folder
            commit_dir(open_storage(str(home), stop=workspace.stop), folder, "new", kind=KIND, fields=fields)
            check_free(storage, name)  # it may have been written to meanwhile
            if final.exists():
                final.rename(home / "old")
            folder.rename(final)
            atomic.fsync_path(final.parent)


def _upload(storage: Storage, name: str, folder: Path, fields: Mapping[str, JsonValue]) -> None:
    claim = join_key(name, CLAIM)
    storage.delete_prefix(name)
    storage.write_bytes(claim, b"an export that is being written, or was broken off\n")
    commit_dir(storage, folder, name, kind=KIND, fields=fields)
    storage.delete([claim])


def check_free(storage: Storage, name: str) -> None:
    """Raises ConfigError unless nothing is there, or an export of ours and nothing beside it."""
    uri = storage.uri(name)
    if storage.stat(name) is not None:
        raise ConfigError(f"{uri} is a file", expected="a folder to export to", next_command="name another with --to")
    found = {stat.key.removeprefix(f"{name}/") for stat in storage.list(name)}
    try:
        manifest = read_manifest(storage, name) if MANIFEST_NAME in found else None
    except DataError:  # of another program, or damaged
        manifest = None
    if manifest is None and CLAIM in found:
        return
    ours = {CLAIM, MANIFEST_NAME, *manifest.files} if manifest is not None and manifest.kind == KIND else set()
    if foreign := sorted(found - ours):
        raise ConfigError(
            f"{uri} holds {foreign[0]}, which trnpipe export did not write",
            expected="a new or empty folder, or an earlier export",
            next_command="name another with --to, or move that file away",
        )
