"""Two-way exchange of finished entries between a compiler's local cache and a storage that all nodes share.

Only what is new moves. Safe with many nodes at once, and when killed at any byte: in the storage the marker comes last
(`cache_remote`), on the disk an entry appears by one rename, or file by file with `model.done` last. What does not
have its checksum is left out and taken away, so that the compiler makes it again.
"""

import errno
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pipeline.compile import cache_ledger, cache_remote
from pipeline.compile.cache_entry import DONE_NAME, LOG_NAME, CacheEntry, EntryName, EntryState
from pipeline.compile.cache_host import Mounts, mounted, refuse_network_root
from pipeline.compile.cache_scan import list_entry, list_local, list_storage
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.format import format_bytes
from pipeline.core.manifest import FileRecord
from pipeline.io import atomic
from pipeline.io.requests import run_parallel
from pipeline.io.storage import KeyNotFound, Storage, os_errors

# A verified entry put before the eyes of a compiler that may be reading the cache: whole, or not finished yet.

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


Direction = Literal["both", "pull", "push"]
# sizes: trust what is on both sides; local: read the local entries; all: read those of the storage too
Verify = Literal["sizes", "local", "all"]

NUM_ENTRY_THREADS = 4  # entries side by side; the files of each go side by side as well
STAGING_DIR = "staging"

Item = TypeVar("Item")


@dataclass(frozen=True)
class Moved:
    """An entry that was copied."""

    entry: str
    num_files: int
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
    prefix: str = "",
    *,
    direction: Direction = "both",
    verify: Verify = "local",
    compiler_versions: Collection[str] | None = None,
    mounts: Mounts = mounted,
) -> SyncReport:
    """Bring the local cache `root` and `storage`'s `prefix` in step, for all compilers or for some versions.

    Pulls first: training waits for that. Polls the storage's stop signal between files. Entries that are new to the
    storage are always read and checked before they go there.
    Raises ConfigError for a root on a network file system or a root that is itself such a storage; DiskFull,
    TransientError and Preempted leave what was copied so far usable, and the same call continues.
    """
    refuse_network_root(root, mounts=mounts)
    _refuse_same(root, storage, prefix)
    with cache_ledger.cache_lock(root, storage.stop) as records_dir:
        staging = records_dir / STAGING_DIR
        _clear(staging)  # a dead sync's: the lock is ours
        for version_dir in {entry.name.version_dir for entry in list_local(root)}:
            atomic.sweep_temps(root / version_dir)
        try:
            return _Sync(root, storage, prefix.strip("/"), staging, direction, verify, compiler_versions).run()
        finally:
            _clear(staging)


@dataclass(frozen=True)
class _Sync:
    """One run: what to do with each entry, in order."""

    root: Path
    storage: Storage
    prefix: str
    staging: Path
    direction: Direction
    verify: Verify
    versions: Collection[str] | None

    def run(self) -> SyncReport:
        left_out: list[LeftOut] = []
        remote = {entry.name: entry for entry in self._chosen(list_storage(self.storage, self.prefix))}
        committed = {name for name, entry in remote.items() if cache_remote.is_committed(entry)}
        if self.verify == "all":
            committed -= self._damaged_remote(committed, left_out)
        local = {entry.name: entry for entry in self._chosen(list_local(self.root))}
        done = {name for name, entry in local.items() if entry.state is EntryState.DONE}
        done -= self._damaged_local([local[name] for name in sorted(done)], committed, left_out)
        in_step = len(done & committed)
        pulled: list[Moved] = []
        pushed: list[Moved] = []
        if self.direction != "push":
            left_out += _without_checksums(remote, done)
            pulled, _ = self._each(self._pull, sorted(committed - done), "pulling", left_out)
        if self.direction != "pull":
            new = [(local[name], remote.get(name)) for name in sorted(done - committed)]
            pushed, num_lost = self._each(self._push, new, "pushing", left_out)
            in_step += num_lost
        where = self.storage.uri(self.prefix)
        return SyncReport(f"file://{self.root}", where, tuple(pulled), tuple(pushed), tuple(left_out), in_step)

    def _chosen(self, entries: Iterable[CacheEntry]) -> list[CacheEntry]:
        return [entry for entry in entries if self.versions is None or entry.name.is_of(self.versions)]

    def _each(
        self, move: Callable[[Item], Moved | LeftOut | None], items: Sequence[Item], doing: str, left_out: list[LeftOut]
    ) -> tuple[list[Moved], int]:
        """What was moved, and how many entries another node had moved first."""
        doing = f"{doing} compile cache entries"
        results = run_parallel(move, items, num_threads=NUM_ENTRY_THREADS, stop=self.storage.stop, doing=doing)
        left_out += [result for result in results if isinstance(result, LeftOut)]
        return [result for result in results if isinstance(result, Moved)], results.count(None)

    def _damaged_remote(self, names: Iterable[EntryName], left_out: list[LeftOut]) -> set[EntryName]:
        """Read every entry of the storage; those that are not what their marker says are withdrawn."""
        bad = set()
        for name in sorted(names):
            self.storage.stop.raise_if_set(f"verifying {name.key}")
            etag = cache_remote.marker_etag(self.storage, self.prefix, name)
            problem = cache_remote.problem_of(self.storage, self.prefix, name)
            if problem is not None:
                bad.add(name)
                left_out.append(self._withdraw(name, etag, problem))
        return bad

    def _damaged_local(
        self, entries: Sequence[CacheEntry], committed: Collection[EntryName], left_out: list[LeftOut]
    ) -> set[EntryName]:
        """Compare finished entries with the checksums taken earlier (the first time: take them).

        A damaged one is removed, unless it is locked.
        """
        bad = set()
        for entry in entries:
            deep = self.verify != "sizes" or entry.name not in committed
            try:
                problem = self._local_problem(entry, deep=deep)
            except KeyNotFound as error:
                problem = f"vanished while it was read ({error.seen})"
            if problem is not None:
                bad.add(entry.name)
                left_out.append(LeftOut(entry.name.key, "local", problem, self._drop(entry.name)))
        return bad

    def _local_problem(self, entry: CacheEntry, *, deep: bool) -> str | None:
        if deep and cache_ledger.read(self.root, entry) is None:
            cache_ledger.take(self.root, entry, self.storage.stop)
            return None
        return cache_ledger.problem_of(self.root, entry, deep=deep, stop=self.storage.stop)

    def _drop(self, name: EntryName) -> str:
        """Take a damaged entry away; what was done."""
        folder = self.root / name.key
        if list_entry(self.root, name).locks:
            return "locked, so left as it is: trnpipe cache repair"
        with os_errors("deleting", f"file://{folder}"):
            if folder.is_dir():
                atomic.remove_tree(folder)
        cache_ledger.forget(self.root, name)
        return "removed here, to be pulled or compiled again"

    def _pull(self, name: EntryName) -> Moved | LeftOut:
        if list_entry(self.root, name).locks:
            return LeftOut(name.key, "local", "locked", "a compiler makes it, or died: trnpipe cache repair")
        etag = cache_remote.marker_etag(self.storage, self.prefix, name)
        try:
            folder, records = cache_remote.fetch(self.storage, self.prefix, name, self.staging / name.key)
        except DataError as error:
            return self._withdraw(name, etag, error.seen)
        if not place_entry(self.root, name, folder):
            return LeftOut(name.key, "local", "locked meanwhile", "a compiler makes it")
        cache_ledger.write(self.root, name, records)
        return _moved(name, records)

    def _push(self, item: tuple[CacheEntry, CacheEntry | None]) -> Moved | LeftOut | None:
        entry, remote = item
        try:
            records = cache_ledger.read(self.root, entry) or cache_ledger.take(self.root, entry, self.storage.stop)
            folder = self.root / entry.name.key
            won = cache_remote.publish(self.storage, self.prefix, entry.name, folder, records, remote)
        except DataError as error:
            return LeftOut(entry.name.key, "local", f"changed while it was read ({error.seen})", "not pushed")
        return _moved(entry.name, records) if won else None

    def _withdraw(self, name: EntryName, etag: str, problem: str) -> LeftOut:
        """Make room in the storage for whoever has, or compiles, the entry anew; a pure pull changes nothing there."""
        if self.direction == "pull":
            action = "left there: trnpipe cache sync would withdraw it"
        elif etag and cache_remote.withdraw(self.storage, self.prefix, name, etag):
            action = "withdrawn there, to be compiled and pushed again"
        else:
            action = "another node has changed it meanwhile: sync again"
        return LeftOut(name.key, "storage", problem, action)


def _without_checksums(remote: Mapping[EntryName, CacheEntry], done: Collection[EntryName]) -> list[LeftOut]:
    """Entries that a compiler wrote to the storage itself."""
    return [
        LeftOut(name.key, "storage", "has no checksums: a compiler wrote it there", "not pulled")
        for name, entry in sorted(remote.items())
        if name not in done and not entry.is_published and entry.state is EntryState.DONE
    ]


def _moved(name: EntryName, records: Mapping[str, FileRecord]) -> Moved:
    return Moved(name.key, len(records), sum(record.size_bytes for record in records.values()))


def _clear(staging: Path) -> None:
    with os_errors("deleting", f"file://{staging}"):
        if staging.exists():
            shutil.rmtree(staging)


def _refuse_same(root: Path, storage: Storage, prefix: str) -> None:
    """ConfigError when the local cache is the storage itself, or has the layout of one."""
    there = storage.local_path(prefix.strip("/"))
    if (there is not None and there.resolve() == root.resolve()) or any(e.is_published for e in list_local(root)):
        raise ConfigError(
            f"compile cache {root} is the storage that caches are synced with",
            expected="the compiler's own folder on one side, a folder or s3:// prefix for all nodes on the other",
            next_command="trnpipe config  # the compile section names both",
        )
