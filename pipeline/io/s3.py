"""Storage on S3 and compatible services.

Note that S3 writes are always atomic, which means that an object is never partially visible.
"""

import io
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from botocore.exceptions import ClientError
from s3transfer.manager import TransferConfig, TransferManager
from s3transfer.subscribers import BaseSubscriber
from s3transfer.utils import OSUtils

from pipeline.core.errors import ConfigError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.progress import Advance, progress
from pipeline.core.stop import StopSignal
from pipeline.io import atomic, storage
from pipeline.io.requests import RetryPolicy
from pipeline.io.s3_client import (
    S3_ERRORS,
    PartialBody,
    S3Client,
    error_code,
    http_status,
    is_missing,
    is_precondition_failed,
    missing_bucket,
    translate,
)
from pipeline.io.storage import Names, ObjectStat, key_not_found, os_errors

DELETE_BATCH = 1000  # the limit of DeleteObjects
WRITER_TAG = "trnpipe-writer"
MIB = 2**20
BODY_BLOCK_BYTES = MIB
PART_BYTES, NUM_TRANSFER_THREADS = 16 * MIB, 8
"""S3 requires parts of at least 5 MiB. A download needs memory for one part per thread."""


# A seekable file that is read with ranged GET requests.

MIN_RANGE_BYTES = 8 * 2**20


class RangeFile(io.RawIOBase):
    """An unbuffered reader that sends one request per read."""

    def __init__(self, read_range: Callable[[int, int], bytes], size_bytes: int) -> None:
        super().__init__()
        self._read_range = read_range
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        if origin + offset < 0:
            raise ValueError(f"negative seek position {origin + offset}")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = min(len(view), self._size_bytes - self._position)
        if length <= 0:
            return 0
        data = self._read_range(self._position, length)
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def checked_length(data: bytes, expected: int) -> bytes:
    """Return `data` if it has the expected length. Otherwise, raise PartialBody, which causes a retry."""
    if len(data) != expected:
        raise PartialBody(f"{len(data)} of {expected} bytes")
    return data


# Like boto3, we use s3transfer to transfer files, because it handles parallel parts and aborts failed uploads. However,
# its requests go through S3Client, because the retries of boto3 have no total deadline and can't be interrupted by the
# stop signal.


class _TransferClient:
    """A wrapper around S3Client with the interface of a boto3 client, which s3transfer expects."""

    def __init__(self, client: S3Client) -> None:
        self._client, self.meta = client, client.raw.meta

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        """Return an operation that sends data, such as put_object or upload_part.

        If the request is retried, the body is sent again from its start.
        """

        def send(**request: Any) -> Any:
            def attempt(raw: Any) -> Any:
                if "Body" in request:
                    request["Body"].seek(0)
                return getattr(raw, operation)(**request)

            return self._client.call("writing", _uri(request), attempt)

        return send

    def get_object(self, **request: Any) -> dict[str, Any]:
        """Get a part of an object and read it into memory, so that it is requested again if the connection breaks."""

        def get(raw: Any) -> dict[str, Any]:
            response = raw.get_object(**request)
            return {**response, "Body": io.BytesIO(_body(response, self._client.stop))}

        return self._client.call("reading", _uri(request), get)

    def complete_multipart_upload(self, *, MpuObjectSize: int, **request: Any) -> None:
        """Complete a multipart upload, which makes the object visible.

        If S3 completes the upload but the response is lost, the retry fails with NoSuchUpload. In that case, check
        whether the object exists with the right size.
        """
        try:
            self._client.attempt("writing", _uri(request), lambda raw: raw.complete_multipart_upload(**request))
        except S3_ERRORS as error:
            location = {"Bucket": request["Bucket"], "Key": request["Key"]}
            if error_code(error) == "NoSuchUpload":
                head = self._client.call("checking", _uri(request), lambda raw: raw.head_object(**location))
                if int(head["ContentLength"]) == MpuObjectSize:
                    return
            raise translate(error, "writing", _uri(request)) from error

    def abort_multipart_upload(self, **request: Any) -> None:
        """Delete the parts that have been uploaded. This isn't retried, because the process may be killed soon."""
        self._client.raw.abort_multipart_upload(**request)


class _TransferProgress(BaseSubscriber):  # type: ignore[misc]
    """An s3transfer subscriber that reports the progress of a file and aborts its transfer once `stop` is set.

    For a download, it also ensures that all parts are from the same version of the object.
    """

    def __init__(self, advance: Advance, stop: StopSignal, doing: str, version: ObjectStat | None = None) -> None:
        self._advance, self._stop, self._doing, self._version = advance, stop, doing, version

    def on_queued(self, future: Any, **_: object) -> None:
        if self._version is not None:
            future.meta.provide_transfer_size(self._version.size_bytes)
            future.meta.provide_object_etag(self._version.etag)

    def on_progress(self, future: Any, bytes_transferred: int, **_: object) -> None:
        self._stop.raise_if_set(self._doing)
        self._advance(bytes_transferred)


class _DurableFiles(OSUtils):  # type: ignore[misc]
    """File operations for s3transfer that make downloads atomic and durable."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes, self._names = sizes, dict[str, str]()

    def get_temp_filename(self, filename: str) -> str:
        temp = str(atomic.temp_path_for(Path(filename)))
        self._names[temp] = filename
        return temp

    def open(self, filename: str, mode: str) -> BinaryIO:
        """Open and lock a temp file.

        Its space is reserved up front, so that a download fails immediately instead of after hours if the disk is full.
        """
        file = cast(BinaryIO, Path(filename).open(mode))  # noqa: SIM115 - s3transfer closes it
        atomic.mark_in_use(file.fileno())
        if size_bytes := self._sizes[self._names[filename]]:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        return file

    def rename_file(self, current_filename: str, new_filename: str) -> None:
        with Path(current_filename).open("rb") as file:
            atomic.mark_in_use(file.fileno())
            os.fsync(file.fileno())
            Path(current_filename).replace(new_filename)
        atomic.fsync_path(Path(new_filename).parent)


def _uri(request: Mapping[str, Any]) -> str:
    return f"s3://{request['Bucket']}/{request['Key']}"


def _age_s(response: Mapping[str, Any], modified: datetime) -> float | None:
    """Return the age of an object in seconds.

    This relies on the Date header of the response instead of the local clock, which may be wrong.
    """
    date = response["ResponseMetadata"]["HTTPHeaders"].get("date")
    return None if date is None else (parsedate_to_datetime(date) - modified).total_seconds()


class S3Storage:
    """Storage under `s3://bucket/prefix`."""

    def __init__(self, client: S3Client, bucket: str, prefix: str) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix
        self.root = f"s3://{storage.join_key(bucket, prefix)}" if prefix else f"s3://{bucket}"

    @property
    def stop(self) -> StopSignal:
        return self._client.stop

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def local_path(self, key: str) -> Path | None:
        return None

    def stat(self, key: str) -> ObjectStat | None:
        location = self._location(key, is_new=False)
        try:
            head = self._client.attempt("checking", self.uri(key), lambda raw: raw.head_object(**location))
        except S3_ERRORS as error:
            if is_missing(error):
                return None
            raise translate(error, "checking", self.uri(key)) from error
        return ObjectStat(key, int(head["ContentLength"]), str(head["ETag"]), _age_s(head, head["LastModified"]))

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        cut = len(self._folder(""))
        for page in self._pages(prefix):
            for item in page.get("Contents", ()):
                # S3 consoles represent an empty folder as an empty object with a key that ends in '/', so skip those.
                if item["Size"] or not item["Key"].endswith("/"):
                    age_s = _age_s(page, item["LastModified"])
                    yield ObjectStat(item["Key"][cut:], int(item["Size"]), str(item["ETag"]), age_s)

    def list_dirs(self, prefix: str) -> Names:
        cut = len(self._folder(prefix))
        pages = self._pages(prefix, Delimiter="/")
        names = (item["Prefix"][cut:].rstrip("/") for page in pages for item in page.get("CommonPrefixes", ()))
        return sorted(names, key=str.encode)  # S3 includes the '/' when sorting, so that a-b/ precedes a/

    def read_bytes(self, key: str) -> bytes:
        location = self._location(key, is_new=False)
        return self._client.call("reading", self.uri(key), lambda raw: _body(raw.get_object(**location), self.stop))

    def open_read(self, key: str) -> BinaryIO:
        stat = self._require(key)
        file = RangeFile(partial(self.read_range, key, IfMatch=stat.etag), stat.size_bytes)
        return cast(BinaryIO, io.BufferedReader(file, max(1, min(MIN_RANGE_BYTES, stat.size_bytes))))

    def write_bytes(self, key: str, data: bytes) -> None:
        location = self._location(key)
        self._client.call("writing", self.uri(key), lambda raw: raw.put_object(**location, Body=data))

    def write_if_absent(self, key: str, data: bytes) -> bool:
        return self._write_if(key, data, IfNoneMatch="*")

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        return self._write_if(key, data, IfMatch=etag)

    def delete(self, keys: Iterable[str]) -> None:
        objects = [{"Key": self._location(key)["Key"]} for key in keys]

        def remove(raw: Any) -> None:
            response = raw.delete_objects(Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True})
            for error in response.get("Errors", ()):
                # DeleteObjects returns status 200 even if it can't delete some of the keys, so raise their error here.
                raise ClientError({"Error": {"Code": error["Code"]}, "ResponseMetadata": {}}, "DeleteObjects")

        for start in range(0, len(objects), DELETE_BATCH):
            batch = objects[start : start + DELETE_BATCH]
            self._client.call("deleting", self.root, remove)

    def delete_prefix(self, prefix: str) -> None:
        storage.check_key(storage.folder_key(prefix))
        keys = [stat.key for stat in self.list(prefix)]
        manifests = {key for key in keys if key.rsplit("/", 1)[-1] == MANIFEST_NAME}
        self.delete(sorted(manifests))
        self.delete(key for key in keys if key not in manifests)

    def upload(self, local: Path, key: str) -> None:
        self._upload({key: local}, f"uploading {self.uri(key)}")

    def download(self, key: str, local: Path) -> None:
        self._download({local: self._require(key)}, f"downloading {self.uri(key)}")

    def upload_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        self._upload({storage.join_key(prefix, name): local_dir / name for name in names}, f"uploading {prefix}")

    def download_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        keys = {name: storage.join_key(prefix, name) for name in names}
        stats = {stat.key: stat for stat in self.list(prefix)} if keys else {}
        for key in keys.values():
            if key not in stats:
                raise key_not_found(self.uri(key))
        self._download({local_dir / name: stats[key] for name, key in keys.items()}, f"downloading {prefix}")

    def _upload(self, files: Mapping[str, Path], doing: str) -> None:
        sizes = {key: local.stat().st_size if local.exists() else 0 for key, local in files.items()}
        with (
            progress(doing, sum(sizes.values()), "bytes") as advance,
            self._manager(OSUtils(), PART_BYTES + 1) as manager,
        ):
            futures = {}
            for key, local in files.items():
                subscriber, size = _TransferProgress(advance, self.stop, doing), {"MpuObjectSize": sizes[key]}
                futures[local] = manager.upload(str(local), *self._location(key).values(), size, [subscriber])
            for local, future in futures.items():
                with os_errors("reading", f"file://{local}"):
                    future.result()

    def _download(self, files: Mapping[Path, ObjectStat], doing: str) -> None:
        sizes = {str(local): stat.size_bytes for local, stat in files.items()}
        with (
            progress(doing, sum(sizes.values()), "bytes") as advance,
            # Use ranged requests even for small files, because only those ensure that the version doesn't change.
            self._manager(_DurableFiles(sizes), 1) as manager,
        ):
            futures = {}
            for local, stat in files.items():
                with os_errors("writing", f"file://{local}"):
                    atomic.make_dirs(local.parent)
                subscriber = _TransferProgress(advance, self.stop, doing, stat)
                futures[local] = manager.download(*self._location(stat.key).values(), str(local), None, [subscriber])
            for local, future in futures.items():
                with os_errors("writing", f"file://{local}"):
                    future.result()

    def _manager(self, files: OSUtils, multipart_threshold: int) -> TransferManager:
        config = TransferConfig(
            multipart_threshold=multipart_threshold,
            multipart_chunksize=PART_BYTES,
            max_request_concurrency=NUM_TRANSFER_THREADS,
            max_io_queue_size=64,
            io_chunksize=BODY_BLOCK_BYTES,
            num_download_attempts=1,  # retries are handled by S3Client
        )
        return TransferManager(_TransferClient(self._client), config, files)

    def _location(self, key: str, *, is_new: bool = True) -> dict[str, str]:
        """Return the bucket and the key of an object as arguments for a request.

        Only new keys are checked for empty parts, because objects of other programs may have such keys.
        """
        storage.check_key(key if is_new else "/".join(filter(None, key.split("/"))))
        return {"Bucket": self._bucket, "Key": storage.join_key(self._prefix, key)}

    def _folder(self, prefix: str) -> str:
        """Return the S3 prefix of a folder. It ends in '/', except that the prefix of the whole bucket is empty."""
        folder = storage.join_key(self._prefix, storage.folder_key(prefix)).strip("/")
        return f"{folder}/" if folder else ""

    def _require(self, key: str) -> ObjectStat:
        stat = self.stat(key)
        if stat is None:
            raise key_not_found(self.uri(key))
        return stat

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        request = {"Bucket": self._bucket, "Prefix": self._folder(prefix), **options}
        while True:
            page = self._client.call("listing", self.uri(prefix), lambda raw: raw.list_objects_v2(**request))
            yield page
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def read_range(self, key: str, start: int, length: int, **options: str) -> bytes:
        """Return up to `length` bytes, starting at offset `start`.

        This is empty if `start` is past the end of the object, in which case S3 responds with status 416.
        """
        location = self._location(key, is_new=False)
        if length <= 0:
            return b""

        def get(raw: Any) -> bytes:
            inclusive = f"bytes={start}-{start + length - 1}"
            response = raw.get_object(**location, Range=inclusive, **options)
            total = int(str(response["ContentRange"]).rsplit("/", 1)[-1])
            return checked_length(_body(response, self.stop), min(length, total - start))

        try:
            return self._client.attempt("reading", self.uri(key), get)
        except S3_ERRORS as error:
            if http_status(error) == 416:
                return b""
            raise translate(error, "reading", self.uri(key)) from error

    def _write_if(self, key: str, data: bytes, **condition: str) -> bool:
        """Write an object if `condition` holds. Return whether it was written.

        If S3 writes the object but the response is lost, the condition fails for the retry. To detect this, the object
        carries a random tag of its writer.
        """
        location, writer = self._location(key), secrets.token_hex(8)
        attempts = 0

        def put(raw: Any) -> None:
            nonlocal attempts
            attempts += 1
            raw.put_object(**location, Body=data, Metadata={WRITER_TAG: writer}, **condition)

        try:
            self._client.attempt("writing", self.uri(key), put)
        except S3_ERRORS as error:
            if is_precondition_failed(error):
                if attempts == 1:
                    return False
                head = self._client.call("checking", self.uri(key), lambda raw: raw.head_object(**location))
                return bool(head.get("Metadata", {}).get(WRITER_TAG) == writer)
            if "IfMatch" in condition and is_missing(error):
                return False
            raise translate(error, "writing", self.uri(key)) from error
        return True


def open_s3(uri: str, *, retry: RetryPolicy, stop: StopSignal) -> S3Storage:
    """Open the storage at an s3:// URI.

    Raises ConfigError if the URI is invalid, the bucket doesn't exist, or there are no credentials.
    """
    parts = urlsplit(uri)
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            "the s3:// URI has no bucket, or it contains a user name, a port, '?' or '#'",
            expected="s3://bucket/prefix (credentials are taken from the AWS environment)",
            next_command="correct the URI in the settings",
        )
    prefix, root, client = storage.folder_key(parts.path), f"s3://{parts.netloc}", S3Client(retry, stop)
    try:
        client.attempt("opening", root, lambda raw: raw.head_bucket(Bucket=parts.netloc))
    except S3_ERRORS as error:
        if is_missing(error):
            raise missing_bucket(root) from error
        # The policy may deny HeadBucket but still allow access to the prefix, so ignore this error. If the permissions
        # really are missing, the first request that needs them fails.
        if http_status(error) != 403:
            raise translate(error, "opening", root) from error
    return S3Storage(client, parts.netloc, prefix)


def _body(response: dict[str, Any], stop: StopSignal) -> bytes:
    """Read the body of a response. `stop` is polled every MiB."""
    blocks = []
    with response["Body"] as body:
        while block := body.read(BODY_BLOCK_BYTES):
            stop.raise_if_set("reading an object")
            blocks.append(block)
    return checked_length(b"".join(blocks), int(response["ContentLength"]))
