"""A common interface to store objects on `file://` and `s3://`.

Use `open_storage` to open a URI. This module also contains the implementation for local storage.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar
from urllib.parse import urlsplit

import xxhash
from pydantic import TypeAdapter, ValidationError

from pipeline.core.errors import ConfigError, DataError, TransientError, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.paths import user_path
from pipeline.io.requests import RetryPolicy, run_parallel


class KeyNotFound(DataError):
    """Raised if a required key doesn't exist."""


class DiskFull(TransientError):
    """Raised if the file system is full or a quota or file size limit is exceeded, after staged files are removed."""


FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
MISSING_ERRNOS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR})
DENIED_ERRNOS = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOLCK})
# For these operations "no such file" means that the key doesn't exist. For all others, the target folder is missing.
READING = frozenset({"reading", "checking", "listing"})


def key_not_found(uri: str) -> KeyNotFound:
    """Return the error for a key that doesn't exist."""
    return KeyNotFound(f"{uri} does not exist", expected="an existing object", next_command="check the URI")


def translate_os_error(error: OSError, doing: str, uri: str) -> Exception:
    """Translate an OSError that was raised while `doing` something with `uri` to a TrnpipeError."""
    name = errno.errorcode.get(error.errno or 0, type(error).__name__)
    if error.errno in FULL_ERRNOS:
        return DiskFull(
            f"no space left while {doing} {uri} ({name})",
            expected="free space on that file system",
            next_command=f"check df -h; free some space or move {uri}, then run the same command again",
        )
    if error.errno in MISSING_ERRNOS and doing in READING:
        return key_not_found(uri)
    if error.errno in DENIED_ERRNOS | MISSING_ERRNOS:
        return ConfigError(
            f"error while {doing} {uri}: {name}",
            expected=f"a file or folder that this user can read{'' if doing in READING else ' and write'}",
            next_command="check its permissions with ls -ld, or choose a different file or folder",
        )
    return TransientError(
        f"error while {doing} {uri}: {error.strerror} ({name})",
        expected="a healthy file system",
        next_command="run the same command again; if it fails again, check dmesg for disk errors",
    )


@contextmanager
def os_errors(doing: str, uri: str) -> Iterator[None]:
    """Translate an OSError that is raised inside the context, see `translate_os_error`."""
    try:
        yield
    except OSError as error:
        raise translate_os_error(error, doing, uri) from error


# Keys are separated by '/' and relative to the root. The rules are the same for all kinds of storage.


def check_key(key: str) -> str:
    """Verify that a key is valid and return it.

    Raises ConfigError if the key is empty or absolute, or if one of its parts is empty, '.', '..' or a temp file.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") or atomic.is_temp(part) or "\0" in part for part in parts):
        raise ConfigError(
            f"invalid storage key {key!r}",
            expected="a relative path without empty parts, '.', '..' or names of temp files",
            next_command="check the settings that this key is composed of",
        )
    return key


def folder_key(prefix: str) -> str:
    """Strip leading and trailing slashes from a prefix and verify it. An empty prefix is the root."""
    stripped = prefix.strip("/")
    return check_key(stripped) if stripped else ""


def join_key(prefix: str, name: str) -> str:
    """Return `prefix/name`, or just `name` if the prefix is the root."""
    return f"{prefix.strip('/')}/{name}" if prefix.strip("/") else name


HEAD_BYTES = 512
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def check_downloaded(head: bytes, where: str, error: type[TrnpipeError]) -> None:
    """Raise an error of class `error` if the user did not download a file correctly.

    Given the first HEAD_BYTES of the file, this detects a Git LFS pointer, a web page, and an empty file.
    """
    seen, remedy = "", "download it again"
    if head.startswith(_LFS_POINTER):
        seen, remedy = "is a Git LFS pointer, not the actual file", "run git lfs pull in the cloned repository"
    elif not head:
        seen = "is empty"
    elif head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        seen, remedy = "is a web page", "download the file itself (on Hugging Face, use /resolve/ instead of /blob/)"
    if seen:
        raise error(f"{where} {seen}", expected="the content of the file", next_command=remedy)


# The protocol has a method named `list`, which shadows the type inside the class.
Names = list[str]


@dataclass(frozen=True)
class ObjectStat:
    """The metadata of an object. Its `etag` changes whenever the content changes."""

    key: str
    size_bytes: int
    etag: str
    age_s: float | None = field(default=None, compare=False)
    """Seconds since the object was written, according to the clock of S3. This is None for local storage."""


class Storage(Protocol):
    """A collection of objects under a root URI.

    Keys are separated by '/' and relative to the root. A prefix is the key of a folder, or empty for the root. All
    writes are atomic, so readers never see a partially written object.

    Methods raise KeyNotFound if a key doesn't exist, ConfigError for missing permissions and invalid names, DiskFull or
    TransientError if a retry may help, and Preempted once `stop` is set.
    """

    @property
    def root(self) -> str: ...
    @property
    def stop(self) -> StopSignal: ...

    def uri(self, key: str) -> str: ...
    def local_path(self, key: str) -> Path | None:
        """Return the local path of a key, for example to map it into memory. Returns None on S3."""

    def stat(self, key: str) -> ObjectStat | None: ...
    def list(self, prefix: str) -> Iterator[ObjectStat]:
        """Yield all objects in a folder and its subfolders, sorted by the UTF-8 bytes of their keys."""

    def list_dirs(self, prefix: str) -> Names:
        """Return the sorted names of all folders directly in a folder, unless they are empty."""

    def read_bytes(self, key: str) -> bytes: ...
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Return `length` bytes starting at `start`, or fewer if the object ends before that."""

    def open_read(self, key: str) -> BinaryIO:
        """Open an object as a seekable, buffered file. On S3, this reads at least 8 MiB per request."""

    def write_bytes(self, key: str, data: bytes) -> None: ...
    def write_if_absent(self, key: str, data: bytes) -> bool:
        """Create an object, or return False if the key already exists.

        If several writers race to create the same object, exactly one of them gets True.
        """

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        """Replace an object, or return False if it doesn't exist or if its etag has changed."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Keys that don't exist are ignored."""

    def delete_prefix(self, prefix: str) -> None:
        """Delete a folder. Manifests are deleted first, so that a partially deleted artifact is never valid."""

    def upload(self, local: Path, key: str) -> None: ...
    def download(self, key: str, local: Path) -> None: ...
    def upload_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        """Upload `local_dir/name` to `prefix/name` for all names in parallel."""

    def download_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        """Download `prefix/name` to `local_dir/name` for all names in parallel."""


# Storage on a local file system.

# Up to this size, the etag is a hash of the content, as on S3. Hashing larger files for every listing would be slow.
ETAG_HASH_MAX_BYTES = 8 * 2**20
NUM_COPY_THREADS = 4


class LocalStorage:
    """Storage in a local folder. `folder` must be an absolute path, and the first write creates it."""

    def __init__(self, folder: Path, *, stop: StopSignal) -> None:
        self.folder = folder
        self.root = f"file://{folder}"
        self.stop = stop

    def uri(self, key: str) -> str:
        return f"file://{self.folder / key}"

    def local_path(self, key: str) -> Path:
        return self.folder / check_key(key) if key else self.folder

    def stat(self, key: str) -> ObjectStat | None:
        path = self.local_path(check_key(key))
        with os_errors("checking", self.uri(key)):
            return _stat(key, path)

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        folder = folder_key(prefix)
        with os_errors("listing", self.uri(folder)):
            paths = {join_key(folder, name): path for name, path in _walk(self.local_path(folder))}
            for key in sorted(paths, key=os.fsencode):
                if stat := _stat(key, paths[key]):
                    yield stat

    def list_dirs(self, prefix: str) -> Names:
        folder = self.local_path(folder_key(prefix))
        with os_errors("listing", self.uri(prefix)):
            names = [entry.name for entry in _scan(folder) if entry.is_dir()]
            return sorted((name for name in names if any(_walk(folder / name))), key=os.fsencode)

    def read_bytes(self, key: str) -> bytes:
        with os_errors("reading", self.uri(key)), self.open_read(key) as file:
            return file.read()

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with os_errors("reading", self.uri(key)), self.open_read(key) as file:
            file.seek(start)
            return file.read(length)

    def open_read(self, key: str) -> BinaryIO:
        with os_errors("reading", self.uri(key)):
            return self.local_path(check_key(key)).open("rb")

    def write_bytes(self, key: str, data: bytes) -> None:
        path = self.local_path(check_key(key))
        with os_errors("writing", self.uri(key)):
            atomic.write_bytes_atomic(path, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        path = self.local_path(check_key(key))
        with os_errors("writing", self.uri(key)):
            return False if path.exists() else atomic.create_atomic(path, data)

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        path = self.local_path(check_key(key))
        with os_errors("writing", self.uri(key)):
            if not path.parent.is_dir():
                return False
            with atomic.exclusive(path.parent, self.stop):
                stat = _stat(key, path)
                if stat is None or stat.etag != etag:
                    return False
                atomic.write_bytes_atomic(path, data)
                return True

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self.local_path(check_key(key))
            with os_errors("deleting", self.uri(key)):
                if path.is_file() or path.is_symlink():
                    path.unlink(missing_ok=True)

    def delete_prefix(self, prefix: str) -> None:
        folder = self.local_path(check_key(folder_key(prefix)))
        # A different worker may delete the folder at the same time, so ignore FileNotFoundError.
        with os_errors("deleting", self.uri(prefix)), suppress(FileNotFoundError):
            if folder.is_dir():
                atomic.remove_tree(folder)

    def upload(self, local: Path, key: str) -> None:
        with os_errors("reading", f"file://{local}"):
            local.open("rb").close()
        path = self.local_path(check_key(key))
        with os_errors("writing", self.uri(key)):
            atomic.write_atomic(path, lambda file: atomic.copy_into(local, file, self.stop))

    def download(self, key: str, local: Path) -> None:
        source = self.local_path(check_key(key))
        if not source.is_file():
            raise key_not_found(self.uri(key))
        with os_errors("writing", f"file://{local}"):
            atomic.write_atomic(local, lambda file: atomic.copy_into(source, file, self.stop))

    def upload_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        self._each(lambda name: self.upload(local_dir / name, join_key(prefix, name)), names, "uploading")

    def download_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        self._each(lambda name: self.download(join_key(prefix, name), local_dir / name), names, "downloading")

    def _each(self, call: Callable[[str], None], names: Iterable[str], doing: str) -> None:
        run_parallel(call, list(names), num_threads=NUM_COPY_THREADS, stop=self.stop, doing=doing)


def _stat(key: str, path: Path) -> ObjectStat | None:
    try:
        stat = path.stat()
        if not path.is_file():
            return None
        if stat.st_size <= ETAG_HASH_MAX_BYTES:
            data = path.read_bytes()
            return ObjectStat(key, len(data), xxhash.xxh3_128_hexdigest(data))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ObjectStat(key, stat.st_size, f"{stat.st_size:x}-{stat.st_mtime_ns:x}-{stat.st_ino:x}")


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder, excluding temp files. Returns an empty list if the folder doesn't exist."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not atomic.is_temp(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(folder: Path, parents: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """Yield the relative key and the path of all files in a folder and its subfolders.

    Symbolic links are followed, but a link to a parent folder is skipped to avoid an infinite loop.
    """
    real = os.path.realpath(folder)
    if real in parents:
        return
    for entry in _scan(folder):
        if entry.is_dir():
            for name, path in _walk(Path(entry.path), parents | {real}):
                yield f"{entry.name}/{name}", path
        elif entry.is_file():
            yield entry.name, Path(entry.path)


def open_storage(uri: str, *, retry: RetryPolicy | None = None, stop: StopSignal | None = None) -> Storage:
    """Open the storage at a URI such as `s3://bucket/prefix` or `file:///folder`, or at a plain path.

    Raises ConfigError if the scheme is not supported, if the bucket or the credentials are missing, or if the root is a
    file. Note that error messages don't contain an invalid URI, because it may include a password.
    """
    stop = stop or StopSignal()
    if start := re.match(r"(?:s3|file):/?(?!/)", uri):
        raise ConfigError(
            f"a storage URI begins with {start[0]}",
            expected="s3://bucket/prefix, file:///folder or a plain path",
            next_command="correct the URI in the settings",
        )
    if "://" not in uri:
        return _open_local(uri, stop)
    parts = urlsplit(uri)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return _open_local(uri.split("://", 1)[1].removeprefix("localhost"), stop)
    if parts.scheme == "s3":
        # Import this lazily, because boto3 takes 0.3 s to import and local runs don't need it.
        from pipeline.io.s3 import open_s3

        return open_s3(uri, retry=retry or RetryPolicy(), stop=stop)
    raise ConfigError(
        "the file:// URI has a host name"
        if parts.scheme == "file"
        else f"unsupported scheme {parts.scheme!r} in a storage URI",
        expected="s3://bucket/prefix, file:///folder or a plain path",
        next_command="correct the URI in the settings",
    )


def _open_local(path: str, stop: StopSignal) -> Storage:
    if not path:
        raise ConfigError(
            "the storage URI is empty",
            expected="s3://bucket/prefix, file:///folder or a plain path",
            next_command="--workspace FOLDER",
        )
    folder = user_path(path)
    with os_errors("opening", f"file://{folder}"):
        is_file = folder.exists() and not folder.is_dir()
    if is_file:
        raise ConfigError(f"file://{folder} is a file", expected="a folder", next_command="use its parent instead")
    return LocalStorage(folder, stop=stop)


def open_parent(text: str, *, retry: RetryPolicy, stop: StopSignal, follow_links: bool = False) -> tuple[Storage, str]:
    """Open the parent folder of a path or URI. Return its storage and the name of the file or folder in it.

    Set `follow_links` for writing, so that symbolic links are resolved. When reading, links are not resolved, so that
    the name is the name of the link. Raises ConfigError if the path or URI is invalid.
    """
    path = text.removeprefix("file://") if text.startswith("file:///") else text
    if path and "://" not in path:
        local = user_path(path)
        path = str(local.resolve()) if follow_links else os.path.abspath(local)  # noqa: PTH100 - resolve() follows links
    path = path.rstrip("/")
    root, _, name = path.rpartition("/")
    if not name or path.endswith(":") or root.endswith(":/"):  # this is a root, just a scheme, or a whole bucket
        raise ConfigError(
            f"{text!r} does not name a folder or file",
            expected="a path, file:///folder/name or s3://bucket/folder/name",
            next_command="add the name of a folder",
        )
    return open_storage(root or "/", retry=retry, stop=stop), check_key(name)


T = TypeVar("T")


def read_record(
    storage: Storage, key: str, kind: type[T] | TypeAdapter[T], description: str, writer: str, *, next_command: str = ""
) -> T | None:
    """Read and validate a record, or return None if it doesn't exist. Raises DataError if it is invalid.

    Args:
        storage: the storage that contains the record.
        key: key of the record.
        kind: class of the record, or a type adapter for records of another form.
        description: description of the record for the error message, such as "a stage result".
        writer: the command that writes the record, such as "trnpipe evaluate".
        next_command: how to fix an invalid record (default: delete it and run the writer again).
    """
    parse: Callable[[bytes], T] = getattr(kind, "model_validate_json" if isinstance(kind, type) else "validate_json")
    try:
        return parse(storage.read_bytes(key))
    except KeyNotFound:
        return None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field_name = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{storage.uri(key)} is not {description}: {field_name + ': ' if field_name else ''}{first['msg']}",
            expected=f"a file written by {writer}",
            next_command=next_command or f"delete it and run {writer} again",
        ) from error


MAX_UPDATES = 20


def update_file(storage: Storage, key: str, change: Callable[[], bytes | None], next_command: str) -> None:
    """Write what `change` returns, unless that is None, so that no change of another process is lost.

    `change` reads the current file. It is called again if another process has written the file meanwhile. Raises
    TransientError if this keeps happening.
    """
    for _ in range(MAX_UPDATES):
        stat, data = storage.stat(key), change()
        if data is None or (
            storage.write_if_match(key, data, stat.etag) if stat else storage.write_if_absent(key, data)
        ):
            return
    raise TransientError(
        f"{storage.uri(key)} was changed {MAX_UPDATES} times by other processes while it was updated",
        next_command=next_command,
    )


def list_names(storage: Storage, prefix: str) -> set[str]:
    """Return the names of all files directly in a folder.

    For local storage, this is faster than `Storage.list`, which reads the files to compute their etags.
    """
    folder = storage.local_path(prefix)
    if folder is not None:
        try:
            return {path.name for path in folder.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return set()
    cut = len(join_key(prefix, ""))
    return {stat.key[cut:] for stat in storage.list(prefix)}
