"""Compile caches as the tests make them."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.compile.cache import LOCK_DIR, CompilerProcess, EntryName, EntryState, Mount, parse_entry
from pipeline.compile.cache_sync import Direction, SyncReport, sync_cache
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from tests.counted import counted
from tests.storages import FAST

VERSION = "neuronxcc-2.24.8799.0+6f62ff7c"
OLDER = "neuronxcc-2.21.33363.0+82129205"
FLAGS = "3cc9a3cb"  # --target=trn1 --model-type=transformer
NOW_S = 1_700_000_000.0
GRAPH, NEFF, DONE, LOG = "model.hlo_module.pb", "model.neff", "model.done", "model.log"
LOCK = f"{GRAPH}.lock"


def opened(uri: str, stop: StopSignal | None = None) -> Storage:
    return open_storage(uri, retry=FAST, stop=stop)


def name_of(number: int, version: str = VERSION, flags: str = FLAGS) -> EntryName:
    name = parse_entry(f"{version}/MODULE_{number}+{flags}")
    assert name is not None
    return name


def done_files(seed: str = "a") -> dict[str, bytes]:
    """A finished entry whose bytes depend on `seed`, as a NEFF's do on the moment it was made."""
    return {
        GRAPH: b"graph",
        "compile_flags.json": json.dumps(["--target=trn1", "--model-type=transformer"]).encode(),
        NEFF: seed.encode() * 3000,
        DONE: b"",
    }


NUM_FILES = len(done_files())
ONE, TWO, THREE = (name_of(number) for number in (1, 2, 3))
FILES: Mapping[EntryState, Mapping[str, bytes]] = {
    EntryState.DONE: done_files(),
    EntryState.FAILED: {GRAPH: b"graph", LOG: b"[ERROR] out of memory"},
    EntryState.LOCKED: {GRAPH: b"graph", LOCK: b""},
    EntryState.COLLECTED: {GRAPH: b"graph"},
    EntryState.INCOMPLETE: {GRAPH: b"graph", NEFF: b"hal"},
}


def write_entry(root: Path, name: EntryName, files: Mapping[str, bytes], *, age_s: float = 0.0) -> Path:
    """Put an entry on disk, last changed `age_s` before NOW_S."""
    folder = root / name.key
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
        os.utime(folder / file, (NOW_S - age_s, NOW_S - age_s))
    return folder


def content_of(root: Path) -> dict[str, bytes]:
    """Every file of a cache, our own records left out."""
    found = {}
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and relative.parts[0] != LOCK_DIR:
            found[relative.as_posix()] = path.read_bytes()
    return found


def entries_of(root: Path, *names: EntryName) -> dict[str, bytes]:
    """The part of `content_of` that belongs to some entries."""
    keys = tuple(f"{name.key}/" for name in names)
    return {key: data for key, data in content_of(root).items() if key.startswith(keys)}


def flip(path: Path, offset: int = 1) -> None:
    """Change one byte, and neither size nor name."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(bytes(data))


def nobody() -> list[CompilerProcess]:
    return []


def somebody() -> list[CompilerProcess]:
    return [CompilerProcess(4711, "walrus_driver")]


def local_disk() -> list[Mount]:
    return [Mount("/", "ext4")]


def sync(root: Path, storage: Storage, *, direction: Direction = "both", **more: Any) -> SyncReport:
    return sync_cache(root, storage, direction=direction, mounts=local_disk, **more)


def moved(report: SyncReport) -> tuple[list[str], list[str]]:
    """Keys pulled and pushed."""
    return [one.entry for one in report.pulled], [one.entry for one in report.pushed]


def requests_of(storage: Storage, work: Callable[[], object]) -> Counter[str]:
    """How many requests of each kind `work` sends."""
    with counted(storage) as counts:
        work()
    return counts


def keys_of(storage: Storage, name: EntryName, ending: str = "") -> list[str]:
    return [stat.key for stat in storage.list(name.key) if stat.key.endswith(ending)]


def damage(storage: Storage, name: EntryName, file: str) -> None:
    """Change one byte of a file of a published entry."""
    (key,) = keys_of(storage, name, file)
    data = bytearray(storage.read_bytes(key))
    data[1] ^= 0x40
    storage.write_bytes(key, bytes(data))
