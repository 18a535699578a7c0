"""The seam to storage: one protocol over `file://` and `s3://`, and how a URI becomes a Storage."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol
from urllib.parse import urlsplit

from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.retry import RetryPolicy

# Counts of storage requests: S3 is billed by request, so they are part of a cycle's figures.

Operation = Literal["get", "put", "list", "delete", "head"]


class RequestCounts:
    """Requests sent, by kind, each attempt counted; `retries` says how many of them were repeats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {"get": 0, "put": 0, "list": 0, "delete": 0, "head": 0}
        self._retries = 0

    def add(self, operation: Operation) -> None:
        with self._lock:
            self._counts[operation] += 1

    def add_retry(self) -> None:
        with self._lock:
            self._retries += 1

    def snapshot(self) -> dict[str, int]:
        """All counts by name, `retries` included; JSON-ready."""
        with self._lock:
            return {**self._counts, "retries": self._retries}

    @property
    def get(self) -> int:
        return self.snapshot()["get"]

    @property
    def put(self) -> int:
        return self.snapshot()["put"]

    @property
    def list(self) -> int:
        return self.snapshot()["list"]

    @property
    def delete(self) -> int:
        return self.snapshot()["delete"]

    @property
    def head(self) -> int:
        return self.snapshot()["head"]

    @property
    def retries(self) -> int:
        return self.snapshot()["retries"]


# Rules for storage keys: '/'-separated, relative to the root, the same on every storage.

TEMP_PREFIX = ".trnpipe-tmp-"


def is_temp(name: str) -> bool:
    """True for the last part of a name that only a writer may see."""
    return name.startswith(TEMP_PREFIX)


def check_key(key: str) -> str:
    """The key itself. ConfigError when it is empty, absolute, or has an empty, '.', '..' or temporary part."""
    parts = key.split("/")
    if any(part in ("", ".", "..") or is_temp(part) or "\0" in part for part in parts):
        raise ConfigError(
            f"storage key {key!r}",
            expected="parts joined by '/', none of them empty, '.', '..' or temporary",
            next_command="check the names in the settings that make up this key",
        )
    return key


def folder_key(prefix: str) -> str:
    """A prefix without slashes at its ends, checked; '' stands for the root."""
    stripped = prefix.strip("/")
    return check_key(stripped) if stripped else ""


def join_key(prefix: str, name: str) -> str:
    """`prefix/name`, or `name` under the root."""
    return f"{prefix.strip('/')}/{name}" if prefix.strip("/") else name


# The protocol has a method named list, which hides the type inside the class.
Names = list[str]


@dataclass(frozen=True)
class ObjectStat:
    """What is known of an object without reading it. `etag` changes with the content."""

    key: str
    size_bytes: int
    etag: str


class Storage(Protocol):
    """Objects under one root URI. Keys are '/'-separated and relative to it; a prefix is a folder, '' the root.

    Every write is atomic: a reader sees the old object, the new one or none. Errors: KeyNotFound for a missing key,
    ConfigError for rights and names, DiskFull and TransientError when another try may help, Preempted when stopped.
    """

    @property
    def root(self) -> str: ...
    @property
    def stop(self) -> StopSignal: ...
    @property
    def requests(self) -> RequestCounts: ...

    def uri(self, key: str) -> str: ...
    def local_path(self, key: str) -> Path | None:
        """The real path under file://, for memory maps; None elsewhere."""

    def stat(self, key: str) -> ObjectStat | None: ...
    def list(self, prefix: str) -> Iterator[ObjectStat]:
        """All objects below the folder `prefix`, sorted by key (UTF-8 bytes)."""

    def list_dirs(self, prefix: str) -> Names:
        """Names of the folders directly below `prefix` that hold an object, sorted."""

    def read_bytes(self, key: str) -> bytes: ...
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """At most `length` bytes from `start`; shorter only at the end of the object."""

    def open_read(self, key: str) -> BinaryIO:
        """A seekable, buffered reader; on S3 ranged requests of at least 8 MiB."""

    def write_bytes(self, key: str, data: bytes) -> None: ...
    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Create; False when the key exists. Of racing writers exactly one gets True."""

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        """Replace; False when the object is missing or its etag is another one."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; missing ones are fine."""

    def delete_prefix(self, prefix: str) -> None:
        """Remove a folder, manifests first, so that a kill half way leaves nothing committed."""

    def upload(self, local: Path, key: str) -> None: ...
    def download(self, key: str, local: Path) -> None: ...
    def upload_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        """Put `local_dir/name` at `prefix/name` for every name, in parallel."""

    def download_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        """Get `prefix/name` into `local_dir/name` for every name, in parallel."""


def open_storage(uri: str, *, retry: RetryPolicy | None = None, stop: StopSignal | None = None) -> Storage:
    """The storage of a root URI: `s3://bucket/prefix`, `file:///folder` or a plain path.

    Raises ConfigError for another scheme, a missing bucket, no credentials, or a root that is a file.
    Text of a rejected URI is not repeated in the message: it may hold a password.
    """
    stop = stop or StopSignal()
    if "://" not in uri:
        return _open_local(uri, stop)
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return _open_local(uri.split("://", 1)[1].removeprefix("localhost"), stop)
    if parts.scheme == "s3":
        # boto3 takes 0.3 s to import; local runs need not pay it.
        from pipeline.io.s3 import open_s3

        return open_s3(uri, retry=retry or RetryPolicy(), stop=stop)
    raise ConfigError(
        f"storage URI with scheme {parts.scheme!r}" + (" and a host name" if parts.scheme == "file" else ""),
        expected="s3://bucket/prefix, file:///folder or a plain path",
        next_command="correct the URI in the settings",
    )


def _open_local(path: str, stop: StopSignal) -> Storage:
    from pipeline.io.local import LocalStorage

    if not path:
        raise ConfigError("an empty storage URI", expected="s3://bucket/prefix, file:///folder or a plain path")
    folder = Path(path).expanduser().absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"file://{folder} is a file", expected="a folder", next_command="name its folder instead")
    return LocalStorage(folder, stop=stop)
