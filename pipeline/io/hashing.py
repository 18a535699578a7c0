"""xxh3_128: the content checksum of every artefact (fast enough to be disk-bound; not a defence against malice)."""

from pathlib import Path
from typing import BinaryIO

import xxhash

from pipeline.core.manifest import FileRecord
from pipeline.core.progress import Advance
from pipeline.core.stop import StopSignal

BLOCK_BYTES = 8 * 2**20


def hash_bytes(data: bytes) -> str:
    """Hex xxh3_128 of bytes in memory."""
    return xxhash.xxh3_128_hexdigest(data)


def record_of(file: BinaryIO, stop: StopSignal | None = None, advance: Advance = lambda count: None) -> FileRecord:
    """Size and checksum of the rest of a stream, polling `stop` and telling `advance` every 8 MiB."""
    hasher, size_bytes = xxhash.xxh3_128(), 0
    while block := file.read(BLOCK_BYTES):
        if stop is not None:
            stop.raise_if_set("checking a file")
        hasher.update(block)
        size_bytes += len(block)
        advance(len(block))
    return FileRecord(size_bytes=size_bytes, xxh3_128=hasher.hexdigest())


def file_record(path: Path, stop: StopSignal | None = None) -> FileRecord:
    """Size and checksum of a local file."""
    with path.open("rb") as file:
        return record_of(file, stop)
