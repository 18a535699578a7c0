"""Inspect and repair a Neuron compile cache, which is either on a local disk or on S3.

Both use the layout `neuronxcc-<version>+<build>/MODULE_<graph hash>+<flags hash>/<files>`, which is documented in
neuron-caching.rst of AWS Neuron SDK 2.29. The states of entries are based on the cache clean-up in optimum-neuron.
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
DONE_NAME = "model.done"  # an empty marker that is written last
LOG_NAME = "model.log"  # contains the compiler's error message
FLAGS_NAME = "compile_flags.json"  # written since about SDK 2.20
LOCK_SUFFIX = ".lock"
# If no compiler is running, locks are only valid for a short time, before a compiler starts or after it exits.
STALE_LOCK_S = 600.0
# On S3, we can't see the compilers on other machines, so we use a limit that is longer than the compile time of a
# graph, but short enough for a cycle to wait.
SHARED_LOCK_S = 3600.0
LOCK_DIR = ".trnpipe-sync"

# The graph hash is a decimal integer in training, or 20 hex digits for torch_neuronx.trace.
_ENTRY = re.compile(r"neuronxcc-[0-9][^+/]*(?:\+[^/]+)?/MODULE_[0-9A-Za-z_]+\+(?P<flags>[0-9a-f]{8})")
_PUBLISHED_FILE = re.compile(r"[0-9a-f]{32}/.+")


class EntryState(StrEnum):
    """The state of a graph in a compile cache."""

    DONE = "done"
    FAILED = "failed"  # the failure is cached and won't be retried until the entry is deleted
    LOCKED = "locked"  # currently being compiled, or has a stale lock from a compiler that was killed
    PARTIAL = "partial"  # traced but not yet compiled, or the writer was killed


def entry_state(names: Collection[str]) -> EntryState:
    """Determine the state of an entry from its file names. A finished entry is DONE even if it still has a lock."""
    if DONE_NAME in names and NEFF_NAME in names:
        return EntryState.DONE
    if any(name.endswith(LOCK_SUFFIX) for name in names):
        return EntryState.LOCKED
    return EntryState.FAILED if LOG_NAME in names and DONE_NAME not in names else EntryState.PARTIAL


@dataclass(frozen=True)
class CacheFile:
    """A file of an entry. `age_s` is None if the storage doesn't report when the file was modified."""

    size_bytes: int
    age_s: float | None = None


@dataclass(frozen=True)
class CacheEntry:
    """An entry that was found by listing the cache. The key is `<version folder>/<module folder>`."""

    key: str
    files: Mapping[str, CacheFile]

    @property
    def version(self) -> str:
        return self.key.partition("/")[0]

    @property
    def flags(self) -> str:
        """The hash of the compiler flags."""
        return self.key.rpartition("+")[2]

    @property
    def is_published(self) -> bool:
        """True if this entry was published by compile/sync.py, which uses subfolders and a marker with checksums."""
        return any(name == MANIFEST_NAME or _PUBLISHED_FILE.fullmatch(name) for name in self.files)

    @cached_property
    def state(self) -> EntryState:
        if self.is_published:
            marker = self.files.get(MANIFEST_NAME)
            return EntryState.DONE if marker and marker.size_bytes else EntryState.PARTIAL
        # After a power failure, files may exist without their content.
        return entry_state({name for name, file in self.files.items() if name != NEFF_NAME or file.size_bytes})

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())

    @property
    def locks(self) -> list[str]:
        return [f"{self.key}/{name}" for name in self.files if name.endswith(LOCK_SUFFIX)]

    @property
    def age_s(self) -> float | None:
        """Seconds since any file was last modified, or None if the age of a file is unknown."""
        ages = [file.age_s for file in self.files.values()]
        return None if None in ages else min((age for age in ages if age is not None), default=None)


def list_entries(storage: Storage, key: str = "") -> list[CacheEntry]:
    """List all entries of a cache, or only the entry `key`. Raises ConfigError if the cache can't be listed."""
    root, entries = storage.local_path(""), dict[str, dict[str, CacheFile]]()
    files = _local_files(root, key) if root else ((s.key, s.size_bytes, s.age_s) for s in storage.list(key))
    for path, size_bytes, age_s in files:
        parts = path.split("/", 2)
        if len(parts) == 3 and _ENTRY.fullmatch("/".join(parts[:2])):
            entries.setdefault("/".join(parts[:2]), {})[parts[2]] = CacheFile(size_bytes, age_s)
    return [CacheEntry(name, entries[name]) for name in sorted(entries)]


def _local_files(root: Path, key: str) -> Iterator[tuple[str, int, float | None]]:
    """Yield the key, size and age of files that are at least two folders deep.

    Files that are deleted during the listing are skipped.
    """
    now_s = time.time()
    with os_errors("listing", f"file://{root}"):
        if not root.is_dir() or not any(root.iterdir()):
            return
        for path in sorted(root.glob(f"{key}/**/*" if key else "neuronxcc-*/MODULE_*/**/*")):
            with suppress(FileNotFoundError):
                if path.is_file() and not atomic.is_temp(path.name):
                    stat = path.stat()
                    yield path.relative_to(root).as_posix(), stat.st_size, now_s - stat.st_mtime


# Detection of running compilers and of file systems with unreliable locks.

COMPILER_NAMES = ("neuronx-cc", "walrus_driver")  # the compiler driver and its longest-running child process
Compilers = Callable[[], Sequence[str]]


def live_compilers() -> list[str]:
    """Return the compilers that are running on this host or container, in the form `name (pid 7)`."""
    compilers = []
    for process in psutil.process_iter(["pid", "name", "cmdline", "status"]):
        info = process.info
        # A console script may be running as `python -u /opt/.../neuronx-cc compile`.
        names = [info["name"] or "", *(PurePath(argument).name for argument in (info["cmdline"] or [])[:3])]
        name = next((name for name in names if name.startswith(COMPILER_NAMES)), None)
        if name is not None and info["status"] != psutil.STATUS_ZOMBIE:
            compilers.append(f"{name} (pid {info['pid']})")
    return compilers


# According to Neuron's documentation, locks are unreliable on these file systems, which results in missing files,
# corruption, and KeyError.
NETWORK_TYPES = frozenset({"nfs", "nfs4", "lustre", "efs", "cifs", "smb3"})
LOCAL_FUSE = "fuse.fuse-overlayfs"  # the root file system of an unprivileged container, which is on a local disk


def refuse_network_root(root: Path) -> None:
    """Raise ConfigError if the cache is on a network file system."""
    resolved = root.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if resolved.is_relative_to(mount.mountpoint)]
    mount = max(reversed(mounts), key=lambda mount: len(PurePath(mount.mountpoint).parts), default=None)
    kind = mount.fstype.lower() if mount else ""
    if kind in NETWORK_TYPES or (kind.startswith("fuse.") and kind != LOCAL_FUSE):
        raise ConfigError(
            f"compile cache {root} is on a network file system ({kind})",
            expected="a local disk, because the compiler's locks are unreliable on network file systems",
            next_command="set the cache to a local folder, and share it through S3 with `trnpipe cache sync`",
        )


# Status.


def status_lines(storage: Storage, flags: CompilerFlags, compilers: Compilers = live_compilers) -> list[str]:
    """Summarize the state of a compile cache.

    Returns lines with totals, the number of entries for each compiler version and set of flags, all entries that are
    not done, and warnings.
    """
    entries = list_entries(storage)
    running = compilers() if storage.local_path("") is not None else ()
    counts = Counter(entry.state for entry in entries)
    ages = [age for entry in entries if (age := entry.age_s) is not None]
    span = f" | age {format_duration(min(ages))} to {format_duration(max(ages))}" if ages else ""
    size = format_bytes(sum(entry.size_bytes for entry in entries))
    lines = [
        f"compile cache {storage.uri('')} | {len(entries)} entries, {size}{span}",
        " | ".join(f"{state} {counts[state]}" for state in EntryState),
    ]
    lines += [f"{name}: {count} entries" for name, count in sorted(Counter(entry.version for entry in entries).items())]
    texts = _flags_texts(storage, entries)
    for suffix, count in sorted(Counter(entry.flags for entry in entries).items()):
        lines.append(f"flags {suffix}: {count} entries, {texts.get(suffix, 'unknown')}")
    lines += [f"compiling now: {process}" for process in running]
    for entry in entries:
        if entry.state is not EntryState.DONE or entry.locks:
            size = format_bytes(entry.size_bytes)
            lines.append(f"{entry.state} {entry.key} | {size} | age {format_duration(entry.age_s)}")
    if counts[EntryState.FAILED] or (counts[EntryState.LOCKED] and not running):
        lines.append(
            "warning: failed entries and stale locks block compilation until they are deleted: trnpipe cache repair"
        )
    if texts and not any(set(flags.tokens()) == set(text.split()) for text in texts.values()):
        lines.append(f"warning: no entry has the flags {flags.text()}, so the next run will recompile all graphs")
    return lines


def _flags_texts(storage: Storage, entries: Sequence[CacheEntry]) -> dict[str, str]:
    """Look up the compiler flags for each flags hash, excluding the target.

    They are read from the first entry with this hash that has stored them.
    """
    texts: dict[str, str] = {}
    for entry in entries:
        if entry.flags not in texts and FLAGS_NAME in entry.files:
            with suppress(KeyError, ValueError, TypeError):
                tokens = json.loads(storage.read_bytes(f"{entry.key}/{FLAGS_NAME}"))
                texts[entry.flags] = " ".join(token for token in tokens if not token.startswith("--target="))
    return texts


# Repairing the cache. A locked or partial entry may still be in use by a compiler. On a local disk, we assume that it
# is if any compiler is running on this host, and on S3, until it is older than SHARED_LOCK_S.


@contextmanager
def cache_lock(root: Path, stop: StopSignal) -> Iterator[Path]:
    """Prevent concurrent syncs and repairs of a local cache, and yield a temporary folder that compilers ignore."""
    folder = root / LOCK_DIR
    with os_errors("writing", f"file://{folder}"):
        atomic.make_dirs(folder)
        with atomic.exclusive(folder, stop):
            yield folder


def repair(storage: Storage, *, stale_s: float = STALE_LOCK_S, compilers: Compilers = live_compilers) -> list[str]:
    """Delete failed entries, stale locks, and (on a local disk) partial entries, and return a line for each of them.

    On S3, partial entries are kept, since another machine may be about to compile them.

    `stale_s`: age in seconds after which a lock or partial entry on a local disk is considered stale, if no compiler is
    running on this host. Raises Preempted when stopped.
    """
    root = storage.local_path("")
    if root is None:
        return list(_clean(storage, stale_s, compilers, (EntryState.FAILED,)))
    if not root.is_dir():
        return []
    refuse_network_root(root)
    with cache_lock(root, storage.stop):
        return list(_clean(storage, stale_s, compilers, (EntryState.FAILED, EntryState.PARTIAL, EntryState.LOCKED)))


def release_locks(storage: Storage, *, stale_s: float = 0.0, compilers: Compilers = live_compilers) -> list[str]:
    """Delete the locks of killed compilers, so that waiting processes can continue, and return a line for each."""
    return list(_clean(storage, stale_s, compilers, ()))


def _clean(storage: Storage, stale_s: float, compilers: Compilers, dropped: Collection[EntryState]) -> Iterator[str]:
    """Delete stale locks, and entire entries in one of the `dropped` states. Yields a line for each deletion."""
    for listed in list_entries(storage):
        storage.stop.raise_if_set("repairing the compile cache")
        # List the entry again, since a compiler may have started in the meantime.
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
    """Return whether a locked or partial entry is no longer used by any compiler."""
    is_local = storage.local_path("") is not None
    names = {lock.rpartition("/")[2] for lock in entry.locks} or entry.files.keys()
    limit_s = stale_s if is_local else SHARED_LOCK_S
    ages = [entry.files[name].age_s for name in names]
    return all(age is not None and age >= limit_s for age in ages) and not (is_local and compilers())
