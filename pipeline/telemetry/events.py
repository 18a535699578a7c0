"""The event log of a cycle: one JSON line per event, readable after kill -9 at any byte.

On file:// all writers append to one file. S3 cannot append, so there every writer (an attempt of a stage) has objects
of its own, in segments: `cycles/c/events.jsonl` becomes `cycles/c/events/<start>-<stage>-<attempt>-<random>-<n>.jsonl`.
Readers take the file and the segments, so a workspace that has both, or was copied from S3 to a disk, is read whole.

Requests: a flush is one PUT of at most 64 KiB and the lines since the last flush, at most every 30 s and whenever it is
asked to be durable. A segment that has reached 64 KiB is followed by a new one. So n flushes of b bytes of lines put at
most n * 64 KiB + b bytes, into at most b / 64 KiB + 1 objects. Reading takes one HEAD, one LIST for each 1,000
segments, and one GET for each segment, 8 at once.
"""

import contextlib
import errno
import fcntl
import heapq
import json
import math
import os
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

import pipeline
from pipeline.io.atomic import fsync_path, make_dirs, sweep_temps, temp_beside
from pipeline.io.requests import run_parallel
from pipeline.io.storage import DiskFull, ObjectStat, Storage, os_errors

RESERVED = frozenset({"time", "event"})
PUT_INTERVAL_S = 30.0
SEGMENT_BYTES = BLOCK_BYTES = 64 * 1024
NUM_READ_THREADS = 8
MAX_LAST_SEGMENTS = 16  # to read the end of a log


class EventName(StrEnum):
    """What can happen in a cycle. Readers may rely on these names; adding one is a reviewed change."""

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
    """Appends events to `key` of a storage. Thread-safe. Writers, also of one `scratch`, never meet in an object.

    On file:// a line is written to the file at once. Elsewhere the lines of a segment are kept in a journal below
    `scratch`, and flush() puts the whole of it. After kill -9 the next EventLog with the same scratch folder puts what
    was left, under the name of the dead writer; without that folder the lines since the last put are lost. While a disk
    is full, lines wait in memory: emit() goes on, a durable flush raises DiskFull. `writer` goes into names.
    """

    def __init__(
        self,
        storage: Storage,
        key: str,
        *,
        scratch: Path,
        writer: str = "log",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._last_put_s = clock()
        self._unwritten = bytearray()
        real = storage.local_path(key)
        self._log: _Journal | _Segments
        if real is None:
            start = datetime.fromtimestamp(clock(), UTC).strftime("%Y%m%dT%H%M%S.%fZ")
            self._log = _Segments(storage, key, scratch, f"{start}-{writer}-{secrets.token_hex(4)}")
        else:
            with os_errors("opening", f"file://{real}"):
                make_dirs(real.parent)
                self._log = _Journal(real, real.open("a+b", buffering=0), shared=True)
                fsync_path(real.parent)

    def emit(self, event: EventName, /, **fields: object) -> None:
        """Append one line {"time": ISO 8601 UTC, "event": name, **fields}. Non-finite floats become strings.

        A full disk is no reason to stop what the event tells of: the line is kept for the next call.
        """
        if clash := RESERVED & fields.keys():
            raise ValueError(f"event fields {sorted(clash)} are reserved")
        with self._lock:
            stamp = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
            record = {"time": stamp, "event": str(event)} | {name: _plain(value) for name, value in fields.items()}
            self._unwritten += json.dumps(record, allow_nan=False, default=str).encode() + b"\n"
            with contextlib.suppress(DiskFull):
                self._append()

    def flush(self, durable: bool = False) -> None:
        """`durable`: on the device, and on S3, when this returns. Else S3 is put at most every 30 s."""
        with self._lock:
            if durable:
                self._append()
                self._journal.sync()
            if isinstance(self._log, _Segments) and (durable or self._clock() - self._last_put_s >= PUT_INTERVAL_S):
                self._log.put()
                self._last_put_s = self._clock()

    def close(self) -> None:
        """Flush durably and close. Twice is fine."""
        with self._lock:
            if not self._journal.file.closed:
                try:
                    self.flush(durable=True)
                finally:
                    self._log.close()

    @property
    def _journal(self) -> "_Journal":
        return self._log.journal if isinstance(self._log, _Segments) else self._log

    def _append(self) -> None:
        """One write of what waits, so that a reader never meets a half line."""
        if self._unwritten:
            self._journal.append(self._unwritten)
            self._unwritten.clear()


class _Journal:
    """A local file that whole lines are appended to. `shared`: by several processes."""

    def __init__(self, path: Path, file: BinaryIO, *, shared: bool = False) -> None:
        self.path, self.file, self._shared = path, file, shared
        with self._alone():
            end = size = os.fstat(file.fileno()).st_size
            while end > 0:  # after the last newline a writer was killed
                start = max(0, end - BLOCK_BYTES)
                newline = os.pread(file.fileno(), end - start, start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
            if end < size:
                os.ftruncate(file.fileno(), end)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody may take a line that another is writing for one that was cut when its writer was killed."""
        if not self._shared:
            yield
            return
        for _ in range(100):
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # for a second; then a writer hangs, and rather its line is lost than that all stop
                time.sleep(0.01)
                continue
            except OSError:  # a file system without locks
                pass
            break
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self.file, fcntl.LOCK_UN)

    def append(self, lines: bytes | bytearray) -> None:
        """What a full disk cuts is taken back."""
        with os_errors("writing", f"file://{self.path}"), self._alone():
            end = os.fstat(self.file.fileno()).st_size
            if os.write(self.file.fileno(), lines) != len(lines):
                os.ftruncate(self.file.fileno(), end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        with os_errors("writing", f"file://{self.path}"):
            os.fsync(self.file.fileno())

    def read(self) -> bytes:
        with os_errors("reading", f"file://{self.path}"):
            return self.path.read_bytes()

    def close(self) -> None:
        self.file.close()

    def drop(self) -> None:
        """Remove it, after its lines were put."""
        with os_errors("removing", f"file://{self.path}"):
            self.path.unlink(missing_ok=True)
        self.close()


class _Segments:
    """The objects of one writer, each with a journal of the same name, which is locked while its writer lives.

    An object is the journal as it was at some time, so it can be put again by anyone, any number of times.
    """

    def __init__(self, storage: Storage, key: str, scratch: Path, writer: str) -> None:
        self._storage, self._prefix, self._writer, self._count = storage, _segments_of(key), writer, 0
        self._folder = scratch / f"events-{xxhash.xxh3_64_hexdigest(storage.uri(key).encode())}"
        self._put_bytes = 0
        with os_errors("opening", f"file://{self._folder}"):
            make_dirs(self._folder)
            sweep_temps(self._folder)
            self._left = [left for path in sorted(self._folder.glob("*.jsonl")) if (left := _of_the_dead(path))]
            self.journal = self._begin()

    def put(self) -> None:
        """Send what dead writers have left, and what is new; begin another segment when this one is full."""
        while self._left:
            self._send(self._left[0], self._left[0].read())
            self._left.pop(0).drop()
        content = self.journal.read()
        if len(content) == self._put_bytes:
            return
        self._send(self.journal, content)
        self._put_bytes = len(content)
        if len(content) >= SEGMENT_BYTES:
            full = self.journal
            with contextlib.suppress(DiskFull):  # this one grows on until there is room for another
                with os_errors("opening", f"file://{self._folder}"):
                    self.journal = self._begin()
                self._put_bytes = 0
                full.drop()

    def close(self) -> None:
        """Keep the journals that were not put in full, for the next writer to find."""
        if os.fstat(self.journal.file.fileno()).st_size == self._put_bytes:
            self.journal.drop()
        for journal in (*self._left, self.journal):
            journal.close()

    def _begin(self) -> _Journal:
        """Locked before it has its name: nobody takes it for that of a dead writer."""
        path = self._folder / f"{self._writer}-{self._count:05d}.jsonl"
        temp = temp_beside(path)
        file = temp.open("a+b", buffering=0)
        with contextlib.suppress(OSError):  # a file system without locks: nobody there takes anything over
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temp.rename(path)
        fsync_path(self._folder)
        self._count += 1
        return _Journal(path, file)

    def _send(self, journal: _Journal, content: bytes) -> None:
        if content:
            self._storage.write_bytes(f"{self._prefix}/{journal.path.name}", content)


def _of_the_dead(path: Path) -> _Journal | None:
    """The journal of a writer that has died, locked; None for that of a living one, or one that is gone meanwhile."""
    try:
        file = path.open("r+b", buffering=0)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return _Journal(path, file)


def read_events(storage: Storage, key: str, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The events of a log by their time, those of one writer in its order; none when there is no log.

    Half lines of a killed writer and lines that are no JSON objects are left out. `last_bytes`: about as much of the
    newest.
    """
    file = storage.stat(key)
    stats = [*([file] if file else []), *storage.list(_segments_of(key))]
    if last_bytes is not None:
        newest, stats = stats[: -MAX_LAST_SEGMENTS - 1 : -1], []  # names sort by the start of their writers
        for stat in newest:
            if sum(one.size_bytes for one in stats) < last_bytes:
                stats.insert(0, stat)

    def read(stat: ObjectStat) -> bytes:
        if last_bytes is None:
            return storage.read_bytes(stat.key)
        return storage.read_range(stat.key, max(0, stat.size_bytes - last_bytes), last_bytes)

    found = run_parallel(
        read, stats, num_threads=NUM_READ_THREADS, stop=storage.stop, doing=f"reading {storage.uri(key)}"
    )
    writers: dict[str, list[dict[str, Any]]] = {}
    for stat, data in zip(stats, found, strict=True):
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
    """JSON has no NaN: the word is kept, as a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


# Which code is running, for the log and the records kept beside every artefact.

REVISION_VARIABLE = "TRN_REVISION"  # set by our images, which hold no .git


@cache
def code_version() -> str:
    """The package version with `git describe` of the checkout it lies in (`-dirty` when edited), or with the revision
    that an image was built from."""
    root = Path(pipeline.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        revision = os.environ.get(REVISION_VARIABLE, "")
        return f"{pipeline.__version__}+{revision}" if revision else pipeline.__version__
    command = ["git", "-C", str(root), "describe", "--always", "--tags", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):  # no git in the image: the package version is the answer
        return pipeline.__version__
    text = described.stdout.strip()
    return f"{pipeline.__version__}+{text}" if described.returncode == 0 and text else pipeline.__version__
