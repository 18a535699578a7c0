"""The event log of a cycle, which contains one line of JSON per event.

The log remains readable if a writer is killed at any time. On file://, all writers append to a single file. S3 doesn't
support appending, so there every writer (an attempt of a stage) has its own objects. Instead of a single
`cycles/c/events.jsonl`, the log consists of `cycles/c/events/<start>-<stage>-<attempt>-<random>-<n>.jsonl`. Readers
support a mix of both, so that a workspace keeps its log if it is copied from S3 to disk.

To limit the number and the size of S3 requests, a writer collects lines and rewrites its current object at most every
30 s, and additionally for every durable flush. Once the object has reached 64 KiB, the writer starts a new one. As a
result, n requests for b bytes of lines write at most n * 64 KiB + b bytes in total, to at most b / 64 KiB + 1 objects.
Reading the log takes one HEAD request, one LIST request per 1,000 objects, and one GET request per object.
"""

import contextlib
import errno
import heapq
import json
import math
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import pipeline
from pipeline.io.atomic import fsync_path, make_dirs
from pipeline.io.requests import run_parallel
from pipeline.io.storage import DiskFull, ObjectStat, Storage, os_errors

RESERVED = frozenset({"time", "event"})
PUT_INTERVAL_S = 30.0
SEGMENT_BYTES = 64 * 1024
NUM_READ_THREADS = 8
MAX_LAST_SEGMENTS = 16  # maximum number of objects to read for the end of a log


class EventName(StrEnum):
    """The names of all events. Dashboards and other readers rely on these, so don't change existing names."""

    STAGE_STARTED = "stage_started"
    STAGE_SKIPPED = "stage_skipped"
    STAGE_FINISHED = "stage_finished"
    STAGE_FAILED = "stage_failed"
    STAGE_STOPPED = "stage_stopped"
    PARTITION_REUSED = "partition_reused"
    PARTITION_PREPARED = "partition_prepared"
    ROWS_QUARANTINED = "rows_quarantined"
    TOKENIZER_TRAINED = "tokenizer_trained"
    TRAIN_STARTED = "train_started"
    TRAIN_RESUMED = "train_resumed"
    TRAIN_STEPS = "train_steps"
    STEP_SKIPPED = "step_skipped"
    GRAPH_COMPILED = "graph_compiled"
    CACHE_REPAIRED = "cache_repaired"
    HOLDOUT_EVALUATED = "holdout_evaluated"
    GATE_JUDGED = "gate_judged"
    DEADLINE_AT_RISK = "deadline_at_risk"
    CHECKPOINT_SAVED = "checkpoint_saved"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_REJECTED = "checkpoint_rejected"
    CHECKPOINT_DELETED = "checkpoint_deleted"
    EMBED_STARTED = "embed_started"
    PART_EMBEDDED = "part_embedded"


class EventLog:
    """A thread-safe writer that appends events to a log.

    On file://, every event is written immediately. If the disk is full, `emit` keeps events in memory until there is
    space again, while a durable flush raises DiskFull. On S3, events are written after at most 30 s, so those since the
    last write are lost if the process is killed with SIGKILL.

    Args:
        storage: the storage of the log.
        key: key of the log, such as `cycles/c/events.jsonl`.
        writer: included in the names of S3 objects.
        clock: returns the Unix time in seconds.
        is_muted: whether to write nothing. Only rank 0 and the first task of an array write to the log.
    """

    def __init__(
        self,
        storage: Storage,
        key: str,
        *,
        writer: str = "log",
        clock: Callable[[], float] = time.time,
        is_muted: bool = False,
    ) -> None:
        self._storage, self._clock, self._is_muted = storage, clock, is_muted
        self._lock = threading.RLock()
        self._waiting = bytearray()  # complete lines
        path = None if is_muted else storage.local_path(key)
        self._file = None if path is None else _open_to_append(path)
        start = datetime.fromtimestamp(clock(), UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        self._prefix = f"{_segments_of(key)}/{start}-{writer}-{secrets.token_hex(4)}"
        self._segment, self._num_full = b"", 0
        self._last_put_s = clock()

    def emit(self, event: EventName, /, **fields: object) -> None:
        """Append an event with the current time and the given fields. NaN and infinity are converted to strings."""
        if clash := RESERVED & fields.keys():
            raise ValueError(f"event fields {sorted(clash)} are reserved")
        if self._is_muted:
            return
        with self._lock:
            stamp = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
            record = {"time": stamp, "event": str(event)} | {name: _plain(value) for name, value in fields.items()}
            self._waiting += json.dumps(record, allow_nan=False, default=str).encode() + b"\n"
            if self._file is not None:
                with contextlib.suppress(DiskFull):
                    self._append(self._file)

    def flush(self, durable: bool = False) -> None:
        """Write pending events to S3, unless the last write was less than 30 s ago.

        If `durable` is set, pending events are always written, and a local file is fsynced.
        """
        with self._lock:
            if self._file is None:
                if self._waiting and (durable or self._clock() - self._last_put_s >= PUT_INTERVAL_S):
                    self._put()
            elif durable:
                self._append(self._file)
                with os_errors("writing", f"file://{self._file.name}"):
                    os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write all pending events and close the log. It is safe to call this more than once."""
        with self._lock:
            if self._file is None:
                self.flush(durable=True)
            elif not self._file.closed:
                try:
                    self.flush(durable=True)
                finally:
                    self._file.close()

    def _append(self, file: FileIO) -> None:
        """Write all pending lines with a single call.

        If the disk is full and a line is written only partially, it is ended and the whole line is written again later.
        """
        if not self._waiting:
            return
        with os_errors("writing", f"file://{file.name}"):
            written = os.write(file.fileno(), self._waiting)
            if written == len(self._waiting):
                self._waiting.clear()
                return
            del self._waiting[: self._waiting.rfind(b"\n", 0, written) + 1]
            self._waiting[:0] = b"\n"
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _put(self) -> None:
        """Append the pending lines to the current object by rewriting it. It is safe to retry this after a failure."""
        content = self._segment + self._waiting
        self._storage.write_bytes(f"{self._prefix}-{self._num_full:05d}.jsonl", content)
        self._segment = content
        self._waiting.clear()
        self._last_put_s = self._clock()
        if len(content) >= SEGMENT_BYTES:
            self._segment, self._num_full = b"", self._num_full + 1


def _open_to_append(path: Path) -> FileIO:
    """Open a log file for appending. If a killed writer left an incomplete line at the end, end that line first."""
    with os_errors("opening", f"file://{path}"):
        make_dirs(path.parent)
        file = FileIO(path, "a+b")
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            os.write(file.fileno(), b"\n")
        fsync_path(path.parent)
    return file


def read_events(storage: Storage, key: str, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return all events of a log in chronological order. Returns an empty list if the log doesn't exist.

    Events of the same writer always keep their order. Lines that are not JSON objects are skipped, for example if a
    writer was killed in the middle of a line.

    Args:
        storage: the storage of the log.
        key: key of the log.
        last_bytes: only read about this many bytes from the end of the log.
    """
    file = storage.stat(key)
    stats = [*([file] if file else []), *storage.list(_segments_of(key))]
    if last_bytes is not None:
        newest, stats = stats[: -MAX_LAST_SEGMENTS - 1 : -1], []  # names are sorted by the start time of the writer
        for stat in newest:
            if sum(selected.size_bytes for selected in stats) < last_bytes:
                stats.insert(0, stat)

    def read(stat: ObjectStat) -> bytes:
        if last_bytes is None:
            return storage.read_bytes(stat.key)
        return storage.read_range(stat.key, max(0, stat.size_bytes - last_bytes), last_bytes)

    contents = run_parallel(
        read, stats, num_threads=NUM_READ_THREADS, stop=storage.stop, doing=f"reading {storage.uri(key)}"
    )
    writers: dict[str, list[dict[str, Any]]] = {}
    for stat, data in zip(stats, contents, strict=True):
        events = writers.setdefault(stat.key.rpartition("-")[0], [])
        for line in data.splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict):
                    events.append(event)
    return list(heapq.merge(*writers.values(), key=lambda event: str(event.get("time", ""))))


def _segments_of(key: str) -> str:
    return key.removesuffix(".jsonl")


def _plain(value: object) -> object:
    """Convert NaN and infinity in a nested value to strings, because JSON doesn't support them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


# The version of the running code, which is recorded in the log and with every artifact.

REVISION_VARIABLE = "TRN_REVISION"  # set in the container images, because they don't contain .git


@cache
def code_version() -> str:
    """Return the version of the package and the revision of the code.

    The revision is the output of `git describe` in a checkout, or the revision that the container image was built from.
    """
    root = Path(pipeline.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        revision = os.environ.get(REVISION_VARIABLE, "")
        return f"{pipeline.__version__}+{revision}" if revision else pipeline.__version__
    command = ["git", "-C", str(root), "describe", "--always", "--tags", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):  # git isn't installed
        return pipeline.__version__
    text = described.stdout.strip()
    return f"{pipeline.__version__}+{text}" if described.returncode == 0 and text else pipeline.__version__
