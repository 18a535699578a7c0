"""Compile caches as the tests make them."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.compile.cache import LOCK_DIR, EntryState
from pipeline.compile.config import CompilerFlags
from pipeline.core.stop import StopSignal
from pipeline.io.storage import Storage, open_storage
from tests.kit.storages import FAST

VERSION = "neuronxcc-2.24.8799.0+6f62ff7c"
GRAPH, NEFF, DONE, LOG = "model.hlo_module.pb", "model.neff", "model.done", "model.log"
LOCK = f"{GRAPH}.lock"


def opened(uri: str, stop: StopSignal | None = None) -> Storage:
    return open_storage(uri, retry=FAST, stop=stop)


def name_of(number: int) -> str:
    return f"{VERSION}/MODULE_{number}+3cc9a3cb"


def done_files(seed: str = "a") -> dict[str, bytes]:
    """A finished entry whose bytes depend on `seed`, as a NEFF's do on the moment it was made."""
    flags = json.dumps(["--target=trn1", *CompilerFlags().tokens()]).encode()
    return {GRAPH: b"graph", "compile_flags.json": flags, NEFF: seed.encode() * 3000, DONE: b""}


NUM_FILES = len(done_files())
ONE, TWO, THREE = (name_of(number) for number in (1, 2, 3))
FILES: Mapping[EntryState, Mapping[str, bytes]] = {
    EntryState.DONE: done_files(),
    EntryState.FAILED: {GRAPH: b"graph", LOG: b"[ERROR] out of memory"},
    EntryState.LOCKED: {GRAPH: b"graph", LOCK: b""},
    EntryState.PARTIAL: {GRAPH: b"graph", NEFF: b"hal"},
}


def write_entry(root: Path, key: str, files: Mapping[str, bytes], *, age_s: float = 0.0) -> Path:
    """Put an entry on disk, last changed `age_s` ago."""
    folder, then = root / key, time.time() - age_s
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(data)
        os.utime(folder / file, (then, then))
    return folder


def content_of(root: Path) -> dict[str, bytes]:
    """Every file of a cache, our own records left out."""
    found = {path.relative_to(root): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name.as_posix(): path.read_bytes() for name, path in found.items() if name.parts[0] != LOCK_DIR}


def entries_of(root: Path, *keys: str) -> dict[str, bytes]:
    """The part of `content_of` that belongs to some entries."""
    return {name: data for name, data in content_of(root).items() if name.startswith(tuple(f"{key}/" for key in keys))}


def nobody() -> list[str]:
    return []


def somebody() -> list[str]:
    return ["walrus_driver (pid 4711)"]


def keys_of(storage: Storage, name: str, ending: str = "") -> list[str]:
    return [stat.key for stat in storage.list(name) if stat.key.endswith(ending)]


def damage(storage: Storage, name: str, file: str) -> None:
    """Change one byte of a file of a published entry."""
    (key,) = keys_of(storage, name, file)
    data = bytearray(storage.read_bytes(key))
    data[1] ^= 0x40
    storage.write_bytes(key, bytes(data))
