"""Making a local compile cache fit for work again: stale locks, remembered failures, half entries, old compilers.

Nothing that a living compiler may be writing is touched: while one runs on this host, locked and half written entries
stay. Every entry is looked at once more in the moment before it is changed.
"""

import fcntl
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.compile.cache_entry import CacheEntry, EntryName, EntryState
from pipeline.compile.cache_host import Compilers, live_compilers
from pipeline.compile.cache_ledger import cache_lock, forget
from pipeline.compile.cache_scan import STALE_LOCK_S, Clock, list_entry, list_local, list_storage
from pipeline.core.errors import ConfigError
from pipeline.core.format import format_bytes
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.storage import Storage, join_key, os_errors

ActionKind = Literal["unlock", "drop failed", "drop incomplete", "prune"]
DROPPED: dict[EntryState, ActionKind] = {EntryState.FAILED: "drop failed", EntryState.INCOMPLETE: "drop incomplete"}


@dataclass(frozen=True)
class Action:
    """One thing done, or with a dry run one that would be."""

    kind: ActionKind
    entry: str
    reason: str
    freed_bytes: int


@dataclass(frozen=True)
class Kept:
    """An entry that is not well and still was left alone."""

    entry: str
    reason: str


@dataclass(frozen=True)
class RepairReport:
    """All of a repair, in order."""

    root: str
    dry_run: bool
    actions: tuple[Action, ...]
    kept: tuple[Kept, ...]

    @property
    def freed_bytes(self) -> int:
        return sum(action.freed_bytes for action in self.actions)

    def lines(self) -> list[str]:
        would = "would " if self.dry_run else ""
        freed = f"{len(self.actions)} actions, {format_bytes(self.freed_bytes)} {'to free' if would else 'freed'}"
        return [
            f"cache repair {self.root} | {freed} | {len(self.kept)} left alone",
            *(
                f"{would}{act.kind} {act.entry} | {format_bytes(act.freed_bytes)} | {act.reason}"
                for act in self.actions
            ),
            *(f"left alone {kept.entry} | {kept.reason}" for kept in self.kept),
        ]


def repair_local(
    root: Path,
    *,
    keep_versions: Collection[str] | None = None,
    dry_run: bool = False,
    stale_lock_s: float = STALE_LOCK_S,
    compilers: Compilers = live_compilers,
    clock: Clock = time.time,
    stop: StopSignal | None = None,
) -> RepairReport:
    """Delete stale locks, failed and incomplete entries; with `keep_versions` also the entries of other compilers.

    Graphs that were only collected stay. A lock, and a half entry, is stale when older than `stale_lock_s` with no
    compiler alive on this host. Names in `keep_versions` are version folders or versions.
    Raises ConfigError when `keep_versions` fits nothing that is there (it would empty the cache), Preempted.
    """
    stop = stop or StopSignal()
    entries = list_local(root)
    _check_keep(entries, keep_versions)
    if not entries:
        return RepairReport(f"file://{root}", dry_run, (), ())
    doctor = _Doctor(root, keep_versions, dry_run, stale_lock_s, compilers, clock)
    if dry_run:
        found = [note for entry in entries for note in doctor.treat(entry.name)]
    else:
        found = []
        with cache_lock(root, stop):
            for entry in entries:
                stop.raise_if_set("repairing the compile cache")
                found += doctor.treat(entry.name)
            _remove_empty(root, {entry.name.version_dir for entry in entries})
    actions = tuple(note for note in found if isinstance(note, Action))
    return RepairReport(f"file://{root}", dry_run, actions, tuple(note for note in found if isinstance(note, Kept)))


def repair_storage(
    storage: Storage, prefix: str = "", *, keep_versions: Collection[str] | None = None, dry_run: bool = False
) -> RepairReport:
    """Delete failed entries that a compiler wrote to a storage, and with `keep_versions` those of other compilers.

    Locks and half entries stay: they may belong to a node that is at work. ConfigError as for `repair_local`.
    """
    entries = list_storage(storage, prefix)
    _check_keep(entries, keep_versions)
    actions: list[Action] = []
    kept: list[Kept] = []
    for entry in entries:
        storage.stop.raise_if_set("repairing the compile cache")
        if keep_versions is not None and not entry.name.is_of(keep_versions):
            action = _pruned(entry)
        elif entry.state is EntryState.FAILED:
            action = _dropped(entry, EntryState.FAILED)
        else:
            if entry.state in (EntryState.LOCKED, EntryState.INCOMPLETE):
                kept.append(Kept(entry.name.key, f"{entry.state}: another node may be at work on it"))
            continue
        if not dry_run:
            storage.delete_prefix(join_key(prefix, entry.name.key))
        actions.append(action)
    return RepairReport(storage.uri(prefix.strip("/")), dry_run, tuple(actions), tuple(kept))


@dataclass(frozen=True)
class _Doctor:
    """What to do with one local entry."""

    root: Path
    keep_versions: Collection[str] | None
    dry_run: bool
    stale_s: float
    compilers: Compilers
    clock: Clock

    def treat(self, name: EntryName) -> Iterator[Action | Kept]:
        entry = list_entry(self.root, name)
        if entry.locks:
            busy = self._lock_is_live(entry)
            if busy:
                if entry.state is EntryState.LOCKED or self._is_old(name):
                    yield Kept(name.key, busy)
                return
            yield self._unlock(entry)
            entry = entry.without_locks()
        if self._is_old(name):
            busy = self._half_is_live(entry) if entry.state is EntryState.INCOMPLETE else ""
            yield Kept(name.key, busy) if busy else self._remove(entry, _pruned(entry))
        elif entry.state is EntryState.FAILED:
            yield self._remove(entry, _dropped(entry, EntryState.FAILED))
        elif entry.state is EntryState.INCOMPLETE:
            busy = self._half_is_live(entry)
            yield Kept(name.key, busy) if busy else self._remove(entry, _dropped(entry, EntryState.INCOMPLETE))

    def _is_old(self, name: EntryName) -> bool:
        return self.keep_versions is not None and not name.is_of(self.keep_versions)

    def _lock_is_live(self, entry: CacheEntry) -> str:
        """Why a lock must stay; '' for a stale one."""
        alive = self.compilers()
        if alive:
            return f"locked while {alive[0]} is alive"
        if not entry.is_lock_older(self.clock(), self.stale_s):
            return f"locked less than {self.stale_s:.0f} s ago"
        if any(_is_held(self.root / entry.name.key / lock.name) for lock in entry.locks):
            return "a process holds the lock"
        return ""

    def _half_is_live(self, entry: CacheEntry) -> str:
        """Why a half entry must stay; '' for what a dead writer left."""
        alive = self.compilers()
        if alive:
            return f"incomplete while {alive[0]} is alive"
        age_s = entry.age_s(self.clock())
        is_young = age_s is not None and age_s < self.stale_s
        return f"incomplete, changed less than {self.stale_s:.0f} s ago" if is_young else ""

    def _unlock(self, entry: CacheEntry) -> Action:
        if not self.dry_run:
            for lock in entry.locks:
                path = self.root / entry.name.key / lock.name
                with os_errors("deleting", f"file://{path}"):
                    path.unlink(missing_ok=True)
        size_bytes = sum(lock.size_bytes for lock in entry.locks)
        return Action("unlock", entry.name.key, "stale lock: no compiler is alive", size_bytes)

    def _remove(self, entry: CacheEntry, action: Action) -> Action | Kept:
        """Take the entry away, unless it has changed since it was judged."""
        if not self.dry_run:
            if list_entry(self.root, entry.name) != entry:
                return Kept(entry.name.key, "changed meanwhile")
            folder = self.root / entry.name.key
            with os_errors("deleting", f"file://{folder}"):
                atomic.remove_tree(folder)
            forget(self.root, entry.name)
        return action


def _pruned(entry: CacheEntry) -> Action:
    reason = f"{entry.state}, of compiler {entry.name.version_dir}, which is not to be kept"
    return Action("prune", entry.name.key, reason, entry.size_bytes)


def _dropped(entry: CacheEntry, state: EntryState) -> Action:
    reason = "a failure reused for ever" if state is EntryState.FAILED else "what a dead writer left"
    return Action(DROPPED[state], entry.name.key, f"{reason}; compiled again when needed", entry.size_bytes)


def _is_held(path: Path) -> bool:
    """True when a process holds a kernel lock on the file: some writers lock so, and then their death frees it."""
    with os_errors("opening", f"file://{path}"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _check_keep(entries: Collection[CacheEntry], keep_versions: Collection[str] | None) -> None:
    if keep_versions is None or not entries or any(entry.name.is_of(keep_versions) for entry in entries):
        return
    wanted = ", ".join(sorted(keep_versions)) or "the empty list of versions to keep"
    raise ConfigError(
        f"no entry of the compile cache is of {wanted}",
        expected=f"at least one of {', '.join(sorted({entry.name.version_dir for entry in entries}))}",
        next_command="trnpipe cache status",
    )


def _remove_empty(root: Path, version_dirs: Collection[str]) -> None:
    """Version folders that hold nothing any more."""
    for version_dir in version_dirs:
        folder = root / version_dir
        atomic.sweep_temps(folder)
        with os_errors("deleting", f"file://{folder}"):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
