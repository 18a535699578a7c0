"""`trnpipe cache`: the compiled graphs of this machine. See them, find what is wrong, mend it, share them.

The live cache is where this machine's compiler reads and writes: a local folder, or a prefix on S3.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pipeline.commands import ToolCall
from pipeline.compile.cache import (
    LOG_NAME,
    CacheReport,
    Clock,
    Compilers,
    Mounts,
    RepairReport,
    Treatment,
    live_compilers,
    mount_of,
    mounted,
    refuse_network_root,
    repair,
    scan,
)
from pipeline.compile.cache_sync import sync_cache
from pipeline.compile.manifest import FOLDER, load_manifests
from pipeline.core.errors import EXIT_OK, ConfigError, DataError, TrnpipeError
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.progress import Say, shown_on
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from pipeline.settings import Settings

REPAIR = "trnpipe cache repair"
SICK: Mapping[Treatment, str] = {
    "unlock": "stale locks, which block every process that needs those graphs",
    "drop failed": "cached compile failures, which are returned instead of compiling again",
    "drop incomplete": "incomplete entries, left by a process that died",
}


@dataclass(frozen=True)
class CacheHost:
    """What this machine says of its compilers, mounts and time."""

    compilers: Compilers = live_compilers
    mounts: Mounts = mounted
    clock: Clock = time.time


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall, *, host: CacheHost | None = None) -> int:
    """One action on the live cache. The exit code: that of DataError when the doctor finds something wrong, else 0.

    Raises ConfigError for settings that do not allow the action, DiskFull, TransientError, Preempted.
    """
    live = open_storage(settings.compile.cache_root(settings.workspace), retry=settings.storage, stop=stop)
    if call.action == "status":
        return _status(settings, live, say, host or CacheHost())
    from pipeline.telemetry.console import Console  # takes a while to import, and a look at the cache needs none

    with shown_on(Console().progress):
        return ACTIONS[call.action](settings, live, say, host or CacheHost())


def _status(settings: Settings, live: Storage, say: Say, host: CacheHost) -> int:
    for warning in _say_report(settings, live, say, host).warnings:
        say(f"warning: {warning}")
    return EXIT_OK


def _doctor(settings: Settings, live: Storage, say: Say, host: CacheHost) -> int:
    """What a repair would do, and what it cannot mend, each with the next command."""
    report = _say_report(settings, live, say, host)
    treatment = repair(live, dry_run=True, compilers=host.compilers, clock=host.clock)
    for kept in treatment.kept:
        say(f"{kept.kind} {kept.entry} | {kept.reason}")
    root = live.local_path("")
    if root is not None:
        mount = mount_of(root, host.mounts())
        place = f"{mount.file_system}, mounted at {mount.folder}" if mount else "unknown"
        say(f"file system {place}" + ("" if report.compilers else " | no compiler runs on this host"))
    problems = list(_problems(live, treatment, report.flags_warning, host))
    for problem in problems:
        say(f"problem: {problem}")
    say(f"doctor: {len(problems)} problems" if problems else "doctor: healthy")
    return DataError.exit_code if problems else EXIT_OK


def _problems(live: Storage, treatment: RepairReport, flags_warning: str, host: CacheHost) -> Iterator[TrnpipeError]:
    root = live.local_path("")
    try:
        if root is not None:
            refuse_network_root(root, mounts=host.mounts)
    except ConfigError as error:
        yield error
    for kind, text in SICK.items():  # one problem for each kind of sickness: the entries were listed before
        if found := [action for action in treatment.actions if action.kind == kind]:
            log = f"{live.uri(found[0].entry)}/{LOG_NAME}"
            yield DataError(
                f"{text}: {len(found)}",
                expected="entries that are finished, or being compiled now",
                next_command=f"read {log} for the reason, then {REPAIR}" if kind == "drop failed" else REPAIR,
            )
    if flags_warning:
        yield DataError(
            flags_warning,
            expected="entries made with the flags of the next run",
            next_command="trnpipe compile, or give --compile.flags.* and --compile.target as they were then",
        )


def _repair(settings: Settings, live: Storage, say: Say, host: CacheHost) -> int:
    root, keep = live.local_path(""), settings.compile.keep_versions or None
    if root is not None:  # the lock of a compiler on another machine would look stale
        refuse_network_root(root, mounts=host.mounts)
    for line in repair(live, keep_versions=keep, compilers=host.compilers, clock=host.clock).lines():
        say(line)
    return EXIT_OK


def _sync(settings: Settings, live: Storage, say: Say, host: CacheHost) -> int:
    config, root = settings.compile, live.local_path("")
    if not config.sync_url:
        raise ConfigError(
            "compile.sync_url is empty: no shared location to exchange compiled graphs",
            expected="s3://bucket/prefix, the same on all machines",
            next_command="trnpipe cache sync --compile.sync-url s3://bucket/prefix",
        )
    if root is None:
        raise ConfigError(
            f"the compile cache {live.root} is not on this machine",
            expected="a local folder to exchange with compile.sync_url",
            next_command="trnpipe cache sync --compile.cache-url FOLDER",
        )
    storage = open_storage(config.sync_url, retry=settings.storage, stop=live.stop)
    # A version that repair has pruned must not come back.
    report = sync_cache(root, storage, compiler_versions=config.keep_versions or None, mounts=host.mounts)
    for line in report.lines():
        say(line)
    return EXIT_OK


ACTIONS: Mapping[str, Callable[[Settings, Storage, Say, CacheHost], int]] = {
    "status": _status,
    "doctor": _doctor,
    "repair": _repair,
    "sync": _sync,
}


def _say_report(settings: Settings, live: Storage, say: Say, host: CacheHost) -> CacheReport:
    """What is there; in place of Neuron entries, where there are none, the graphs that another device has compiled."""
    config = settings.compile
    report = scan(live, compilers=host.compilers, flags=config.flags, target=config.target, clock=host.clock)
    for line in report.lines():
        say(line)
    if report.entries:
        return report
    workspace = open_storage(settings.workspace, retry=settings.storage, stop=live.stop)
    sizes = {stat.key: stat.size_bytes for stat in workspace.list(FOLDER)}
    manifests = load_manifests(workspace)
    for manifest in manifests:
        path = workspace.local_path(manifest.place)
        age_s = report.now_s - path.stat().st_mtime if path is not None and path.exists() else None
        say(
            f"graphs {manifest.plan_id[:12]} | {manifest.plan.get('device', 'unknown device')}"
            f" | {len(manifest.graphs)} graphs, {format_duration(manifest.compile_s)} compiling"
            f" | manifest {format_bytes(sizes.get(manifest.place))}, age {format_duration(age_s)}"
        )
    if not manifests:
        say("nothing is compiled yet: trnpipe compile")
    return report
