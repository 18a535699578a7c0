"""Exchange compiled graphs between machines.

PyTorch/XLA: entries of a local cache are copied to and from a storage that all nodes share. In the storage an entry is
a committed folder, `<entry>/<content id>/<files>` and a marker `<entry>/MANIFEST.json`. Nodes that compile the same
graph produce different bytes (a NEFF contains times and ids), so files are in a folder named by their content, and the
marker, which is created once, refers to the folder of the first node. An empty marker withdraws a damaged entry until
a node that has the entry replaces it. Concurrent and killed processes are safe, because the marker is written last, and
on the disk an entry appears by one rename, or with `model.done` last.

The native device: programs are files named by their content, `<folders>/<hash>.neff`, which torch-neuronx writes under
another name and renames ("safe for concurrent access across processes and nodes", its source).
"""

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from pipeline import __version__
from pipeline.backends import compiled_cache_variable, has_graph_tool
from pipeline.compile.cache import (
    DONE_NAME,
    LOG_NAME,
    CacheEntry,
    EntryState,
    cache_lock,
    entry_state,
    list_entries,
    refuse_network_root,
    release_locks,
)
from pipeline.compile.config import CompileConfig
from pipeline.core.errors import ConfigError, DataError, Preempted, TrnpipeError
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.commit import bad_file, check_sizes, fetch_dir, file_record, hash_bytes
from pipeline.io.requests import run_parallel
from pipeline.io.storage import KeyNotFound, Storage, join_key, open_storage, os_errors
from pipeline.parallel.world import TRACE_FILE, node_from_env
from pipeline.settings import Settings

WITHDRAWN = b""
NUM_ENTRY_THREADS = 4  # entries copied in parallel, each with its files in parallel


@dataclass(frozen=True)
class SyncReport:
    """Keys of copied entries, (key, reason) of skipped entries, and the number of entries that both sides had."""

    pulled: tuple[str, ...] = ()
    pushed: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    in_sync: int = 0

    def lines(self) -> list[str]:
        totals = f"pulled {len(self.pulled)} | pushed {len(self.pushed)} | in sync {self.in_sync}"
        return [f"cache sync | {totals} | skipped {len(self.skipped)}"] + [
            f"skipped {key}: {reason}" for key, reason in self.skipped
        ]


def sync_cache(root: Path, storage: Storage) -> SyncReport:
    """Copy finished entries between the local cache `root` and `storage`, pulling first because training waits for it.

    Raises ConfigError if the root is on a network file system or is itself a shared storage. After DiskFull,
    TransientError or Preempted, copied entries are usable and the same call continues.
    """
    refuse_network_root(root)
    local = open_storage(str(root), stop=storage.stop)
    shared = storage.local_path("")
    is_same = shared is not None and shared.resolve() == root.resolve()
    if is_same or any(entry.is_published for entry in list_entries(local)):
        raise ConfigError(
            f"compile cache {root} is itself a storage that caches are synced with",
            expected="the compiler's local folder, and another folder or s3:// prefix shared by all nodes",
            next_command="trnpipe config  # see the section compile",
        )
    with cache_lock(root, storage.stop) as work_dir:
        staging = work_dir / "staging"
        _clear(staging)  # left by a killed sync, since this process has the lock
        try:
            return _Sync(local, root, storage, staging).run()
        finally:
            _clear(staging)


@dataclass(frozen=True)
class _Sync:
    local: Storage
    root: Path
    storage: Storage
    staging: Path

    def run(self) -> SyncReport:
        local, shared = (
            {entry.key: entry for entry in list_entries(side) if entry.state is EntryState.DONE}
            for side in (self.local, self.storage)
        )
        published = {key for key, entry in shared.items() if entry.is_published}
        pulls, pushes = sorted(published - local.keys()), sorted(local.keys() - published)
        threads, stop = NUM_ENTRY_THREADS, self.storage.stop
        pulled = run_parallel(self._pull, pulls, num_threads=threads, stop=stop, doing="pulling compiled graphs")
        new = [local[key] for key in pushes]
        pushed = run_parallel(self._push, new, num_threads=threads, stop=stop, doing="pushing compiled graphs")
        pull_results, push_results = list(zip(pulls, pulled, strict=True)), list(zip(pushes, pushed, strict=True))
        return SyncReport(
            tuple(key for key, reason in pull_results if reason == ""),
            tuple(key for key, reason in push_results if reason == ""),
            tuple((key, reason) for key, reason in pull_results + push_results if reason),
            len(local.keys() & published) + pushed.count(None),
        )

    def _pull(self, key: str) -> str:
        """Copy an entry to the disk. Return an empty string, or why it was skipped."""
        if any(entry.locks for entry in list_entries(self.local, key)):
            return "locked here by a running or killed compiler (trnpipe cache repair)"
        marker = join_key(key, MANIFEST_NAME)
        stat = self.storage.stat(marker)  # before the entry is verified
        try:
            folder = self._fetch(key)
        except DataError as error:  # withdraw it, so that a node that has or compiles it can push it again
            if stat is not None and stat.etag:
                self.storage.write_if_match(marker, WITHDRAWN, stat.etag)
            return f"{error.seen}; withdrawn, to be compiled and pushed again"
        return "" if place_entry(self.root, key, folder) else "locked here by a compiler that started during the pull"

    def _fetch(self, key: str) -> Path:
        """Return a verified copy in the staging folder. Raises DataError if the marker or a file is damaged."""
        fetched = fetch_dir(self.storage, key, self.staging / key)
        with os_errors("reading", f"file://{fetched}"):
            manifest = Manifest.from_json((fetched / MANIFEST_NAME).read_bytes(), source=str(fetched))
            content = next(iter(manifest.files), "").partition("/")[0]
            names = {file.removeprefix(f"{content}/") for file in manifest.files}
            is_done = entry_state(names) is EntryState.DONE
            if manifest.fields.get("entry") != key or not is_done or any("/" in file for file in names):
                uri = self.storage.uri(join_key(key, MANIFEST_NAME))
                raise bad_file(uri, "does not describe a finished entry of this key", "its files")
            folder = self.staging / key / content
            if self.storage.local_path("") is not None:
                self.storage.download_dir(join_key(key, content), folder, sorted(names))
            else:
                (fetched / content).rename(folder)
        return folder

    def _push(self, entry: CacheEntry) -> str | None:
        """Upload the files, then the marker. Return '', why it was skipped, or None if another node was first."""
        key, folder = entry.key, self.root / entry.key
        marker = join_key(key, MANIFEST_NAME)
        before = self.storage.stat(marker)
        if before is not None and before.size_bytes:
            return None
        try:
            names = sorted(name for name in entry.files if "/" not in name and f"{key}/{name}" not in entry.locks)
            with os_errors("reading", f"file://{folder}"):
                records = {file: file_record(folder / file, self.storage.stop) for file in names}
            text = "\n".join(f"{file} {record.size_bytes} {record.xxh3_128}" for file, record in records.items())
            content = hash_bytes(text.encode())
            manifest = Manifest(
                kind="compile-cache-entry",
                created_by=f"trnpipe {__version__}",
                fields={"entry": key},
                files={f"{content}/{file}": record for file, record in records.items()},
            )
            if (target := self.storage.local_path(join_key(key, content))) is not None:
                atomic.sweep_temps(target)
            self.storage.upload_dir(join_key(key, content), folder, names)
            check_sizes(self.storage, key, manifest)
        except DataError as error:
            return f"changed during the upload ({error.seen})"
        self.storage.stop.raise_if_set(f"publishing {key}")
        if before is not None:
            won = self.storage.write_if_match(marker, manifest.to_json(), before.etag)
        else:
            won = self.storage.write_if_absent(marker, manifest.to_json())
        if won:
            return ""
        try:  # the first node may have pushed the same bytes; searched as text, since the marker may be damaged
            is_used = f'"{content}/'.encode() in self.storage.read_bytes(marker)
        except KeyNotFound:
            is_used = False
        if not is_used:
            self.storage.delete(join_key(key, file) for file in manifest.files)
        return None


def place_entry(root: Path, key: str, folder: Path) -> bool:
    """Move the files of `folder` (on the same file system) to the entry. Return False if the entry is locked.

    A missing entry appears by one rename. For an existing one (traced, failed, half written) the files are moved one by
    one, then the log of an earlier failure is deleted, and `model.done` is moved last.
    """
    target = root / key
    with os_errors("writing", f"file://{target}"):
        atomic.make_dirs(target.parent)
        try:
            folder.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if any(entry.locks for entry in list_entries(open_storage(str(root)), key)):
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


def _clear(staging: Path) -> None:
    with os_errors("deleting", f"file://{staging}"):
        if staging.exists():
            shutil.rmtree(staging)


# Sharing programs during a stage on Neuron.

FOLDER = "neff"
PUSH_EVERY_S = 60.0  # a machine that fails while compiling loses the programs of at most one minute
_PROGRAM = re.compile(r"(?:[0-9A-Za-z_-][0-9A-Za-z_.+-]*/)*[0-9A-Za-z_-][0-9A-Za-z_.+-]*\.neff")


@contextmanager
def shared_compile_cache(
    settings: Settings, stop: StopSignal, say: Say, env: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Prepare the compile cache of a stage and share new programs, once per node and not in each rank.

    PyTorch/XLA uses a cache on S3 directly, so only stale locks are deleted there. Programs of the native device are
    copied from and to the storage. Enter it after `use_neuron_cache`. Raises the storage's errors.
    """
    config, root = settings.compile, settings.compile.cache_root(settings.workspace)
    is_rank = "WORLD_SIZE" in env or TRACE_FILE in env
    uri, variable = programs_uri(config, root), compiled_cache_variable(settings.backend)
    if not is_rank and has_graph_tool(settings.backend, env) and root.startswith("s3://"):
        if node_from_env(env)[0] == 0:
            for action in release_locks(open_storage(root, retry=settings.storage, stop=stop)):
                say(f"compile cache: {action}")
        variable = ""
    if is_rank or not variable or not uri:
        yield
        return
    programs = Programs(open_storage(uri, retry=settings.storage, stop=stop), Path(env[variable]))
    if pulled := programs.pull():
        say(f"compile cache: pulled {pulled} compiled programs from {uri}")
    ended = Event()

    def push_periodically() -> None:
        while not ended.wait(PUSH_EVERY_S):
            with suppress(TrnpipeError):  # the final push below reports errors
                programs.push()

    pusher = Thread(target=push_periodically, name="compiled programs", daemon=True)
    pusher.start()
    try:
        yield
    finally:
        ended.set()
        pusher.join()
        if not stop.is_set():
            try:
                programs.push()
            except Preempted:
                raise
            except TrnpipeError as error:  # other jobs compile again, but the stage's result is valid
                say(f"compile cache: compiled programs could not be shared: {error.seen}")
        if programs.num_pushed:
            say(f"compile cache: pushed {programs.num_pushed} compiled programs to {uri}")


def programs_uri(config: CompileConfig, root: str) -> str:
    """Return the URI of shared programs, empty if the cache is a folder and sync_url is not set."""
    shared = root if root.startswith("s3://") else config.sync_url.rstrip("/")
    return f"{shared}/{FOLDER}" if shared else ""


class Programs:
    """Compiled programs in a local folder and in the storage that machines share."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self._storage, self._folder = storage, folder
        self._stored = {s.key for s in storage.list("") if s.size_bytes and _PROGRAM.fullmatch(s.key)}
        self.num_pushed = 0

    def pull(self) -> int:
        """Download the programs that are missing in the folder and return their number."""
        missing = sorted(self._stored - self._local())
        self._storage.download_dir("", self._folder, missing)
        return len(missing)

    def push(self) -> None:
        """Upload programs that the storage did not have when this object was created, each once."""
        new = sorted(self._local() - self._stored)
        self._storage.upload_dir("", self._folder, new)
        self._stored |= {*new}
        self.num_pushed += len(new)

    def _local(self) -> set[str]:
        paths = (path for path in self._folder.rglob("*.neff") if path.is_file() and path.stat().st_size)
        return {key for path in paths if _PROGRAM.fullmatch(key := path.relative_to(self._folder).as_posix())}
