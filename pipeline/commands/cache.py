"""`trnpipe cache`: the compiled graphs of this machine. See them, find what is wrong, mend it, share them.

The live cache is where this machine's compiler reads and writes: a local folder, or a prefix on S3.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.command_table import ToolCall
from pipeline.compile import cache_ledger, cache_remote
from pipeline.compile.cache_entry import LOG_NAME, CacheEntry, EntryName, EntryState
from pipeline.compile.cache_host import Compilers, Mounts, live_compilers, mount_of, mounted, refuse_network_root
from pipeline.compile.cache_repair import ActionKind, RepairReport, repair_local, repair_storage
from pipeline.compile.cache_scan import CacheReport, Clock, list_entry, list_storage, scan_local, scan_storage
from pipeline.compile.cache_sync import sync_cache
from pipeline.compile.manifest import FOLDER, load_manifests
from pipeline.core.errors import EXIT_OK, ConfigError, DataError, TrnpipeError
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.progress import Say, shown_on
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.storage import Storage, open_storage, os_errors
from pipeline.settings import Settings

# Finished entries of a compile cache against the checksums taken of them: which are damaged, and taking those away.
#
# A compiler reads whatever lies in its cache. Nothing but these checksums tells a flipped byte from a good NEFF.


@dataclass(frozen=True)
class Checked:
    """`unknown`: finished entries without checksums, which prove nothing."""

    compared: int
    unknown: int
    damaged: tuple[tuple[EntryName, str], ...]

    def line(self) -> str:
        return f"checksums | {self.compared} entries compared, {len(self.damaged)} damaged | {self.unknown} without"


def check(live: Storage) -> Checked:
    """Read every byte of the finished entries that have checksums; changes nothing. Polls the storage's stop."""
    found = [(entry.name, _compare(live, entry)) for entry in _finished(live)]
    problems = [(name, problem) for name, problem in found if problem is not None]
    damaged = tuple((name, problem) for name, problem in problems if problem)
    return Checked(len(problems), len(found) - len(problems), damaged)


def mend(live: Storage) -> list[str]:
    """Take damaged entries away, so that they are compiled or pulled again; take the checksums that are missing.

    What is locked stays as it is. Returns a line for each entry that was taken away, after one with the sums.
    """
    entries, root = list(_finished(live)), live.local_path("")
    compared, recorded, lines = 0, 0, list[str]()
    with cache_ledger.cache_lock(root, live.stop) if root is not None and entries else nullcontext():
        for entry in entries:
            if entry.locks:
                continue
            etag = cache_remote.marker_etag(live, "", entry.name) if entry.is_published else ""
            problem = _compare(live, entry)
            compared += problem is not None
            if problem:
                done = _drop(live, entry, etag)
                lines.append(
                    f"{done} {entry.name.key} | {problem}" if done else f"left alone {entry.name.key} | changed"
                )
            elif problem is None and root is not None:
                cache_ledger.take(root, entry, live.stop)
                recorded += 1
    return [f"checksums | {compared} entries compared, {len(lines)} damaged | {recorded} taken anew", *lines]


def _finished(live: Storage) -> Iterator[CacheEntry]:
    for entry in list_storage(live):
        live.stop.raise_if_set("checking the compile cache")
        if entry.state is EntryState.DONE:
            yield entry


def _compare(live: Storage, entry: CacheEntry) -> str | None:
    """What is wrong with an entry, '' when nothing is, None when it has no checksums."""
    root = live.local_path("")
    if entry.is_published:
        return cache_remote.problem_of(live, "", entry.name) or ""
    if root is None or cache_ledger.read(root, entry) is None:
        return None
    return cache_ledger.problem_of(root, entry, deep=True, stop=live.stop) or ""


def _drop(live: Storage, entry: CacheEntry, etag: str) -> str:
    """Take one away; what was done, '' when it has changed since it was listed."""
    root = live.local_path("")
    if entry.is_published:
        return "withdrew damaged" if cache_remote.withdraw(live, "", entry.name, etag) else ""
    if root is None or list_entry(root, entry.name) != entry:
        return ""
    with os_errors("deleting", f"file://{root / entry.name.key}"):
        atomic.remove_tree(root / entry.name.key)
    cache_ledger.forget(root, entry.name)
    return "drop damaged"


REPAIR = "trnpipe cache repair"
SICK: Mapping[ActionKind, str] = {
    "unlock": "stale locks, which whoever needs those graphs waits for without end",
    "drop failed": "failed compiles, which are reused as failures for ever",
    "drop incomplete": "incomplete entries, left by a writer that died",
}


@dataclass(frozen=True)
class Host:
    """What is asked of this machine."""

    compilers: Compilers = live_compilers
    mounts: Mounts = mounted
    clock: Clock = time.time


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall, *, host: Host | None = None) -> int:
    """One action on the live cache. The exit code: that of DataError when the doctor finds something wrong, else 0.

    Raises ConfigError for settings that do not allow the action, DiskFull, TransientError, Preempted.
    """
    live = open_storage(settings.compile.cache_root(settings.workspace), retry=settings.storage, stop=stop)
    cache = _Cache(settings, live, host or Host())
    if call.action == "status":
        return _status(cache, say)
    from pipeline.telemetry.console import Console  # takes a while to import, and a look at the cache needs none

    with shown_on(Console().progress):
        return ACTIONS[call.action](cache, say)


@dataclass(frozen=True)
class _Cache:
    """The live cache of some settings."""

    settings: Settings
    live: Storage
    host: Host

    @property
    def root(self) -> Path | None:
        """Its folder; None on S3."""
        return self.live.local_path("")

    @property
    def keep(self) -> tuple[str, ...] | None:
        """Compiler versions; None for all."""
        return self.settings.compile.keep_versions or None

    def scan(self) -> CacheReport:
        flags, target, clock = self.settings.compile.flags, self.settings.compile.target, self.host.clock
        if self.root is None:
            return scan_storage(self.live, flags=flags, target=target, clock=clock)
        return scan_local(self.root, compilers=self.host.compilers, flags=flags, target=target, clock=clock)

    def repair(self, *, keep: tuple[str, ...] | None = None, dry_run: bool = False) -> RepairReport:
        if self.root is None:
            return repair_storage(self.live, keep_versions=keep, dry_run=dry_run)
        host, stop = self.host, self.live.stop
        return repair_local(
            self.root, keep_versions=keep, dry_run=dry_run, compilers=host.compilers, clock=host.clock, stop=stop
        )


def _status(cache: _Cache, say: Say) -> int:
    _say_report(cache, cache.scan(), say)
    return EXIT_OK


def _doctor(cache: _Cache, say: Say) -> int:
    """What a repair would do, and what it cannot mend, each with the next command."""
    report, treatment = cache.scan(), cache.repair(dry_run=True)
    _say_report(cache, replace(report, warnings=()), say)
    for kept in treatment.kept:
        say(f"left alone {kept.entry} | {kept.reason}")
    if cache.root is not None:
        mount = mount_of(cache.root, cache.host.mounts())
        place = f"{mount.file_system}, mounted at {mount.folder}" if mount else "unknown"
        say(f"file system {place}" + ("" if report.compilers else " | no compiler runs on this host"))
    checked = check(cache.live)
    say(checked.line())
    problems = [*_problems_of_host(cache), *_problems_to_repair(cache, treatment)]
    problems += [
        DataError(
            warning,
            expected="entries made with the flags of the next run",
            next_command="trnpipe compile, or give --compile.flags.* and --compile.target as they were then",
        )
        for warning in report.warnings
        if not warning.endswith(REPAIR)  # those are told by the treatment
    ]
    problems += [
        DataError(f"{name.key}: {problem}", expected="the bytes it was finished with", next_command=REPAIR)
        for name, problem in checked.damaged
    ]
    for problem in problems:
        say(f"problem: {problem}")
    say(f"doctor: {len(problems)} problems" if problems else "doctor: healthy")
    return DataError.exit_code if problems else EXIT_OK


def _repair(cache: _Cache, say: Say) -> int:
    if cache.root is not None:  # the lock of a compiler on another machine would look stale
        refuse_network_root(cache.root, mounts=cache.host.mounts)
    for line in cache.repair(keep=cache.keep).lines():
        say(line)
    for line in mend(cache.live):
        say(line)
    return EXIT_OK


def _sync(cache: _Cache, say: Say) -> int:
    config, live = cache.settings.compile, cache.live
    if not config.sync_url:
        raise ConfigError(
            "compile.sync_url is empty: there is no place to exchange compiled graphs through",
            expected="s3://bucket/prefix, the same on all machines",
            next_command="trnpipe cache sync --compile.sync-url s3://bucket/prefix",
        )
    if cache.root is None:
        raise ConfigError(
            f"the compile cache {live.root} is not on this machine",
            expected="a local folder to exchange with compile.sync_url",
            next_command="trnpipe cache sync --compile.cache-url FOLDER",
        )
    storage = open_storage(config.sync_url, retry=cache.settings.storage, stop=live.stop)
    # A version that repair has pruned must not come back.
    report = sync_cache(cache.root, storage, compiler_versions=cache.keep, mounts=cache.host.mounts)
    for line in report.lines():
        say(line)
    return EXIT_OK


ACTIONS: Mapping[str, Callable[[_Cache, Say], int]] = {
    "status": _status,
    "doctor": _doctor,
    "repair": _repair,
    "sync": _sync,
}


def _say_report(cache: _Cache, report: CacheReport, say: Say) -> None:
    """The report; in place of Neuron entries, where there are none, the graphs that another device has compiled."""
    for line in report.lines():
        say(line)
    if not report.entries:
        lines = list(_manifest_lines(cache, report.now_s))
        for line in lines or ["nothing is compiled yet: trnpipe compile"]:
            say(line)


def _manifest_lines(cache: _Cache, now_s: float) -> Iterator[str]:
    workspace = open_storage(cache.settings.workspace, retry=cache.settings.storage, stop=cache.live.stop)
    sizes = {stat.key: stat.size_bytes for stat in workspace.list(FOLDER)}
    for manifest in load_manifests(workspace):
        path = workspace.local_path(manifest.place)
        age_s = now_s - path.stat().st_mtime if path is not None and path.exists() else None
        yield (
            f"graphs {manifest.plan_id[:12]} | {manifest.plan.get('device', 'unknown device')}"
            f" | {len(manifest.graphs)} graphs, {format_duration(manifest.compile_s)} compiling"
            f" | manifest {format_bytes(sizes.get(manifest.place))}, age {format_duration(age_s)}"
        )


def _problems_of_host(cache: _Cache) -> list[TrnpipeError]:
    try:
        if cache.root is not None:
            refuse_network_root(cache.root, mounts=cache.host.mounts)
    except ConfigError as error:
        return [error]
    return []


def _problems_to_repair(cache: _Cache, treatment: RepairReport) -> Iterator[TrnpipeError]:
    """One problem for each kind of sickness: the entries were listed before."""
    for kind, text in SICK.items():
        found = [action for action in treatment.actions if action.kind == kind]
        if found:
            log = f"{cache.live.uri(found[0].entry)}/{LOG_NAME}"
            yield DataError(
                f"{text}: {len(found)}",
                expected="entries that are finished, or being compiled now",
                next_command=f"read {log} for the reason, then {REPAIR}" if kind == "drop failed" else REPAIR,
            )
