"""Making a compile cache fit for work again: stale locks, remembered failures, half entries, old compilers.

Nothing that a living compiler may be writing is touched: while one runs on this host, locked and half written entries
stay, and in a storage that other machines write they always do. Every entry of a disk is looked at once more in the
moment before it is changed.
"""

import fcntl
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.compile.cache import (
    STALE_LOCK_S,
    CacheEntry,
    Clock,
    Compilers,
    EntryState,
    list_entry,
    list_storage,
    live_compilers,
)
from pipeline.core.errors import ConfigError
from pipeline.core.format import format_bytes
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.storage import Storage, os_errors

LOCK_DIR = ".trnpipe-sync"
Treatment = Literal["unlock", "drop failed", "drop incomplete", "prune", "left alone"]


@contextmanager
def cache_lock(root: Path, stop: StopSignal) -> Iterator[Path]:
    """Nobody else syncs or repairs this root; a folder for work, which compilers do not look into."""
    folder = root / LOCK_DIR
    with os_errors("writing", f"file://{folder}"):
        atomic.make_dirs(folder)
        with atomic.exclusive(folder, stop):
            yield folder


@dataclass(frozen=True)
class Action:
    """One thing done (with a dry run: that would be), or why an entry that is not well was left alone."""

    kind: Treatment
    entry: str
    reason: str
    freed_bytes: int = 0


@dataclass(frozen=True)
class RepairReport:
    """All of a repair, in order."""

    root: str
    actions: tuple[Action, ...]
    kept: tuple[Action, ...]

    def lines(self) -> list[str]:
        freed = format_bytes(sum(action.freed_bytes for action in self.actions))
        return [
            f"cache repair {self.root} | {len(self.actions)} actions, {freed} freed | {len(self.kept)} left alone",
            *(f"{one.kind} {one.entry} | {format_bytes(one.freed_bytes)} | {one.reason}" for one in self.actions),
            *(f"{one.kind} {one.entry} | {one.reason}" for one in self.kept),
        ]


def repair(
    live: Storage,
    *,
    keep_versions: Collection[str] | None = None,
    dry_run: bool = False,
    stale_lock_s: float = STALE_LOCK_S,
    compilers: Compilers = live_compilers,
    clock: Clock = time.time,
) -> RepairReport:
    """Delete stale locks, failed and incomplete entries; with `keep_versions` also the entries of other compilers.

    Graphs that were only collected stay. A lock, and a half entry, is stale when older than `stale_lock_s` with no
    compiler alive on this host. Names in `keep_versions` are version folders or versions.
    Raises ConfigError when `keep_versions` fits nothing that is there (it would empty the cache), Preempted.
    """
    entries, root = list_storage(live), live.local_path("")
    if keep_versions is not None and entries and not any(entry.name.is_of(keep_versions) for entry in entries):
        wanted = ", ".join(sorted(keep_versions)) or "the empty list of versions to keep"
        raise ConfigError(
            f"no entry of the compile cache is of {wanted}",
            expected=f"at least one of {', '.join(sorted({entry.name.version_dir for entry in entries}))}",
            next_command="trnpipe cache status",
        )
    doctor = _Doctor(live, root, keep_versions, dry_run, stale_lock_s, compilers, clock)
    notes: list[Action] = []
    if root is None or dry_run or not entries:
        notes = list(doctor.treat_all(entries))
    else:
        with cache_lock(root, live.stop):
            notes = list(doctor.treat_all(entries))
            for folder in {root / entry.name.version_dir for entry in entries}:
                atomic.sweep_temps(folder)
                with os_errors("deleting", f"file://{folder}"):
                    if folder.is_dir() and not any(folder.iterdir()):
                        folder.rmdir()
    kept = tuple(note for note in notes if note.kind == "left alone")
    actions = tuple(note for note in notes if note.kind != "left alone")
    return RepairReport(live.uri("") if root is None else f"file://{root}", actions, kept)


@dataclass(frozen=True)
class _Doctor:
    """What to do with each entry."""

    live: Storage
    root: Path | None
    keep_versions: Collection[str] | None
    dry_run: bool
    stale_s: float
    compilers: Compilers
    clock: Clock

    def treat_all(self, entries: Collection[CacheEntry]) -> Iterator[Action]:
        for entry in entries:
            self.live.stop.raise_if_set("repairing the compile cache")
            yield from self.treat(entry if self.root is None else list_entry(self.root, entry.name))

    def treat(self, entry: CacheEntry) -> Iterator[Action]:
        key, is_old = entry.name.key, self.keep_versions is not None and not entry.name.is_of(self.keep_versions)
        if entry.locks:
            if busy := self._lock_is_live(entry):
                if entry.state is EntryState.LOCKED or is_old:
                    yield Action("left alone", key, busy)
                return
            freed_bytes = sum(lock.size_bytes for lock in entry.locks)
            if not self.dry_run:
                self.live.delete(f"{key}/{lock.name}" for lock in entry.locks)
            yield Action("unlock", key, "stale lock: no compiler is alive", freed_bytes)
            entry = entry.without_locks()
        if entry.state is EntryState.INCOMPLETE and (busy := self._half_is_live(entry)):
            yield Action("left alone", key, busy)
        elif is_old:
            reason = f"{entry.state}, of compiler {entry.name.version_dir}, which is not to be kept"
            yield self._remove(entry, "prune", reason)
        elif entry.state is EntryState.FAILED:
            yield self._remove(entry, "drop failed", "a failure reused for ever; compiled again when needed")
        elif entry.state is EntryState.INCOMPLETE:
            yield self._remove(entry, "drop incomplete", "what a dead writer left; compiled again when needed")

    def _lock_is_live(self, entry: CacheEntry) -> str:
        """Why a lock must stay; '' for a stale one."""
        if self.root is None:
            return "locked: another node may be at work on it"
        if alive := self.compilers():
            return f"locked while {alive[0]} is alive"
        if not entry.is_lock_older(self.clock(), self.stale_s):
            return f"locked less than {self.stale_s:.0f} s ago"
        if any(_is_held(self.root / entry.name.key / lock.name) for lock in entry.locks):
            return "a process holds the lock"
        return ""

    def _half_is_live(self, entry: CacheEntry) -> str:
        """Why a half entry must stay; '' for what a dead writer left."""
        if self.root is None:
            return "incomplete: another node may be at work on it"
        if alive := self.compilers():
            return f"incomplete while {alive[0]} is alive"
        age_s = entry.age_s(self.clock())
        is_young = age_s is not None and age_s < self.stale_s
        return f"incomplete, changed less than {self.stale_s:.0f} s ago" if is_young else ""

    def _remove(self, entry: CacheEntry, kind: Treatment, reason: str) -> Action:
        """Take the entry away, unless it has changed since it was judged."""
        if not self.dry_run:
            if self.root is not None and list_entry(self.root, entry.name) != entry:
                return Action("left alone", entry.name.key, "changed meanwhile")
            self.live.delete_prefix(entry.name.key)
        return Action(kind, entry.name.key, reason, entry.size_bytes)


def _is_held(path: Path) -> bool:
    """True when a process holds a kernel lock on the file: some writers lock so, and then their death frees it."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False
