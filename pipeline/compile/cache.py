"""A Neuron compile cache, on a disk or on S3: its entries, their states, and the deletion of what is stale or failed.

Layout, local and on S3: `neuronxcc-<version>+<build>/MODULE_<graph hash>+<flags hash>/<files>`. Sources: AWS Neuron SDK
2.29, neuron-caching.rst; the table of states is that of optimum-neuron's cache clean-up.
"""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path, PurePath

import psutil

from pipeline.compile.config import CompilerFlags
from pipeline.core.errors import ConfigError
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.storage import Storage, os_errors

NEFF_NAME = "model.neff"
DONE_NAME = "model.done"  # an empty marker, written last
LOG_NAME = "model.log"  # the compiler's error text
FLAGS_NAME = "compile_flags.json"  # from about SDK 2.20 on
LOCK_SUFFIX = ".lock"
# With no compiler alive a lock can only be right in the moments before one starts and after it ended.
STALE_LOCK_S = 600.0
# On S3 live compilers cannot be seen. Longer than one graph takes to compile, shorter than a cycle can wait.
SHARED_LOCK_S = 3600.0
LOCK_DIR = ".trnpipe-sync"

# The graph hash is a decimal integer (training) or 20 hex digits (torch_neuronx.trace).
_ENTRY = re.compile(r"neuronxcc-[0-9][^+/]*(?:\+[^/]+)?/MODULE_[0-9A-Za-z_]+\+(?P<flags>[0-9a-f]{8})")
_PUBLISHED_FILE = re.compile(r"[0-9a-f]{32}/.+")


class EntryState(StrEnum):
    """The state of one graph in a compile cache."""

    DONE = "done"
    FAILED = "failed"  # the failure is reused for ever
    LOCKED = "locked"  # compiling now, or a lock that a dead compiler left
    PARTIAL = "partial"  # traced and not compiled, or left by a killed writer


def entry_state(names: Collection[str]) -> EntryState:
    """Return the state that the names of an entry's files imply.

    A finished result counts even beside a lock, which then only waits to be removed.
    """
    if DONE_NAME in names and NEFF_NAME in names:
        return EntryState.DONE
    if any(name.endswith(LOCK_SUFFIX) for name in names):
        return EntryState.LOCKED
    return EntryState.FAILED if LOG_NAME in names and DONE_NAME not in names else EntryState.PARTIAL


@dataclass(frozen=True)
class CacheFile:
    """One file of an entry. `age_s` is None if the storage does not report it."""

    size_bytes: int
    age_s: float | None = None


@dataclass(frozen=True)
class CacheEntry:
    """An entry as it was found. `key`: `<version folder>/<module folder>`."""

    key: str
    files: Mapping[str, CacheFile]

    @property
    def version(self) -> str:
        return self.key.partition("/")[0]

    @property
    def flags(self) -> str:
        """Hash of the compiler flags."""
        return self.key.rpartition("+")[2]

    @property
    def is_published(self) -> bool:
        """True for the layout of compile/sync.py: files in a folder of their own under a marker with checksums."""
        return any(name == MANIFEST_NAME or _PUBLISHED_FILE.fullmatch(name) for name in self.files)

    @cached_property
    def state(self) -> EntryState:
        if self.is_published:
            marker = self.files.get(MANIFEST_NAME)
            return EntryState.DONE if marker and marker.size_bytes else EntryState.PARTIAL
        # A power cut keeps a name and loses the bytes.
        return entry_state({name for name, file in self.files.items() if name != NEFF_NAME or file.size_bytes})

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def locks(self) -> list[str]:
        return [f"{self.key}/{name}" for name in self.files if name.endswith(LOCK_SUFFIX)]

    @property
    def age_s(self) -> float | None:
        """Seconds since its newest file changed; None if any age is unknown."""
        ages = [file.age_s for file in self.files.values()]
        known = [age for age in ages if age is not None]
        return min(known, default=None) if len(known) == len(ages) else None


def list_entries(storage: Storage, key: str = "") -> list[CacheEntry]:
    """List the entries below the root of a storage, or the one entry `key`, sorted by name.

    On S3 one listing; on a disk no file is read. Raises ConfigError if the root is unreadable.
    """
    root, found = storage.local_path(""), dict[str, dict[str, CacheFile]]()
    files = _local_files(root, key) if root else ((s.key, s.size_bytes, s.age_s) for s in storage.list(key))
    for path, size_bytes, age_s in files:
        parts = path.split("/", 2)
        if len(parts) == 3 and _ENTRY.fullmatch("/".join(parts[:2])):
            found.setdefault("/".join(parts[:2]), {})[parts[2]] = CacheFile(size_bytes, age_s)
    return [CacheEntry(name, found[name]) for name in sorted(found)]


def _local_files(root: Path, key: str) -> Iterator[tuple[str, int, float | None]]:
    """Yield (key, size, age) of the files two folders down and deeper. Files that vanish meanwhile are left out."""
    now_s = time.time()
    with os_errors("listing", f"file://{root}"):
        if not root.is_dir() or not any(root.iterdir()):
            return
        for path in sorted(root.glob(f"{key}/**/*" if key else "neuronxcc-*/MODULE_*/**/*")):
            with suppress(FileNotFoundError):
                if path.is_file() and not atomic.is_temp(path.name):
                    stat = path.stat()
                    yield path.relative_to(root).as_posix(), stat.st_size, now_s - stat.st_mtime


# Compilers at work on this host, and file systems on which their locks are unreliable.

COMPILER_NAMES = ("neuronx-cc", "walrus_driver")  # the driver and its longest running child
Compilers = Callable[[], Sequence[str]]


def live_compilers() -> list[str]:
    """Return the compiler processes of this host or container, as `name (pid 7)`."""
    found = []
    for process in psutil.process_iter(["pid", "name", "cmdline", "status"]):
        info = process.info
        # A console script may run as `python -u /opt/.../neuronx-cc compile`.
        names = [info["name"] or "", *(PurePath(word).name for word in (info["cmdline"] or [])[:3])]
        name = next((name for name in names if name.startswith(COMPILER_NAMES)), None)
        if name is not None and info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{name} (pid {info['pid']})")
    return found


# Neuron's locking over these is documented as unreliable: missing files, corruption, KeyError.
NETWORK_TYPES = frozenset({"nfs", "nfs4", "lustre", "efs", "cifs", "smb3"})
LOCAL_FUSE = "fuse.fuse-overlayfs"  # the root of a container without privileges: a local disk below


def refuse_network_root(root: Path) -> None:
    """Raise ConfigError if compilers would share `root` over a network file system."""
    real = root.resolve()
    above = [one for one in psutil.disk_partitions(all=True) if real.is_relative_to(one.mountpoint)]
    mount = max(reversed(above), key=lambda one: len(PurePath(one.mountpoint).parts), default=None)
    kind = mount.fstype.lower() if mount else ""
    if kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind != LOCAL_FUSE):
        raise ConfigError(
            f"compile cache {root} is on a network file system ({kind})",
            expected="a local disk: the compiler's locks are not reliable on a network file system",
            next_command="set the cache to a local folder and share it with `trnpipe cache sync` through S3",
        )


# Status.


def status_lines(storage: Storage, flags: CompilerFlags, compilers: Compilers = live_compilers) -> list[str]:
    """Describe a cache: totals, a line per compiler and per set of flags, one per entry that needs a look, warnings."""
    entries = list_entries(storage)
    alive = compilers() if storage.local_path("") is not None else ()
    counts = Counter(entry.state for entry in entries)
    ages = [age for entry in entries if (age := entry.age_s) is not None]
    span = f" | age {format_duration(min(ages))} to {format_duration(max(ages))}" if ages else ""
    size = format_bytes(sum(entry.size_bytes for entry in entries))
    lines = [
        f"compile cache {storage.uri('')} | {len(entries)} entries, {size}{span}",
        " | ".join(f"{state} {counts[state]}" for state in EntryState),
    ]
    lines += [f"{name}: {number} entries" for name, number in sorted(Counter(one.version for one in entries).items())]
    texts = _flags_texts(storage, entries)
    for suffix, number in sorted(Counter(entry.flags for entry in entries).items()):
        lines.append(f"flags {suffix}: {number} entries, {texts.get(suffix, 'unknown')}")
    lines += [f"compiling now: {process}" for process in alive]
    for entry in entries:
        if entry.state is not EntryState.DONE or entry.locks:
            size = format_bytes(entry.size_bytes)
            lines.append(f"{entry.state} {entry.key} | {size} | age {format_duration(entry.age_s)}")
    if counts[EntryState.FAILED] or (counts[EntryState.LOCKED] and not alive):
        lines.append("warning: a lock is waited for, and a failure reused, for ever: trnpipe cache repair")
    if texts and not any(set(flags.tokens()) == set(text.split()) for text in texts.values()):
        lines.append(f"warning: no entry has the flags of the next run, {flags.text()}: every graph is compiled again")
    return lines


def _flags_texts(storage: Storage, entries: Sequence[CacheEntry]) -> dict[str, str]:
    """Return the flags behind each flags hash, without the target, from an entry that holds them."""
    texts: dict[str, str] = {}
    for entry in entries:
        if entry.flags not in texts and FLAGS_NAME in entry.files:
            with suppress(KeyError, ValueError, TypeError):
                tokens = json.loads(storage.read_bytes(f"{entry.key}/{FLAGS_NAME}"))
                texts[entry.flags] = " ".join(word for word in tokens if not word.startswith("--target="))
    return texts


# Repair. What a living compiler may be writing is left alone: on a disk while one runs on this host, on S3 until it is
# older than SHARED_LOCK_S.


@contextmanager
def cache_lock(root: Path, stop: StopSignal) -> Iterator[Path]:
    """Hold the lock of sync and repair on a local cache. Yields a work folder that compilers do not look into."""
    folder = root / LOCK_DIR
    with os_errors("writing", f"file://{folder}"):
        atomic.make_dirs(folder)
        with atomic.exclusive(folder, stop):
            yield folder


def repair(storage: Storage, *, stale_s: float = STALE_LOCK_S, compilers: Compilers = live_compilers) -> list[str]:
    """Delete failed entries and stale locks, on a disk also partial entries. Return a line for each. Raises Preempted.

    On S3 partial entries stay, because they may be waiting for a compiler of another machine. `stale_s`: age from which
    a lock or partial entry on a disk is stale if no compiler runs on this host.
    """
    root = storage.local_path("")
    if root is None:
        return list(_cleaned(storage, stale_s, compilers, (EntryState.FAILED,)))
    if not root.is_dir():
        return []
    refuse_network_root(root)
    with cache_lock(root, storage.stop):
        return list(_cleaned(storage, stale_s, compilers, (EntryState.FAILED, EntryState.PARTIAL, EntryState.LOCKED)))


def release_locks(storage: Storage, *, stale_s: float = 0.0, compilers: Compilers = live_compilers) -> list[str]:
    """Delete the locks that dead compilers left, so that waiting processes go on. Return a line for each."""
    return list(_cleaned(storage, stale_s, compilers, ()))


def _cleaned(storage: Storage, stale_s: float, compilers: Compilers, dropped: Collection[EntryState]) -> Iterator[str]:
    """Delete stale locks, and whole entries of the `dropped` states. Yield a line for each."""
    for listed in list_entries(storage):
        storage.stop.raise_if_set("repairing the compile cache")
        # As it is now: a compiler may have started since the listing.
        for entry in list_entries(storage, listed.key) if listed.locks or listed.state in dropped else ():
            if not (entry.locks or entry.state in dropped):
                continue
            if entry.state is not EntryState.FAILED and not _is_stale(storage, entry, stale_s, compilers):
                continue
            if entry.state in dropped:
                storage.delete_prefix(entry.key)
                yield f"drop {entry.state} {entry.key}"
            else:
                storage.delete(entry.locks)
                yield f"unlock {entry.key}"


def _is_stale(storage: Storage, entry: CacheEntry, stale_s: float, compilers: Compilers) -> bool:
    """Return whether no compiler can be at work on an entry that is locked or partial."""
    is_local = storage.local_path("") is not None
    names = {lock.rpartition("/")[2] for lock in entry.locks} or entry.files.keys()
    limit_s = stale_s if is_local else SHARED_LOCK_S
    ages = [entry.files[name].age_s for name in names]
    return all(age is not None and age >= limit_s for age in ages) and not (is_local and compilers())
