"""A compile cache, on a disk or in a storage: its entries, the state each is in, and what a look at all of them tells.

Layout, local and on S3: `neuronxcc-<version>+<build>/MODULE_<graph hash>+<flags hash>/<files>`. Sources: AWS Neuron SDK
2.29, neuron-caching.rst; the table of states is that of optimum-neuron's cache clean-up.
"""

import fcntl
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import Literal

import psutil

from pipeline.compile.config import CompilerFlags, flags_hash
from pipeline.core.errors import ConfigError
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.paths import user_path
from pipeline.io.storage import Storage, is_temp, os_errors

HLO_NAMES = ("model.hlo_module.pb", "model.hlo.pb")  # the second up to about SDK 2.17
NEFF_NAME = "model.neff"
DONE_NAME = "model.done"  # an empty marker, written last
LOG_NAME = "model.log"  # the compiler's error text
FLAGS_NAME = "compile_flags.json"  # from about SDK 2.20 on
LOCK_SUFFIX = ".lock"
# With no compiler alive a lock can only be right in the moments before one starts and after it ended.
STALE_LOCK_S = 600.0
# On S3 live compilers cannot be seen. Longer than one graph takes to compile, shorter than a cycle can wait.
SHARED_LOCK_S = 3600.0

_VERSION = re.compile(r"neuronxcc-(?P<version>[0-9][^+/]*)(?:\+[^/]+)?")
# The graph hash is a decimal integer (training) or 20 hex digits (torch_neuronx.trace).
_MODULE = re.compile(r"MODULE_[0-9A-Za-z_]+\+(?P<flags>[0-9a-f]{8})")
_PUBLISHED_FILE = re.compile(r"[0-9a-f]{32}/.+")

Clock = Callable[[], float]


class EntryState(StrEnum):
    """What a compile cache says of one graph."""

    DONE = "done"
    FAILED = "failed"  # "poisoned": the failure is reused for ever
    LOCKED = "locked"  # compiling now, or a lock that a dead compiler left
    COLLECTED = "collected"  # traced, never compiled
    INCOMPLETE = "incomplete"  # what a killed writer left


@dataclass(frozen=True, order=True)
class EntryName:
    """`<version folder>/<module folder>`, its place below the root, and the parts of the names that are asked for."""

    key: str
    version: str
    flags: str

    @property
    def version_dir(self) -> str:
        return self.key.partition("/")[0]

    def is_of(self, compiler_versions: Collection[str]) -> bool:
        """True when one of them names its compiler: `neuronxcc-2.24.8799.0+6f62ff7c`, or the version alone."""
        names = {self.version_dir, self.version_dir.removeprefix("neuronxcc-"), self.version}
        return not names.isdisjoint(compiler_versions)


def parse_entry(key: str) -> EntryName | None:
    """The entry at `<version folder>/<module folder>`; None for anything else."""
    version_dir, _, module_dir = key.partition("/")
    version, module = _VERSION.fullmatch(version_dir), _MODULE.fullmatch(module_dir)
    if version is None or module is None:
        return None
    return EntryName(key, version["version"], module["flags"])


def entry_state(file_names: Collection[str]) -> EntryState:
    """The state told by the names of an entry's files.

    A finished result counts even beside a lock, which then only waits to be removed.
    """
    names = frozenset(file_names)
    if {DONE_NAME, NEFF_NAME} <= names:
        return EntryState.DONE
    if any(name.endswith(LOCK_SUFFIX) for name in names):
        return EntryState.LOCKED
    if LOG_NAME in names and DONE_NAME not in names:
        return EntryState.FAILED
    if not names.isdisjoint(HLO_NAMES) and names.isdisjoint({DONE_NAME, NEFF_NAME}):
        return EntryState.COLLECTED
    return EntryState.INCOMPLETE


@dataclass(frozen=True)
class CacheFile:
    """One file of an entry. `modified_s`: seconds since the epoch, None where the storage does not tell."""

    name: str
    size_bytes: int
    modified_s: float | None = None


@dataclass(frozen=True)
class CacheEntry:
    """An entry as it was found."""

    name: EntryName
    files: tuple[CacheFile, ...]

    @property
    def is_published(self) -> bool:
        """True for the layout of `cache_sync`: files in a folder of their own under a marker with checksums."""
        return any(file.name == MANIFEST_NAME or _PUBLISHED_FILE.fullmatch(file.name) for file in self.files)

    @property
    def state(self) -> EntryState:
        sizes = {file.name: file.size_bytes for file in self.files}
        if self.is_published:
            return EntryState.DONE if sizes.get(MANIFEST_NAME) else EntryState.INCOMPLETE
        torn = {NEFF_NAME} if sizes.get(NEFF_NAME) == 0 else set()  # a power cut keeps a name and loses the bytes
        return entry_state(sizes.keys() - torn)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def locks(self) -> tuple[CacheFile, ...]:
        return tuple(file for file in self.files if file.name.endswith(LOCK_SUFFIX))

    def without_locks(self) -> "CacheEntry":
        return CacheEntry(self.name, tuple(file for file in self.files if not file.name.endswith(LOCK_SUFFIX)))

    def age_s(self, now_s: float) -> float | None:
        """Since its newest file changed."""
        newest = max((file.modified_s for file in self.files if file.modified_s is not None), default=None)
        return None if newest is None else now_s - newest

    def is_lock_older(self, now_s: float, than_s: float) -> bool:
        """True when it has locks and all of them are older; never where ages are unknown."""
        return bool(self.locks) and all(
            lock.modified_s is not None and now_s - lock.modified_s > than_s for lock in self.locks
        )


def list_storage(storage: Storage, clock: Clock = time.time) -> list[CacheEntry]:
    """Entries below the root of a storage, by name; on S3 one listing. On a disk no file is read.

    On S3 the age of a file comes from S3's own clock, and its time is `clock` minus that age.
    """
    folder = storage.local_path("")
    if folder is not None:
        return list_local(folder)
    files: dict[EntryName, list[CacheFile]] = {}
    now_s = clock()
    for stat in storage.list(""):
        parts = stat.key.split("/", 2)
        name = parse_entry("/".join(parts[:2])) if len(parts) == 3 else None
        if name is not None:
            modified_s = None if stat.age_s is None else now_s - stat.age_s
            files.setdefault(name, []).append(CacheFile(parts[2], stat.size_bytes, modified_s))
    return [CacheEntry(name, tuple(files[name])) for name in sorted(files)]


def list_local(root: Path) -> list[CacheEntry]:
    """Entries below a local root, by name. Files that vanish meanwhile are left out."""
    with os_errors("listing", f"file://{root}"):
        keys = [f"{outer}/{inner}" for outer in _folders(root) for inner in _folders(root / outer)]
    return [list_entry(root, name) for key in keys if (name := parse_entry(key)) is not None]


def list_entry(root: Path, name: EntryName) -> CacheEntry:
    """One local entry as it is now; without files when it is missing."""
    with os_errors("listing", f"file://{root / name.key}"):
        return CacheEntry(name, tuple(_files(root / name.key)))


def _folders(folder: Path) -> list[str]:
    """Names of the folders directly below, sorted."""
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in found if entry.is_dir() and not is_temp(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files(folder: Path, above: str = "") -> Iterator[CacheFile]:
    """Files below, `sub/name` for deeper ones, sorted; not those that a writer of ours has not published."""
    try:
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if not is_temp(entry.name)), key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(folder / entry.name, f"{above}{entry.name}/")
            elif entry.is_file():
                stat = entry.stat()
                yield CacheFile(f"{above}{entry.name}", stat.st_size, stat.st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return


# Which compilers are at work: several jobs of one machine have a cache each.

COMPILER_NAMES = ("neuronx-cc", "walrus_driver")  # the driver and its longest running child
DEFAULT_ROOT = "/var/tmp/neuron-compile-cache"  # noqa: S108 - Neuron's own default (SDK 2.29, persistent cache)


@dataclass(frozen=True)
class CompilerProcess:
    """A running compiler."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


Compilers = Callable[[], Sequence[CompilerProcess]]


def live_compilers() -> list[CompilerProcess]:
    """Compiler processes of this host, or of this container: those of another one on the same disk are not seen."""
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline", "status"]):
        info = process.info
        if info["status"] == psutil.STATUS_ZOMBIE:
            continue
        # A console script may run as `python -u /opt/.../neuronx-cc compile`.
        names = [info["name"] or "", *(PurePath(word).name for word in (info["cmdline"] or [])[:3])]
        name = next((name for name in names if name.startswith(COMPILER_NAMES)), None)
        if name is not None:
            found.append(CompilerProcess(int(info["pid"]), name))
    return found


def compilers_of(root: str) -> list[CompilerProcess]:
    """Compilers of this host but those whose environment, which they have from who started them, names another cache.

    One whose environment cannot be read may be at work on any.
    """
    found = []
    for compiler in live_compilers():
        try:
            env = psutil.Process(compiler.pid).environ()
        except psutil.NoSuchProcess:
            continue
        except (OSError, psutil.Error):  # another user's
            found.append(compiler)
            continue
        # --cache_dir in its flags goes before the variable.
        folders = [word.partition("=")[2] for word in env.get("NEURON_CC_FLAGS", "").split() if "--cache_dir=" in word]
        named = [env.get("NEURON_COMPILE_CACHE_URL", DEFAULT_ROOT), *folders][-1]
        if canonical_root(named) == canonical_root(root):
            found.append(compiler)
    return found


def canonical_root(root: str) -> str:
    """One spelling for a root that is written as a folder, with file:// or through a link."""
    path = root.removeprefix("file://")
    return path.rstrip("/") if "://" in path else str(user_path(path).resolve())


# Neuron's locking over these is documented as unreliable: missing files, corruption, KeyError.
NETWORK_TYPES = frozenset({"nfs", "nfs4", "lustre", "efs", "cifs", "smb3"})
LOCAL_FUSE = "fuse.fuse-overlayfs"  # the root of a container without privileges: a local disk below


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    folder: str
    file_system: str

    @property
    def is_network(self) -> bool:
        kind = self.file_system.lower()
        return kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind != LOCAL_FUSE)


Mounts = Callable[[], Sequence[Mount]]


def mounted() -> list[Mount]:
    """All mounts of this host, in the order they were made."""
    return [Mount(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


def mount_of(folder: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount a folder lies (or would lie) on: the deepest, and of two at one place the later."""
    real = folder.resolve()
    above = [mount for mount in mounts if real.is_relative_to(mount.folder)]
    return max(reversed(above), key=lambda mount: len(PurePath(mount.folder).parts), default=None)


def refuse_network_root(root: Path, *, mounts: Mounts = mounted) -> None:
    """ConfigError when compilers would share `root` over a network file system."""
    mount = mount_of(root, mounts())
    if mount is not None and mount.is_network:
        raise ConfigError(
            f"compile cache {root} lies on {mount.file_system} (mounted at {mount.folder})",
            expected="a local disk: the compiler's locks are not reliable on a network file system",
            next_command="set the cache to a local folder and share it with `trnpipe cache sync` through S3",
        )


@dataclass(frozen=True)
class CacheReport:
    """A cache at one moment. `flags_text`: what a flags hash stands for, where an entry tells it."""

    root: str
    now_s: float
    entries: tuple[CacheEntry, ...]
    stale_locks: tuple[EntryName, ...] = ()
    compilers: tuple[CompilerProcess, ...] = ()
    flags_text: Mapping[str, str] | None = None
    flags_warning: str = ""
    """Every entry was made with other flags than the next run will compile with; '' when not, or unknown."""

    @property
    def counts(self) -> dict[EntryState, int]:
        """Entries by state, every state named."""
        counted = Counter(entry.state for entry in self.entries)
        return {state: counted[state] for state in EntryState}

    @property
    def warnings(self) -> list[str]:
        failed = self.counts[EntryState.FAILED]
        stale = f"{len(self.stale_locks)} stale locks block whoever needs those graphs: trnpipe cache repair"
        poisoned = f"{failed} failed compiles are reused as failures for ever: trnpipe cache repair"
        told = ((self.flags_warning, self.flags_warning), (self.stale_locks, stale), (failed, poisoned))
        return [text for is_so, text in told if is_so]

    def lines(self) -> list[str]:
        """For people: totals, one line per compiler and flags hash, one per entry that needs a look."""
        ages = [age for entry in self.entries if (age := entry.age_s(self.now_s)) is not None]
        span = f" | age {format_duration(min(ages))} to {format_duration(max(ages))}" if ages else ""
        size = format_bytes(sum(entry.size_bytes for entry in self.entries))
        lines = [
            f"compile cache {self.root} | {len(self.entries)} entries, {size}{span}",
            " | ".join(f"{state} {number}" for state, number in self.counts.items()),
        ]
        sizes = Counter[str]()
        for entry in self.entries:
            sizes[entry.name.version_dir] += entry.size_bytes
        for version, number in sorted(Counter(entry.name.version_dir for entry in self.entries).items()):
            lines.append(f"compiler {version}: {number} entries, {format_bytes(sizes[version])}")
        for suffix, number in sorted(Counter(entry.name.flags for entry in self.entries).items()):
            text = (self.flags_text or {}).get(suffix)
            lines.append(f"flags {suffix}: {number} entries" + (f", {text}" if text else ""))
        lines += [f"compiling now: {process}" for process in self.compilers]
        for entry in self.entries:
            is_stale = entry.name in self.stale_locks
            if is_stale or entry.state in (EntryState.FAILED, EntryState.LOCKED, EntryState.INCOMPLETE):
                state = "stale lock" if is_stale else str(entry.state)
                age_text = format_duration(entry.age_s(self.now_s))
                lines.append(f"{state} {entry.name.key} | {format_bytes(entry.size_bytes)} | age {age_text}")
        return lines


def scan(
    storage: Storage,
    *,
    compilers: Compilers = live_compilers,
    flags: CompilerFlags | None = None,
    target: str = "trn1",
    clock: Clock = time.time,
) -> CacheReport:
    """The cache at the root of a storage; empty when that is missing. ConfigError when it is unreadable.

    A lock is stale when it is older than STALE_LOCK_S and no compiler runs on this host; on S3, where compilers of
    other machines are not seen, when it is older than SHARED_LOCK_S. With `flags` (what the next run will compile
    with) it warns of others.
    """
    root, now_s = storage.local_path(""), clock()
    entries, stale_s = list_storage(storage, lambda: now_s), SHARED_LOCK_S if root is None else STALE_LOCK_S
    alive = tuple(compilers()) if root is not None else ()
    stale = [] if alive else [entry.name for entry in entries if entry.is_lock_older(now_s, stale_s)]
    texts = _flags_texts(root, entries) if root is not None else {}
    where = storage.uri("") if root is None else f"file://{root}"
    warning = ""
    names = [entry.name for entry in entries]
    if flags is not None and names:  # told when no entry has the hash that its compiler version gives to them
        wanted = {name.version: flags_hash(flags.tokens(), compiler=name.version, target=target) for name in names}
        if not any(name.flags == wanted[name.version] for name in names):
            suffixes = sorted({name.flags for name in names})
            seen = ", ".join(suffix + (f" ({texts[suffix]})" if suffix in texts else "") for suffix in suffixes)
            warning = (
                f"flags {flags.text()!r} on {target} give hash {', '.join(sorted(set(wanted.values())))}, "
                f"the cache holds only {seen}: every graph would be compiled again"
            )
    return CacheReport(where, now_s, tuple(entries), tuple(stale), alive, texts, warning)


def _flags_texts(root: Path, entries: Sequence[CacheEntry]) -> dict[str, str]:
    """Flags hash -> the flags themselves, from one entry of each hash that holds them."""
    texts: dict[str, str] = {}
    for entry in entries:
        if entry.name.flags not in texts and any(file.name == FLAGS_NAME for file in entry.files):
            try:
                tokens = json.loads((root / entry.name.key / FLAGS_NAME).read_bytes())
            except (FileNotFoundError, ValueError):
                continue  # another entry of the same hash may tell
            if isinstance(tokens, list):
                texts[entry.name.flags] = " ".join(str(token) for token in tokens)
    return texts


# Making a compile cache fit for work again: stale locks, remembered failures, half entries, old compilers.
#
# Nothing that a living compiler may be writing is touched: while one runs on this host, locked and half written entries
# stay. In a storage that other machines write, half written ones always do, and locks until they are older than
# SHARED_LOCK_S. What is changed is looked at once more in the moment before.

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
    compiler alive on this host; on S3 a lock when older than SHARED_LOCK_S. Names in `keep_versions` are version
    folders or versions.
    Raises ConfigError when `keep_versions` fits nothing that is there (it would empty the cache), Preempted.
    """
    entries, root = list_storage(live, clock), live.local_path("")
    if keep_versions is not None and entries and not any(entry.name.is_of(keep_versions) for entry in entries):
        wanted = ", ".join(sorted(keep_versions)) or "the empty list of versions to keep"
        raise ConfigError(
            f"no entry of the compile cache is of {wanted}",
            expected=f"at least one of {', '.join(sorted({entry.name.version_dir for entry in entries}))}",
            next_command="trnpipe cache status",
        )
    doctor = _Doctor(live, root, keep_versions, dry_run, stale_lock_s, compilers, clock)
    if root is None or dry_run or not entries:
        notes = [note for entry in entries for note in doctor.treat(entry)]
    else:
        with cache_lock(root, live.stop):
            notes = [note for entry in entries for note in doctor.treat(entry)]
            for folder in {root / entry.name.version_dir for entry in entries}:
                atomic.sweep_temps(folder)
                with os_errors("deleting", f"file://{folder}"):
                    if folder.is_dir() and not any(folder.iterdir()):
                        folder.rmdir()
    kept = tuple(note for note in notes if note.kind == "left alone")
    actions = tuple(note for note in notes if note.kind != "left alone")
    return RepairReport(live.uri("") if root is None else f"file://{root}", actions, kept)


def release_dead_locks(live: Storage, clock: Clock = time.time) -> list[Action]:
    """Delete the locks that dead compilers left in a cache on S3, by their age. Raises TransientError, ConfigError."""
    doctor = _Doctor(live, live.local_path(""), None, False, STALE_LOCK_S, live_compilers, clock)
    locked = [entry for entry in list_storage(live, clock) if entry.locks]
    return [action for action in map(doctor.unlock, locked) if action.kind == "unlock"]


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

    def treat(self, entry: CacheEntry) -> Iterator[Action]:
        self.live.stop.raise_if_set("repairing the compile cache")
        if self.root is not None:
            entry = list_entry(self.root, entry.name)  # as it is now
        key, is_old = entry.name.key, self.keep_versions is not None and not entry.name.is_of(self.keep_versions)
        if entry.locks:
            action = self.unlock(entry)
            if action.kind == "unlock" or entry.state is EntryState.LOCKED or is_old:
                yield action
            if action.kind == "left alone":
                return
            entry = entry.without_locks()
        if entry.state is EntryState.INCOMPLETE and (busy := self._is_live(entry, "incomplete")):
            yield Action("left alone", key, busy)
        elif is_old:
            reason = f"{entry.state}, of compiler {entry.name.version_dir}, which is not to be kept"
            yield self._remove(entry, "prune", reason)
        elif entry.state is EntryState.FAILED:
            yield self._remove(entry, "drop failed", "a failure reused for ever; compiled again when needed")
        elif entry.state is EntryState.INCOMPLETE:
            yield self._remove(entry, "drop incomplete", "what a dead writer left; compiled again when needed")

    def unlock(self, entry: CacheEntry) -> Action:
        """Delete the locks of an entry if its compiler is dead."""
        key = entry.name.key
        if busy := self._is_live(entry, "locked"):
            return Action("left alone", key, busy)
        keys = [f"{key}/{lock.name}" for lock in entry.locks]
        if self.root is None and not self.dry_run:  # another compiler may have taken it since the listing
            ages_s = [stat.age_s for one in keys if (stat := self.live.stat(one)) is not None]
            if any(age_s is None or age_s <= SHARED_LOCK_S for age_s in ages_s):
                return Action("left alone", key, "locked meanwhile")
        if not self.dry_run:
            self.live.delete(keys)
        reason = f"older than {format_duration(SHARED_LOCK_S)}" if self.root is None else "no compiler is alive"
        return Action("unlock", key, f"stale lock: {reason}", sum(lock.size_bytes for lock in entry.locks))

    def _is_live(self, entry: CacheEntry, state: Literal["locked", "incomplete"]) -> str:
        """Why a lock, or a half entry, must stay; '' for what a dead compiler left."""
        if self.root is None:
            if state == "locked" and entry.is_lock_older(self.clock(), SHARED_LOCK_S):
                return ""
            return f"{state}: another node may be at work on it"
        if alive := self.compilers():
            return f"{state} while {alive[0]} is alive"
        now_s = self.clock()
        if state == "incomplete":
            age_s = entry.age_s(now_s)
            is_young = age_s is not None and age_s < self.stale_s
            return f"incomplete, changed less than {self.stale_s:.0f} s ago" if is_young else ""
        if not entry.is_lock_older(now_s, self.stale_s):
            return f"locked less than {self.stale_s:.0f} s ago"
        is_held = any(_is_held(self.root / entry.name.key / lock.name) for lock in entry.locks)
        return "a process holds the lock" if is_held else ""

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
