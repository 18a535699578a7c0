"""The compile cache of a stage on Neuron, where machines share it: made ready before the stage, filled after it.

PyTorch/XLA compiles into the cache itself, on S3 too: locks that dead compilers left there are removed first. The
native device compiles into a folder of its machine: its programs are copied from and to the storage that jobs share.
Each is a file named by its content, `<folders>/<hash>.neff`. torch-neuronx writes it under another name and renames it
("safe for concurrent access across processes and nodes", its source), so copying needs neither lock nor marker.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from pipeline.backends import compiled_cache, has_graph_tool
from pipeline.compile.cache import release_dead_locks
from pipeline.compile.config import CompileConfig
from pipeline.core.errors import Preempted, TrnpipeError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.world import TRACE_FILE, node_from_env
from pipeline.settings import Settings

FOLDER = "neff"
PUSH_EVERY_S = 60.0  # a machine lost while it compiles loses at most one minute of programs
_PROGRAM = re.compile(r"(?:[0-9A-Za-z_-][0-9A-Za-z_.+-]*/)*[0-9A-Za-z_-][0-9A-Za-z_.+-]*\.neff")


@contextmanager
def shared_compile_cache(
    settings: Settings, stop: StopSignal, say: Say, env: Mapping[str, str] = os.environ
) -> Iterator[None]:
    """Prepare the cache for a stage, and share new programs. Runs once on each node, not in each rank.

    To be entered after `use_neuron_cache`. Raises TransientError, ConfigError, Preempted.
    """
    config, root = settings.compile, settings.compile.cache_root(settings.workspace)
    is_rank = "WORLD_SIZE" in env or TRACE_FILE in env
    if not is_rank and has_graph_tool(settings.backend, env) and root.startswith("s3://"):
        if node_from_env(env)[0] == 0:
            for action in release_dead_locks(open_storage(root, retry=settings.storage, stop=stop)):
                say(f"compile cache: {action.kind} {action.entry}: {action.reason}")
        yield
        return
    place, variable = programs_place(config, root), compiled_cache(settings.backend)
    if is_rank or not variable or not place:
        yield
        return
    programs = Programs(open_storage(place, retry=settings.storage, stop=stop), Path(env[variable]))
    if pulled := programs.pull():
        say(f"compile cache: {pulled} compiled programs from {place}")
    ended = Event()

    def push_now_and_then() -> None:
        while not ended.wait(PUSH_EVERY_S):
            with suppress(TrnpipeError):  # the last push below reports it
                programs.push()

    pusher = Thread(target=push_now_and_then, name="compiled programs", daemon=True)
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
            except TrnpipeError as error:  # other jobs then compile themselves; the stage's result stays
                say(f"compile cache: compiled programs could not be shared: {error.seen}")
        if programs.num_pushed:
            say(f"compile cache: {programs.num_pushed} compiled programs to {place}")


def programs_place(config: CompileConfig, root: str) -> str:
    """Return the URI through which machines exchange programs; '' if the cache is a folder and sync_url is empty."""
    shared = root if root.startswith("s3://") else config.sync_url.rstrip("/")
    return f"{shared}/{FOLDER}" if shared else ""


class Programs:
    """The compiled programs in a folder of this machine, and those in the storage that machines share."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self._storage, self._folder = storage, folder
        found = (stat.key for stat in storage.list("") if stat.size_bytes)
        self._stored = {key for key in found if _PROGRAM.fullmatch(key)}
        self.num_pushed = 0

    def pull(self) -> int:
        """Download the programs that the folder lacks. Return how many."""
        missing = sorted(self._stored - self._local())
        self._storage.download_dir("", self._folder, missing)
        return len(missing)

    def push(self) -> None:
        """Upload the programs that the storage lacked when this began, and that were not uploaded since."""
        new = sorted(self._local() - self._stored)
        self._storage.upload_dir("", self._folder, new)
        self._stored |= {*new}
        self.num_pushed += len(new)

    def _local(self) -> set[str]:
        paths = (path for path in self._folder.rglob("*.neff") if path.is_file() and path.stat().st_size)
        return {key for path in paths if _PROGRAM.fullmatch(key := path.relative_to(self._folder).as_posix())}
