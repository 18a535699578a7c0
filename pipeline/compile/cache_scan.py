"""Looking at a compile cache, on a disk or in a storage: what is in it, how old, how large, and what is wrong."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.compile.cache_entry import (
    FLAGS_NAME,
    NEURON_COMPILER,
    CacheEntry,
    CacheFile,
    EntryName,
    EntryState,
    is_version_dir,
    parse_entry,
)
from pipeline.compile.cache_host import CompilerProcess, Compilers, live_compilers
from pipeline.compile.flags import CompilerFlags, flags_hash
from pipeline.core.format import format_bytes, format_duration
from pipeline.io.storage import Storage, is_temp, join_key, os_errors

# With no compiler alive a lock can only be right in the moments before one starts and after it ended.
STALE_LOCK_S = 600.0
DEFAULT_TARGET = "trn1"

Clock = Callable[[], float]


@dataclass(frozen=True)
class CacheReport:
    """A cache at one moment. `flags_text`: what a flags hash stands for, where an entry tells it."""

    root: str
    now_s: float
    entries: tuple[CacheEntry, ...]
    stale_locks: tuple[EntryName, ...] = ()
    compilers: tuple[CompilerProcess, ...] = ()
    flags_text: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def counts(self) -> dict[EntryState, int]:
        """Entries by state, every state named."""
        counted = Counter(entry.state for entry in self.entries)
        return {state: counted[state] for state in EntryState}

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)

    @property
    def versions(self) -> dict[str, int]:
        """Entries by compiler version folder."""
        return dict(sorted(Counter(entry.name.version_dir for entry in self.entries).items()))

    @property
    def flags(self) -> dict[str, int]:
        """Entries by flags hash."""
        return dict(sorted(Counter(entry.name.flags for entry in self.entries).items()))

    @property
    def is_healthy(self) -> bool:
        """Nothing to repair and nothing to warn of."""
        bad = self.counts[EntryState.FAILED] + self.counts[EntryState.INCOMPLETE]
        return not (bad or self.stale_locks or self.warnings)

    def lines(self) -> list[str]:
        """For people: totals, one line per compiler and flags hash, one per entry that needs a look, then warnings."""
        counts = " | ".join(f"{state} {number}" for state, number in self.counts.items())
        ages = [age for entry in self.entries if (age := entry.age_s(self.now_s)) is not None]
        span = f" | age {format_duration(min(ages))} to {format_duration(max(ages))}" if ages else ""
        texts = dict(self.flags_text)
        size = format_bytes(self.size_bytes)
        lines = [f"compile cache {self.root} | {len(self.entries)} entries, {size}{span}", counts]
        for version, number in self.versions.items():
            size_bytes = sum(entry.size_bytes for entry in self.entries if entry.name.version_dir == version)
            lines.append(f"compiler {version}: {number} entries, {format_bytes(size_bytes)}")
        for suffix, number in self.flags.items():
            lines.append(f"flags {suffix}: {number} entries" + (f", {texts[suffix]}" if suffix in texts else ""))
        lines += [f"compiling now: {process}" for process in self.compilers]
        for entry in self.entries:
            is_stale = entry.name in self.stale_locks
            if is_stale or entry.state in (EntryState.FAILED, EntryState.LOCKED, EntryState.INCOMPLETE):
                state = "stale lock" if is_stale else str(entry.state)
                age_text = format_duration(entry.age_s(self.now_s))
                lines.append(f"{state} {entry.name.key} | {format_bytes(entry.size_bytes)} | age {age_text}")
        return lines + [f"warning: {text}" for text in self.warnings]


def scan_local(
    root: Path,
    *,
    compilers: Compilers = live_compilers,
    flags: CompilerFlags | None = None,
    target: str = DEFAULT_TARGET,
    stale_lock_s: float = STALE_LOCK_S,
    clock: Clock = time.time,
) -> CacheReport:
    """The cache below a local root; empty when the root is missing.

    A lock is stale when it is older than `stale_lock_s` and no compiler runs on this host. With `flags` (what the next
    run will compile with) the report warns when every entry was made with others. ConfigError when it is unreadable.
    """
    entries, now_s, alive = list_local(root), clock(), tuple(compilers())
    stale = () if alive else tuple(entry.name for entry in entries if entry.is_lock_older(now_s, stale_lock_s))
    texts = _flags_texts(root, entries)
    warnings = [
        *_flags_warnings(entries, flags, target, texts),
        *([f"{len(stale)} stale locks block whoever needs those graphs: trnpipe cache repair"] if stale else []),
        *_failure_warnings(entries),
    ]
    return CacheReport(f"file://{root}", now_s, tuple(entries), stale, alive, tuple(texts.items()), tuple(warnings))


def scan_storage(
    storage: Storage,
    prefix: str = "",
    *,
    flags: CompilerFlags | None = None,
    target: str = DEFAULT_TARGET,
    clock: Clock = time.time,
) -> CacheReport:
    """The cache below a prefix of a storage. Whose locks lie there, and whether they live, cannot be known."""
    entries = list_storage(storage, prefix)
    warnings = [*_flags_warnings(entries, flags, target, {}), *_failure_warnings(entries)]
    return CacheReport(storage.uri(prefix.strip("/")), clock(), tuple(entries), warnings=tuple(warnings))


def list_local(root: Path) -> list[CacheEntry]:
    """Entries below a local root, by name. Files that vanish meanwhile are left out."""
    entries = []
    with os_errors("listing", f"file://{root}"):
        for version_dir in _folders(root):
            for module_dir in _folders(root / version_dir) if is_version_dir(version_dir) else ():
                name = parse_entry(f"{version_dir}/{module_dir}")
                if name is not None:
                    entries.append(CacheEntry(name, tuple(_files(root / name.key))))
    return entries


def list_entry(root: Path, name: EntryName) -> CacheEntry:
    """One local entry as it is now; without files when it is missing."""
    with os_errors("listing", f"file://{root / name.key}"):
        return CacheEntry(name, tuple(_files(root / name.key)))


def list_storage(storage: Storage, prefix: str = "") -> list[CacheEntry]:
    """Entries below a prefix, by name; on S3 one listing. On a disk no file is read, as etags are not needed."""
    folder = storage.local_path(prefix.strip("/"))
    if folder is not None:
        return list_local(folder)
    cut = len(join_key(prefix, "")) if prefix.strip("/") else 0
    files: dict[EntryName, list[CacheFile]] = {}
    for stat in storage.list(prefix):
        parts = stat.key[cut:].split("/", 2)
        name = parse_entry("/".join(parts[:2])) if len(parts) == 3 else None
        if name is not None:
            files.setdefault(name, []).append(CacheFile(parts[2], stat.size_bytes))
    return [CacheEntry(name, tuple(files[name])) for name in sorted(files)]


def _folders(folder: Path) -> list[str]:
    """Names of the folders directly below, sorted."""
    try:
        with os.scandir(folder) as found:
            return sorted(entry.name for entry in found if entry.is_dir() and not is_temp(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _files(folder: Path, above: str = "") -> Iterable[CacheFile]:
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


def _flags_texts(root: Path, entries: Sequence[CacheEntry]) -> dict[str, str]:
    """Flags hash -> the flags themselves, from one entry of each hash that holds them."""
    texts: dict[str, str] = {}
    for entry in entries:
        if entry.name.flags not in texts and FLAGS_NAME in entry.sizes:
            try:
                tokens = json.loads((root / entry.name.key / FLAGS_NAME).read_bytes())
            except (FileNotFoundError, ValueError):
                continue  # another entry of the same hash may tell
            if isinstance(tokens, list):
                texts[entry.name.flags] = " ".join(str(token) for token in tokens)
    return texts


def _flags_warnings(
    entries: Sequence[CacheEntry], flags: CompilerFlags | None, target: str, texts: Mapping[str, str]
) -> list[str]:
    """One warning when no entry has the flags hash that its compiler version gives to `flags`."""
    names = [entry.name for entry in entries if entry.name.compiler == NEURON_COMPILER]
    if flags is None or not names:
        return []
    wanted = {name.version: flags_hash(flags.tokens(), compiler=name.version, target=target) for name in names}
    if any(name.flags == wanted[name.version] for name in names):
        return []
    seen = ", ".join(
        suffix + (f" ({texts[suffix]})" if suffix in texts else "") for suffix in sorted({name.flags for name in names})
    )
    expected = ", ".join(sorted(set(wanted.values())))
    return [
        f"flags {flags.text()!r} on {target} give hash {expected}, the cache holds only {seen}: "
        "every graph would be compiled again"
    ]


def _failure_warnings(entries: Sequence[CacheEntry]) -> list[str]:
    failed = sum(entry.state is EntryState.FAILED for entry in entries)
    return [f"{failed} failed compiles are reused as failures for ever: trnpipe cache repair"] if failed else []
