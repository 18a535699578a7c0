"""Two-way exchange of finished entries between a compiler's local cache and a storage that all nodes share.

There an entry is a committed folder: `<entry>/<content id>/<files>`, then `<entry>/MANIFEST.json`. Two nodes that
compile the same graph make different bytes (a NEFF holds times and ids), so files lie in a folder named by their
content, and the marker, created once, names the winner's. An empty marker withdraws an entry that was found damaged:
the next node that has it replaces the marker.

Only what is new moves. Safe with many nodes at once, and when killed at any byte: in the storage the marker comes last,
on the disk an entry appears by one rename, or file by file with `model.done` last. What does not have its checksum is
left out, so that the compiler makes it again.
"""

import errno
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pipeline import __version__
from pipeline.compile.cache import (
    DONE_NAME,
    LOG_NAME,
    CacheEntry,
    EntryName,
    EntryState,
    Mounts,
    cache_lock,
    entry_state,
    list_entry,
    list_local,
    list_storage,
    mounted,
    refuse_network_root,
)
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.format import format_bytes
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.io import atomic
from pipeline.io.commit import bad_file, check_sizes, fetch_dir, file_record, hash_bytes
from pipeline.io.requests import run_parallel
from pipeline.io.storage import KeyNotFound, Storage, join_key, os_errors

Direction = Literal["both", "pull", "push"]
Item = TypeVar("Item")

WITHDRAWN = b""
NUM_ENTRY_THREADS = 4  # entries side by side; the files of each go side by side as well


@dataclass(frozen=True)
class Moved:
    """An entry that was copied."""

    entry: str
    size_bytes: int


@dataclass(frozen=True)
class LeftOut:
    """An entry that was not copied, and what became of it. `side`: where the fault is."""

    entry: str
    side: Literal["local", "storage"]
    reason: str
    action: str


@dataclass(frozen=True)
class SyncReport:
    """What one sync did. `in_step`: entries finished on both sides before, or meanwhile by another node."""

    root: str
    storage: str
    pulled: tuple[Moved, ...]
    pushed: tuple[Moved, ...]
    left_out: tuple[LeftOut, ...]
    in_step: int

    def lines(self) -> list[str]:
        def total(moved: tuple[Moved, ...]) -> str:
            return f"{len(moved)} ({format_bytes(sum(one.size_bytes for one in moved))})"

        return [
            f"cache sync {self.root} <-> {self.storage} | pulled {total(self.pulled)} | pushed {total(self.pushed)}"
            f" | in step {self.in_step} | left out {len(self.left_out)}",
            *(f"left out ({one.side}) {one.entry}: {one.reason}; {one.action}" for one in self.left_out),
        ]


def sync_cache(
    root: Path,
    storage: Storage,
    *,
    direction: Direction = "both",
    compiler_versions: Collection[str] | None = None,
    mounts: Mounts = mounted,
) -> SyncReport:
    """Bring the local cache `root` and `storage` in step, for all compilers or for some versions.

    Pulls first: training waits for that. Polls the storage's stop signal between files.
    Raises ConfigError for a root on a network file system or a root that is itself such a storage; DiskFull,
    TransientError and Preempted leave what was copied so far usable, and the same call continues.
    """
    refuse_network_root(root, mounts=mounts)
    shared = storage.local_path("")
    if (shared is not None and shared.resolve() == root.resolve()) or any(one.is_published for one in list_local(root)):
        raise ConfigError(
            f"compile cache {root} is the storage that caches are synced with",
            expected="the compiler's own folder on one side, a folder or s3:// prefix for all nodes on the other",
            next_command="trnpipe config  # the compile section names both",
        )
    with cache_lock(root, storage.stop) as work_dir:
        staging = work_dir / "staging"
        _clear(staging)  # a dead sync's: the lock is ours
        try:
            return _Sync(root, storage, staging, direction, compiler_versions).run()
        finally:
            _clear(staging)


@dataclass(frozen=True)
class _Sync:
    """One run: what to do with each entry, in order."""

    root: Path
    storage: Storage
    staging: Path
    direction: Direction
    versions: Collection[str] | None

    def run(self) -> SyncReport:
        local, remote = self._done(list_local(self.root)), self._done(list_storage(self.storage))
        # What a compiler wrote to the storage itself has no checksums, and is not trusted.
        foreign = [name for name in sorted(remote.keys() - local) if not remote[name].is_published]
        left_out = [
            LeftOut(name.key, "storage", "has no checksums: a compiler wrote it there", "not pulled")
            for name in (foreign if self.direction != "push" else ())
        ]
        committed = {name for name, entry in remote.items() if entry.is_published}
        in_step = len(local.keys() & committed)
        pulled: list[Moved] = []
        pushed: list[Moved] = []
        if self.direction != "push":
            pulled, _ = self._each(self._pull, sorted(committed - local.keys()), "pulling", left_out)
        if self.direction != "pull":
            new = [local[name] for name in sorted(local.keys() - committed)]
            pushed, num_lost = self._each(self._push, new, "pushing", left_out)
            in_step += num_lost
        where = self.storage.uri("")
        return SyncReport(f"file://{self.root}", where, tuple(pulled), tuple(pushed), tuple(left_out), in_step)

    def _done(self, entries: list[CacheEntry]) -> dict[EntryName, CacheEntry]:
        chosen = (one for one in entries if self.versions is None or one.name.is_of(self.versions))
        return {one.name: one for one in chosen if one.state is EntryState.DONE}

    def _each(
        self, move: Callable[[Item], Moved | LeftOut | None], items: Sequence[Item], doing: str, left_out: list[LeftOut]
    ) -> tuple[list[Moved], int]:
        """What was moved, and how many entries another node had moved first."""
        doing = f"{doing} compile cache entries"
        results = run_parallel(move, items, num_threads=NUM_ENTRY_THREADS, stop=self.storage.stop, doing=doing)
        left_out += [result for result in results if isinstance(result, LeftOut)]
        return [result for result in results if isinstance(result, Moved)], results.count(None)

    def _pull(self, name: EntryName) -> Moved | LeftOut:
        if list_entry(self.root, name).locks:
            return LeftOut(name.key, "local", "locked", "a compiler makes it, or died: trnpipe cache repair")
        stat = self.storage.stat(_marker(name))  # before the entry is judged
        try:
            folder, size_bytes = self._fetch(name)
        except DataError as error:  # make room for whoever has, or compiles, it anew; a pure pull changes nothing there
            if self.direction == "pull":
                action = "left there: trnpipe cache sync would withdraw it"
            elif stat is not None and stat.etag and self.storage.write_if_match(_marker(name), WITHDRAWN, stat.etag):
                action = "withdrawn there, to be compiled and pushed again"
            else:
                action = "another node has changed it meanwhile: sync again"
            return LeftOut(name.key, "storage", error.seen, action)
        if not place_entry(self.root, name, folder):
            return LeftOut(name.key, "local", "locked meanwhile", "a compiler makes it")
        return Moved(name.key, size_bytes)

    def _fetch(self, name: EntryName) -> tuple[Path, int]:
        """A verified copy beside the cache, and its size. DataError when the marker or a file is damaged."""
        fetched = fetch_dir(self.storage, name.key, self.staging / name.key)
        with os_errors("reading", f"file://{fetched}"):
            manifest = Manifest.from_json((fetched / MANIFEST_NAME).read_bytes(), source=str(fetched))
            content = next(iter(manifest.files), "").partition("/")[0]
            names = {file.removeprefix(f"{content}/") for file in manifest.files}
            is_whole = entry_state(names) is EntryState.DONE
            if manifest.fields.get("entry") != name.key or not is_whole or any("/" in file for file in names):
                uri = self.storage.uri(_marker(name))
                raise bad_file(uri, "is not that of this entry, finished", "its files")
            folder = self.staging / name.key / content
            if self.storage.local_path("") is not None:
                self.storage.download_dir(join_key(name.key, content), folder, sorted(names))
            else:
                (fetched / content).rename(folder)
        return folder, sum(record.size_bytes for record in manifest.files.values())

    def _push(self, entry: CacheEntry) -> Moved | LeftOut | None:
        """Upload the files, then the marker. None when another node's marker was first; its entry then stays."""
        key, marker, folder = entry.name.key, _marker(entry.name), self.root / entry.name.key
        before = self.storage.stat(marker)
        if before is not None and before.size_bytes:
            return None
        try:
            names = [file.name for file in entry.without_locks().files if "/" not in file.name]
            with os_errors("reading", f"file://{folder}"):
                records = {file: file_record(folder / file, self.storage.stop) for file in sorted(names)}
            text = "\n".join(f"{file} {record.size_bytes} {record.xxh3_128}" for file, record in records.items())
            content = hash_bytes(text.encode())
            manifest = Manifest(
                kind="compile-cache-entry",
                created_by=f"trnpipe {__version__}",
                fields={"entry": key},
                files={f"{content}/{file}": record for file, record in records.items()},
            )
            target = self.storage.local_path(join_key(key, content))
            if target is not None:
                atomic.sweep_temps(target)
            self.storage.upload_dir(join_key(key, content), folder, sorted(records))
            check_sizes(self.storage, key, manifest)
        except DataError as error:
            return LeftOut(key, "local", f"changed while it was read ({error.seen})", "not pushed")
        self.storage.stop.raise_if_set(f"publishing {key}")
        data = manifest.to_json()
        if before is not None:
            won = self.storage.write_if_match(marker, data, before.etag)
        else:
            won = self.storage.write_if_absent(marker, data)
        if won:
            return Moved(key, sum(record.size_bytes for record in records.values()))
        try:  # the winner's bytes may be ours too; as text, because a damaged marker is for the next reader to judge
            is_named = f'"{content}/'.encode() in self.storage.read_bytes(marker)
        except KeyNotFound:
            is_named = False
        if not is_named:
            self.storage.delete(join_key(key, file) for file in manifest.files)
        return None


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
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if list_entry(root, name).locks:
                return False
            names = {path.name for path in folder.iterdir()}
            (target / DONE_NAME).unlink(missing_ok=True)
            for file in sorted(names - {DONE_NAME}):
                (folder / file).replace(target / file)
            if LOG_NAME not in names:
                (target / LOG_NAME).unlink(missing_ok=True)
            atomic.fsync_path(target)
            (folder / DONE_NAME).replace(target / DONE_NAME)
        atomic.fsync_path(target)
        atomic.fsync_path(target.parent)
    return True


def _marker(name: EntryName) -> str:
    return join_key(name.key, MANIFEST_NAME)


def _clear(staging: Path) -> None:
    with os_errors("deleting", f"file://{staging}"):
        if staging.exists():
            shutil.rmtree(staging)
