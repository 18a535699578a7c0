"""Storage on a file system."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from pipeline.core.stop import StopSignal
from pipeline.io import atomic, storage
from pipeline.io.commit import hash_bytes
from pipeline.io.requests import run_parallel
from pipeline.io.storage import Names, ObjectStat, key_not_found, os_errors

# Up to this size an etag is the hash of the content, as for S3; hashing data files at every listing would be slow.
ETAG_HASH_MAX_BYTES = 8 * 2**20
NUM_COPY_THREADS = 4


class LocalStorage:
    """`file://` storage rooted at an absolute folder, which the first write creates."""

    def __init__(self, folder: Path, *, stop: StopSignal) -> None:
        self.folder = folder
        self.root = f"file://{folder}"
        self.stop = stop

    def uri(self, key: str) -> str:
        return f"file://{self.folder / key}"

    def local_path(self, key: str) -> Path:
        return self.folder / storage.check_key(key) if key else self.folder

    def stat(self, key: str) -> ObjectStat | None:
        path = self.local_path(storage.check_key(key))
        with os_errors("looking at", self.uri(key)):
            return _stat(key, path)

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        folder = storage.folder_key(prefix)
        with os_errors("listing", self.uri(folder)):
            found = {storage.join_key(folder, name): path for name, path in _walk(self.local_path(folder))}
            for key in sorted(found, key=os.fsencode):
                if stat := _stat(key, found[key]):
                    yield stat

    def list_dirs(self, prefix: str) -> Names:
        folder = self.local_path(storage.folder_key(prefix))
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
            return self.local_path(storage.check_key(key)).open("rb")

    def write_bytes(self, key: str, data: bytes) -> None:
        path = self.local_path(storage.check_key(key))
        with os_errors("writing", self.uri(key)):
            atomic.write_bytes_atomic(path, data)

    def write_if_absent(self, key: str, data: bytes) -> bool:
        path = self.local_path(storage.check_key(key))
        with os_errors("writing", self.uri(key)):
            return False if path.exists() else atomic.create_atomic(path, data)

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        path = self.local_path(storage.check_key(key))
        with os_errors("writing", self.uri(key)):
            if not path.parent.is_dir():
                return False
            with atomic.exclusive(path.parent, self.stop):
                stat = _stat(key, path)
                if stat is None or stat.etag != etag:
                    return False
                atomic.write_bytes_atomic(path, data)
                return True

    def delete(self, keys_: Iterable[str]) -> None:
        for key in keys_:
            path = self.local_path(storage.check_key(key))
            with os_errors("deleting", self.uri(key)):
                if path.is_file() or path.is_symlink():
                    path.unlink(missing_ok=True)

    def delete_prefix(self, prefix: str) -> None:
        folder = self.local_path(storage.check_key(storage.folder_key(prefix)))
        with os_errors("deleting", self.uri(prefix)), suppress(FileNotFoundError):  # another worker deletes it too
            if folder.is_dir():
                atomic.remove_tree(folder)

    def upload(self, local: Path, key: str) -> None:
        with os_errors("reading", f"file://{local}"):
            local.open("rb").close()
        path = self.local_path(storage.check_key(key))
        with os_errors("writing", self.uri(key)):
            atomic.write_atomic(path, lambda file: atomic.copy_into(local, file, self.stop))

    def download(self, key: str, local: Path) -> None:
        source = self.local_path(storage.check_key(key))
        if not source.is_file():
            raise key_not_found(self.uri(key))
        with os_errors("writing", f"file://{local}"):
            atomic.write_atomic(local, lambda file: atomic.copy_into(source, file, self.stop))

    def upload_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        self._each(lambda name: self.upload(local_dir / name, storage.join_key(prefix, name)), names, "uploading")

    def download_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        self._each(lambda name: self.download(storage.join_key(prefix, name), local_dir / name), names, "downloading")

    def _each(self, call: Callable[[str], None], names: Iterable[str], doing: str) -> None:
        run_parallel(call, list(names), num_threads=NUM_COPY_THREADS, stop=self.stop, doing=doing)


def _stat(key: str, path: Path) -> ObjectStat | None:
    try:
        found = path.stat()
        if not path.is_file():
            return None
        if found.st_size <= ETAG_HASH_MAX_BYTES:
            data = path.read_bytes()
            return ObjectStat(key, len(data), hash_bytes(data))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return ObjectStat(key, found.st_size, f"{found.st_size:x}-{found.st_mtime_ns:x}-{found.st_ino:x}")


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """Visible entries of a folder; none when it is missing."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not storage.is_temp(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _walk(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[tuple[str, Path]]:
    """(relative key, path) of every file below; links are followed, but not in a circle."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for entry in _scan(folder):
        if entry.is_dir():
            for name, path in _walk(Path(entry.path), above | {real}):
                yield f"{entry.name}/{name}", path
        elif entry.is_file():
            yield entry.name, Path(entry.path)
