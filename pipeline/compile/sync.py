"""Share compiled graphs between machines.

With PyTorch/XLA, the entries of a local cache are copied to and from a storage that all nodes share. In the storage,
the files of an entry are stored as `<entry>/<content id>/<files>`, with a marker `<entry>/MANIFEST.json`. If several
nodes compile the same graph, the files differ, because a NEFF contains timestamps and ids. We therefore store them in a
folder named after their content, and the marker, which is only created once, refers to the folder of the first node. If
an entry is found to be damaged, it is withdrawn by making the marker empty, until it is replaced by a node that has the
entry. It is safe to sync concurrently or to kill a sync, because the marker is written last. On the local disk, entries
are added with a single rename, or by moving `model.done` last.

On the native device, programs are files named after their content, `<folders>/<hash>.neff`. torch-neuronx writes each
of them to a temporary file and renames it, which its source describes as "safe for concurrent access across processes
and nodes".
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
NUM_ENTRY_THREADS = 4  # number of entries to copy in parallel, in addition to copying the files of each in parallel


@dataclass(frozen=True)
class SyncReport:
    """The result of a sync.

    It contains the keys of copied entries, the keys and reasons of skipped entries, and the number of entries that were
    already on both sides.
    """

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
    """Copy finished entries between the local cache `root` and `storage`.

    Entries are pulled before any are pushed, since training has to wait for them. Raises ConfigError if the root is on
    a network file system, or if it is itself a shared storage. After DiskFull, TransientError or Preempted, entries
    that have been copied can be used, and calling this again continues with the others.
    """
    refuse_network_root(root)
    local = open_storage(str(root), stop=storage.stop)
    shared = storage.local_path("")
    is_same = shared is not None and shared.resolve() == root.resolve()
    if is_same or any(entry.is_published for entry in list_entries(local)):
        raise ConfigError(
            f"compile cache {root} is itself a storage that caches are synced with",
            expected="the compiler's local folder, and a different folder or s3:// prefix that all nodes share",
            next_command="trnpipe config  # see the section compile",
        )
    with cache_lock(root, storage.stop) as work_dir:
        staging = work_dir / "staging"
        _clear(staging)  # we have the lock, so any existing files are from a sync that was killed
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
        """Copy an entry to the local disk. Returns the reason if it was skipped, or else an empty string."""
        if any(entry.locks for entry in list_entries(self.local, key)):
            return "locked locally by a compiler that is running or was killed (see trnpipe cache repair)"
        marker = join_key(key, MANIFEST_NAME)
        stat = self.storage.stat(marker)  # must be read before the entry is verified
        try:
            folder = self._fetch(key)
        except DataError as error:  # withdraw the entry, so that any node that has or compiles it can push it again
            if stat is not None and stat.etag:
                self.storage.write_if_match(marker, WITHDRAWN, stat.etag)
            return f"{error.seen} (withdrawn, so that it is compiled and pushed again)"
        return "" if place_entry(self.root, key, folder) else "locked by a compiler that started during the pull"

    def _fetch(self, key: str) -> Path:
        """Download an entry to the staging folder and verify it.

        Raises DataError if the marker or any file is damaged.
        """
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
        """Upload the files of an entry, followed by the marker.

        Returns an empty string, the reason if the entry was skipped, or None if another node has already pushed it.
        """
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
        # The other node may have pushed identical files. The marker may be damaged, so don't parse it.
        try:
            is_used = f'"{content}/'.encode() in self.storage.read_bytes(marker)
        except KeyNotFound:
            is_used = False
        if not is_used:
            self.storage.delete(join_key(key, file) for file in manifest.files)
        return None


def place_entry(root: Path, key: str, folder: Path) -> bool:
    """Move the files in `folder`, which must be on the same file system, to an entry of the local cache.

    If the entry doesn't exist yet, the folder is renamed. Otherwise, the entry may have been traced, failed or
    partially written. In that case, the files are moved one by one and the log of an earlier failure is deleted, before
    `model.done` is moved last. Returns False if the entry is locked.
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


# Sharing compiled programs while a stage is running on Neuron.

FOLDER = "neff"
PUSH_EVERY_S = 60.0  # if a machine fails, the programs compiled in the last minute are lost
_PROGRAM = re.compile(r"(?:[0-9A-Za-z_-][0-9A-Za-z_.+-]*/)*[0-9A-Za-z_-][0-9A-Za-z_.+-]*\.neff")


@contextmanager
def shared_compile_cache(
    settings: Settings, stop: StopSignal, say: Say, env: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Prepare the compile cache for a stage, and upload newly compiled programs while it is running.

    This must be entered after calling `use_neuron_cache`, and does nothing in ranks, since it is only required once per
    node. PyTorch/XLA can use a cache on S3 directly, so for that we only delete stale locks. On the native device,
    programs are copied to and from the storage. Storage errors are propagated.
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
            with suppress(TrnpipeError):  # errors are reported by the final push below
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
            except TrnpipeError as error:  # other jobs have to compile again, but the result of the stage is valid
                say(f"compile cache: compiled programs could not be shared: {error.seen}")
        if programs.num_pushed:
            say(f"compile cache: pushed {programs.num_pushed} compiled programs to {uri}")


def programs_uri(config: CompileConfig, root: str) -> str:
    """Return the URI of shared programs, or an empty string if the cache is local and sync_url is not set."""
    shared = root if root.startswith("s3://") else config.sync_url.rstrip("/")
    return f"{shared}/{FOLDER}" if shared else ""


class Programs:
    """The compiled programs in a local folder and in the storage that is shared between machines."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self._storage, self._folder = storage, folder
        self._stored = {s.key for s in storage.list("") if s.size_bytes and _PROGRAM.fullmatch(s.key)}
        self.num_pushed = 0

    def pull(self) -> int:
        """Download all programs that are missing in the local folder and return their number."""
        missing = sorted(self._stored - self._local())
        self._storage.download_dir("", self._folder, missing)
        return len(missing)

    def push(self) -> None:
        """Upload all programs that were not in the storage and have not been uploaded by this object."""
        new = sorted(self._local() - self._stored)
        self._storage.upload_dir("", self._folder, new)
        self._stored |= {*new}
        self.num_pushed += len(new)

    def _local(self) -> set[str]:
        paths = (path for path in self._folder.rglob("*.neff") if path.is_file() and path.stat().st_size)
        return {key for path in paths if _PROGRAM.fullmatch(key := path.relative_to(self._folder).as_posix())}
