"""S3 in memory behind the product's S3Storage, which therefore retries, compares and translates as it does in AWS.

Requests are atomic and strongly consistent, as the S3 user guide promises. A listing of several pages is not: other
processes may write between two pages.
"""

import io
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import xxhash

from pipeline.core.stop import StopSignal
from pipeline.io.requests import RetryPolicy
from pipeline.io.s3 import S3Storage
from pipeline.io.s3_client import S3Client, is_retryable
from pipeline.io.storage import join_key
from tests.jobs.targets.faults import client_error
from tests.simulation.faults import Service

BUCKET, PREFIX = "bucket", "relevance"
ROOT = f"s3://{BUCKET}/{PREFIX}"
T = TypeVar("T")
_MODIFIED = datetime(2026, 11, 20, tzinfo=UTC)
_missing = partial(client_error, "NoSuchKey", status=404)
_changed = partial(client_error, "PreconditionFailed", status=412)


@dataclass
class Stored:
    """An object."""

    data: bytes
    metadata: dict[str, str]
    etag: str = field(init=False)

    def __post_init__(self) -> None:
        self.etag = xxhash.xxh3_64_hexdigest(self.data)


class FakeS3:
    """One bucket, behind boto3's client. `on_write` and `on_delete` see every change before it is made."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.objects = dict[str, Stored]()
        self._keys = list[str]()
        self.on_write: Callable[[str, bytes, bytes | None], object] = lambda key, data, before: None
        self.on_delete: Callable[[str], object] = lambda key: None

    def head_object(self, *, Bucket: str, Key: str) -> dict[str, Any]:
        def head() -> dict[str, Any]:
            stored = self._get(Key)
            return {
                "ContentLength": len(stored.data),
                "ETag": stored.etag,
                "LastModified": _MODIFIED,
                "Metadata": stored.metadata,
                "ResponseMetadata": {"HTTPHeaders": {}},
            }

        return cast(dict[str, Any], self.service.request("head", Key, head))

    def get_object(self, *, Bucket: str, Key: str, Range: str = "", IfMatch: str = "") -> dict[str, Any]:
        def get() -> dict[str, Any]:
            stored = self._get(Key)
            if IfMatch and IfMatch != stored.etag:
                raise _changed()
            data, more = stored.data, {}
            if Range:
                first, _, last = Range.removeprefix("bytes=").partition("-")
                data = data[int(first) : int(last) + 1]
                more = {"ContentRange": f"bytes {first}-{last}/{len(stored.data)}"}
            return {"Body": io.BytesIO(data), "ContentLength": len(data), "ETag": stored.etag, **more}

        return cast(dict[str, Any], self.service.request("get", Key, get))

    def put_object(
        self,
        *,
        Bucket: str,
        Key: str,
        Body: bytes,
        Metadata: dict[str, str] | None = None,
        IfNoneMatch: str = "",
        IfMatch: str = "",
    ) -> None:
        def put() -> None:
            before = self.objects.get(Key)
            if IfNoneMatch and before is not None:
                raise _changed()
            if IfMatch and before is None:
                raise _missing()
            if IfMatch and before is not None and before.etag != IfMatch:
                raise _changed()
            self.on_write(Key.removeprefix(f"{PREFIX}/"), Body, before.data if before else None)
            if before is None:
                insort(self._keys, Key)
            self.objects[Key] = Stored(Body, Metadata or {})

        self.service.request("put", Key, put)

    def delete_objects(self, *, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        keys = [item["Key"] for item in Delete["Objects"]]

        def delete() -> dict[str, Any]:
            for key in keys:
                if key in self.objects:
                    self.on_delete(key.removeprefix(f"{PREFIX}/"))
                    del self.objects[key]
                    del self._keys[bisect_left(self._keys, key)]
            return {}

        return cast(dict[str, Any], self.service.request("delete", " ".join(keys), delete))

    def list_objects_v2(
        self, *, Bucket: str, Prefix: str, Delimiter: str = "", ContinuationToken: str = ""
    ) -> dict[str, Any]:
        def page() -> dict[str, Any]:
            size = self.service.weather.page_size
            place = bisect_left(self._keys, max(Prefix, ContinuationToken))
            contents, folders = list[dict[str, Any]](), dict[str, None]()
            while place < len(self._keys) and (key := self._keys[place]).startswith(Prefix):
                if len(contents) + len(folders) == size:
                    more = {"IsTruncated": True, "NextContinuationToken": key}
                    break
                name, found, _ = key[len(Prefix) :].partition(Delimiter or "\0")
                if found:
                    folder = f"{Prefix}{name}/"
                    folders[folder] = None
                    place = bisect_left(self._keys, folder[:-1] + chr(ord("/") + 1))
                else:
                    stored = self.objects[key]
                    item = {"Key": key, "Size": len(stored.data), "ETag": stored.etag, "LastModified": _MODIFIED}
                    contents.append(item)
                    place += 1
            else:
                more = {}
            return {
                "Contents": contents,
                "CommonPrefixes": [{"Prefix": folder} for folder in folders],
                "ResponseMetadata": {"HTTPHeaders": {}},
                **more,
            }

        return cast(dict[str, Any], self.service.request("list", Prefix, page))

    def restore(self, objects: dict[str, bytes]) -> None:
        """Store objects without a request."""
        self.objects = {f"{PREFIX}/{key}": Stored(data, {}) for key, data in objects.items()}
        self._keys = sorted(self.objects)

    def read(self, key: str) -> bytes | None:
        """Return an object without a request, for the invariants."""
        stored = self.objects.get(f"{PREFIX}/{key}")
        return stored.data if stored else None

    def keys(self, prefix: str) -> list[str]:
        """Return the keys in a folder without a request, for the invariants."""
        full = f"{PREFIX}/{prefix}"
        first = bisect_left(self._keys, full)
        last = bisect_left(self._keys, full[:-1] + chr(ord(full[-1]) + 1))
        return [key[len(PREFIX) + 1 :] for key in self._keys[first:last]]

    def _get(self, key: str) -> Stored:
        if (stored := self.objects.get(key)) is None:
            raise _missing()
        return stored


class _Client(S3Client):
    """The product's client over the fake."""

    def __init__(self, fake: FakeS3, stop: StopSignal) -> None:
        self._fake = fake
        super().__init__(RetryPolicy(), stop)

    def attempt(self, doing: str, uri: str, request: Callable[[Any], T]) -> T:
        """Send a request once, and leave its retries to the product, whose loop is slow even if nothing fails."""
        self.stop.raise_if_set(doing)
        try:
            return request(self._fake)
        except Exception as error:
            if not is_retryable(error):
                raise
            first = [error]

        def again(raw: Any) -> T:
            if first:
                raise first.pop()
            return request(raw)

        return super().attempt(doing, uri, again)

    def _connect(self) -> Any:
        return self._fake


class MemoryFolder:
    """A local folder with the files of a checkpoint, as far as commit_dir uses it."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files

    def is_dir(self) -> bool:
        return True

    def rglob(self, pattern: str) -> list["_MemoryFile"]:
        return [_MemoryFile(name, data) for name, data in self.files.items()]

    def __truediv__(self, name: str) -> "_MemoryFile":
        return _MemoryFile(name, self.files[name])


class _MemoryFile:
    def __init__(self, name: str, data: bytes) -> None:
        self.name, self.data, self.parts, self.st_size = name, data, (name,), len(data)

    def is_file(self) -> bool:
        return True

    def stat(self) -> "_MemoryFile":
        return self

    def relative_to(self, folder: MemoryFolder) -> "_MemoryFile":
        return self

    def as_posix(self) -> str:
        return self.name

    def open(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.data)


class SimulatedStorage(S3Storage):
    """The product's storage, except that files of a MemoryFolder are uploaded without the threads of s3transfer."""

    def __init__(self, fake: FakeS3, stop: StopSignal) -> None:
        super().__init__(_Client(fake, stop), BUCKET, PREFIX)

    def upload_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        for name in names:
            self.write_bytes(join_key(prefix, name), cast(MemoryFolder, local_dir).files[name])
