"""The event log of a cycle: one JSON line per event, appended, readable after kill -9 at any byte."""

import contextlib
import errno
import json
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from pipeline.core.errors import TransientError
from pipeline.core.events import EventName
from pipeline.io.atomic import fsync_path, make_dirs
from pipeline.io.errors import DiskFull, os_errors
from pipeline.io.storage import Storage

RESERVED = frozenset({"time", "event"})
PUT_INTERVAL_S = 30.0
MAX_PUT_TRIES = 20


class EventLog:
    """Appends events to `key` of a storage. Thread-safe; one process per run (rank 0) writes.

    On file:// a line is written to the file at once. Elsewhere the lines wait in a journal below `scratch` until
    flush() puts them with a conditional write, so several jobs of one cycle may share a log. After kill -9 the next
    EventLog with the same scratch folder sends what was left. While a disk is full, lines wait in memory: emit() goes
    on, a durable flush raises DiskFull.
    """

    def __init__(self, storage: Storage, key: str, *, scratch: Path, clock: Callable[[], float] = time.time) -> None:
        self._storage, self._key, self._clock = storage, key, clock
        self._lock = threading.RLock()
        self._last_put_s = clock()
        self._base, self._etag = b"", ""
        self._unwritten = bytearray()
        real = storage.local_path(key)
        self._is_local = real is not None
        self._path = real or scratch / f"events-{xxhash.xxh3_64_hexdigest(storage.uri(key).encode())}.jsonl"
        with os_errors("opening", f"file://{self._path}"):
            make_dirs(self._path.parent)
            self._file = self._path.open("a+b", buffering=0)
            _cut_half_line(self._file.fileno())
            fsync_path(self._path.parent)
        if not self._is_local:
            self._drop_sent_lines()

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
                with os_errors("writing", f"file://{self._path}"):
                    os.fsync(self._file.fileno())
            if self._is_local or not (durable or self._clock() - self._last_put_s >= PUT_INTERVAL_S):
                return
            self._put()
            self._last_put_s = self._clock()

    def close(self) -> None:
        """Flush durably and close. Twice is fine."""
        with self._lock:
            if not self._file.closed:
                try:
                    self.flush(durable=True)
                finally:
                    self._file.close()

    def _append(self) -> None:
        """One write of what waits, so that a reader never meets a half line; what a full disk cuts is taken back."""
        if not self._unwritten:
            return
        with os_errors("writing", f"file://{self._path}"):
            end = os.fstat(self._file.fileno()).st_size
            if os.write(self._file.fileno(), self._unwritten) != len(self._unwritten):
                os.ftruncate(self._file.fileno(), end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._unwritten.clear()

    def _pending(self) -> bytes:
        return self._path.read_bytes()

    def _load_base(self) -> None:
        """Read what the object holds now, unless it is what we read or wrote last."""
        stat = self._storage.stat(self._key)
        if stat is None:
            self._base, self._etag = b"", ""
        elif stat.etag != self._etag:
            self._base, self._etag = self._storage.read_bytes(self._key), stat.etag

    def _drop_sent_lines(self) -> None:
        """Killed between the put and the emptying of the journal: those lines must not be sent twice."""
        pending = self._pending()
        if pending:
            self._load_base()
            if pending in self._base:
                self._empty_journal()

    def _empty_journal(self) -> None:
        os.ftruncate(self._file.fileno(), 0)

    def _put(self) -> None:
        pending = self._pending()
        if not pending:
            return
        for _ in range(MAX_PUT_TRIES):
            self._load_base()
            content = self._base + pending
            if self._etag:
                done = self._storage.write_if_match(self._key, content, self._etag)
            else:
                done = self._storage.write_if_absent(self._key, content)
            if done:
                self._empty_journal()
                return
            self._storage.stop.wait(0.05)
        raise TransientError(
            f"{self._storage.uri(self._key)}: {MAX_PUT_TRIES} conditional writes lost to other writers",
            expected="few writers of one event log",
            next_command="run the same command again; the events wait in the scratch folder",
        )


def _plain(value: object) -> object:
    """JSON has no NaN: the word is kept, as a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _cut_half_line(descriptor: int, block_bytes: int = 65536) -> None:
    """Truncate after the last newline: a writer was killed within the rest."""
    end = size = os.fstat(descriptor).st_size
    while end > 0:
        start = max(0, end - block_bytes)
        newline = os.pread(descriptor, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(descriptor, end)
