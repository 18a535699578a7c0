"""Storage on S3 and what speaks its protocol. Every object is written whole: S3 shows it at once or not at all."""

import io
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError
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

DELETE_BATCH = 1000  # S3 limit of DeleteObjects
WRITER_TAG = "trnpipe-writer"
MIB = 2**20
BODY_BLOCK_BYTES = MIB


@dataclass(frozen=True)
class TransferSettings:
    """Part size (S3 minimum 5 MiB) and threads. 8 x 16 MiB is what a download holds in memory."""

    part_bytes: int = 16 * MIB
    num_threads: int = 8


# A seekable file over ranged GETs.

MIN_RANGE_BYTES = 8 * 2**20


class RangeFile(io.RawIOBase):
    """Raw reader: each read is one request."""

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
    """The data; PartialBody, which is retried, when it is not `expected` bytes."""
    if len(data) != expected:
        raise PartialBody(f"{len(data)} of {expected} bytes")
    return data


# Files go through s3transfer, boto3's own: parts side by side, an upload that fails is aborted. Its requests go through
# our client: boto3's retries have no total deadline and do not poll the stop signal.


class _TransferClient:
    """boto3's client as s3transfer uses it. Each request has our retry budget, and errors of our family."""

    def __init__(self, client: S3Client) -> None:
        self._client, self.meta = client, client.raw.meta

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        """put_object, create_multipart_upload, upload_part: a repeat sends its body from the start."""

        def send(**request: Any) -> Any:
            def attempt(raw: Any) -> Any:
                if "Body" in request:
                    request["Body"].seek(0)
                return getattr(raw, operation)(**request)

            return self._client.call("writing", _uri(request), attempt)

        return send

    def get_object(self, **request: Any) -> dict[str, Any]:
        """A part with its body in memory: one that breaks off is asked for again."""

        def get(raw: Any) -> dict[str, Any]:
            answer = raw.get_object(**request)
            return {**answer, "Body": io.BytesIO(_body(answer, self._client.stop))}

        return self._client.call("reading", _uri(request), get)

    def complete_multipart_upload(self, *, MpuObjectSize: int, **request: Any) -> None:
        """Make the object visible. A repeat after a lost answer finds no upload any more, but the object."""
        try:
            self._client.attempt("writing", _uri(request), lambda raw: raw.complete_multipart_upload(**request))
        except S3_ERRORS as error:
            where = {"Bucket": request["Bucket"], "Key": request["Key"]}
            if error_code(error) == "NoSuchUpload":
                found = self._client.call("looking at", _uri(request), lambda raw: raw.head_object(**where))
                if int(found["ContentLength"]) == MpuObjectSize:
                    return
            raise translate(error, "writing", _uri(request)) from error

    def abort_multipart_upload(self, **request: Any) -> None:
        """Free the parts. Once, without the retry budget: the process may be about to be killed."""
        self._client.raw.abort_multipart_upload(**request)


class _Follower(BaseSubscriber):  # type: ignore[misc]
    """Shows how far a file is, ends its transfer when stopped. A download is of exactly one version."""

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
    """Files that appear whole, and on the device, under their names."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes, self._names = sizes, dict[str, str]()

    def get_temp_filename(self, filename: str) -> str:
        temp = str(atomic.temp_path_for(Path(filename)))
        self._names[temp] = filename
        return temp

    def open(self, filename: str, mode: str) -> BinaryIO:
        """Locked as that of a living writer. Fails at once when the disk is too small, not after hours."""
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


def _age_s(answer: Mapping[str, Any], modified: datetime) -> float | None:
    """Return the seconds between `modified` and the Date of the same answer, so that no clock of ours counts."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return None if date is None else (parsedate_to_datetime(date) - modified).total_seconds()


class S3Storage:
    """`s3://bucket/prefix`."""

    def __init__(self, client: S3Client, bucket: str, prefix: str, transfer: TransferSettings | None = None) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix
        self._transfer = transfer or TransferSettings()
        self.root = f"s3://{storage.join_key(bucket, prefix)}" if prefix else f"s3://{bucket}"

    @property
    def stop(self) -> StopSignal:
        return self._client.stop

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def local_path(self, key: str) -> Path | None:
        return None

    def stat(self, key: str) -> ObjectStat | None:
        where = self._where(key, is_ours=False)
        try:
            found = self._client.attempt("looking at", self.uri(key), lambda raw: raw.head_object(**where))
        except S3_ERRORS as error:
            if is_missing(error):
                return None
            raise translate(error, "looking at", self.uri(key)) from error
        return ObjectStat(key, int(found["ContentLength"]), str(found["ETag"]), _age_s(found, found["LastModified"]))

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        cut = len(self._folder(""))
        for page in self._pages(prefix):
            for item in page.get("Contents", ()):
                # An empty object whose key ends in '/' is what consoles create to show an empty folder.
                if item["Size"] or not item["Key"].endswith("/"):
                    age_s = _age_s(page, item["LastModified"])
                    yield ObjectStat(item["Key"][cut:], int(item["Size"]), str(item["ETag"]), age_s)

    def list_dirs(self, prefix: str) -> Names:
        cut = len(self._folder(prefix))
        pages = self._pages(prefix, Delimiter="/")
        names = (item["Prefix"][cut:].rstrip("/") for page in pages for item in page.get("CommonPrefixes", ()))
        return sorted(names, key=str.encode)  # S3 sorts them with their '/', which puts a-b before a

    def read_bytes(self, key: str) -> bytes:
        where = self._where(key, is_ours=False)
        return self._client.call("reading", self.uri(key), lambda raw: _body(raw.get_object(**where), self.stop))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._read_range(key, start, length)

    def open_read(self, key: str) -> BinaryIO:
        found = self._require(key)
        file = RangeFile(partial(self._read_range, key, IfMatch=found.etag), found.size_bytes)
        return cast(BinaryIO, io.BufferedReader(file, max(1, min(MIN_RANGE_BYTES, found.size_bytes))))

    def write_bytes(self, key: str, data: bytes) -> None:
        where = self._where(key)
        self._client.call("writing", self.uri(key), lambda raw: raw.put_object(**where, Body=data))

    def write_if_absent(self, key: str, data: bytes) -> bool:
        return self._write_if(key, data, IfNoneMatch="*")

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        return self._write_if(key, data, IfMatch=etag)

    def delete(self, keys_: Iterable[str]) -> None:
        objects = [{"Key": self._where(key)["Key"]} for key in keys_]

        def remove(raw: Any) -> None:
            answer = raw.delete_objects(Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True})
            for error in answer.get("Errors", ()):
                # The request is a 200 even when single keys fail: give such a key's error its usual form.
                raise ClientError({"Error": {"Code": error["Code"]}, "ResponseMetadata": {}}, "DeleteObjects")

        for start in range(0, len(objects), DELETE_BATCH):
            batch = objects[start : start + DELETE_BATCH]
            self._client.call("deleting", self.root, remove)

    def delete_prefix(self, prefix: str) -> None:
        storage.check_key(storage.folder_key(prefix))
        found = [stat.key for stat in self.list(prefix)]
        markers = {key for key in found if key.rsplit("/", 1)[-1] == MANIFEST_NAME}
        self.delete(sorted(markers))
        self.delete(key for key in found if key not in markers)

    def upload(self, local: Path, key: str) -> None:
        self._upload({key: local}, f"uploading {self.uri(key)}")

    def download(self, key: str, local: Path) -> None:
        self._download({local: self._require(key)}, f"downloading {self.uri(key)}")

    def upload_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        self._upload({storage.join_key(prefix, name): local_dir / name for name in names}, f"uploading {prefix}")

    def download_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        keys = {name: storage.join_key(prefix, name) for name in names}
        found = {stat.key: stat for stat in self.list(prefix)} if keys else {}
        for key in keys.values():
            if key not in found:
                raise key_not_found(self.uri(key))
        self._download({local_dir / name: found[key] for name, key in keys.items()}, f"downloading {prefix}")

    def _upload(self, files: Mapping[str, Path], doing: str) -> None:
        sizes = {key: local.stat().st_size if local.exists() else 0 for key, local in files.items()}
        with (
            progress(doing, sum(sizes.values()), "bytes") as advance,
            self._manager(OSUtils(), self._transfer.part_bytes + 1) as manager,
        ):
            futures = {}
            for key, local in files.items():
                follower, size = _Follower(advance, self.stop, doing), {"MpuObjectSize": sizes[key]}
                futures[local] = manager.upload(str(local), *self._where(key).values(), size, [follower])
            for local, future in futures.items():
                with os_errors("reading", f"file://{local}"):
                    future.result()

    def _download(self, files: Mapping[Path, ObjectStat], doing: str) -> None:
        sizes = {str(local): stat.size_bytes for local, stat in files.items()}
        with (
            progress(doing, sum(sizes.values()), "bytes") as advance,
            self._manager(_DurableFiles(sizes), 1) as manager,  # ranges also of a small file: only they name a version
        ):
            futures = {}
            for local, stat in files.items():
                with os_errors("writing", f"file://{local}"):
                    atomic.make_dirs(local.parent)
                follower = _Follower(advance, self.stop, doing, stat)
                futures[local] = manager.download(*self._where(stat.key).values(), str(local), None, [follower])
            for local, future in futures.items():
                with os_errors("writing", f"file://{local}"):
                    future.result()

    def _manager(self, files: OSUtils, multipart_threshold: int) -> TransferManager:
        config = TransferConfig(
            multipart_threshold=multipart_threshold,
            multipart_chunksize=self._transfer.part_bytes,
            max_request_concurrency=self._transfer.num_threads,
            max_io_queue_size=64,
            io_chunksize=BODY_BLOCK_BYTES,
            num_download_attempts=1,  # each has the retries of our client
        )
        return TransferManager(_TransferClient(self._client), config, files)

    def _where(self, key: str, *, is_ours: bool = True) -> dict[str, str]:
        """Return bucket and key of an object for a request. Keys that others wrote may have empty parts."""
        storage.check_key(key if is_ours else "/".join(filter(None, key.split("/"))))
        return {"Bucket": self._bucket, "Key": storage.join_key(self._prefix, key)}

    def _folder(self, prefix: str) -> str:
        """The S3 prefix of a folder: ends in '/', '' for the whole bucket."""
        folder = storage.join_key(self._prefix, storage.folder_key(prefix)).strip("/")
        return f"{folder}/" if folder else ""

    def _require(self, key: str) -> ObjectStat:
        found = self.stat(key)
        if found is None:
            raise key_not_found(self.uri(key))
        return found

    def _pages(self, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
        request = {"Bucket": self._bucket, "Prefix": self._folder(prefix), **options}
        while True:
            page = self._client.call("listing", self.uri(prefix), lambda raw: raw.list_objects_v2(**request))
            yield page
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def _read_range(self, key: str, start: int, length: int, **options: str) -> bytes:
        """S3 answers 416 to a start at or after the end."""
        where = self._where(key, is_ours=False)
        if length <= 0:
            return b""

        def get(raw: Any) -> bytes:
            inclusive = f"bytes={start}-{start + length - 1}"
            answer = raw.get_object(**where, Range=inclusive, **options)
            total = int(str(answer["ContentRange"]).rsplit("/", 1)[-1])
            return checked_length(_body(answer, self.stop), min(length, total - start))

        try:
            return self._client.attempt("reading", self.uri(key), get)
        except S3_ERRORS as error:
            if http_status(error) == 416:
                return b""
            raise translate(error, "reading", self.uri(key)) from error

    def _write_if(self, key: str, data: bytes, **condition: str) -> bool:
        """A conditional PUT. When its answer is lost, the repeat meets our own object: the writer's tag tells."""
        where, writer = self._where(key), secrets.token_hex(8)
        attempts = 0

        def put(raw: Any) -> None:
            nonlocal attempts
            attempts += 1
            raw.put_object(**where, Body=data, Metadata={WRITER_TAG: writer}, **condition)

        try:
            self._client.attempt("writing", self.uri(key), put)
        except S3_ERRORS as error:
            if is_precondition_failed(error):
                if attempts == 1:
                    return False
                found = self._client.call("looking at", self.uri(key), lambda raw: raw.head_object(**where))
                return bool(found.get("Metadata", {}).get(WRITER_TAG) == writer)
            if "IfMatch" in condition and is_missing(error):
                return False
            raise translate(error, "writing", self.uri(key)) from error
        return True


def open_s3(uri: str, *, retry: RetryPolicy, stop: StopSignal) -> S3Storage:
    """The storage of an s3:// URI. ConfigError for a missing bucket or credentials."""
    parts = urlsplit(uri)
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc or parts.query or parts.fragment:
        raise ConfigError(
            "an s3:// URI with no bucket, or with a user, a port, '?' or '#'",
            expected="s3://bucket/prefix; credentials come from the AWS environment",
            next_command="correct the URI in the settings",
        )
    prefix, root = storage.folder_key(parts.path), f"s3://{parts.netloc}"
    try:
        client = S3Client(retry, stop)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(
            f"no S3 client for {root} ({type(error).__name__})",
            expected="a valid AWS profile, region and AWS_ENDPOINT_URL",
            next_command="aws configure list",
        ) from error
    try:
        client.attempt("opening", root, lambda raw: raw.head_bucket(Bucket=parts.netloc))
    except S3_ERRORS as error:
        if is_missing(error):
            raise missing_bucket(root) from error
        # A policy may allow the prefix only, and refuse this question about the bucket: then the first use will tell.
        if http_status(error) != 403:
            raise translate(error, "opening", root) from error
    return S3Storage(client, parts.netloc, prefix)


def _body(answer: dict[str, Any], stop: StopSignal) -> bytes:
    """All bytes of an answer, polling `stop` every MiB."""
    blocks = []
    with answer["Body"] as body:
        while block := body.read(BODY_BLOCK_BYTES):
            stop.raise_if_set("reading an object")
            blocks.append(block)
    return checked_length(b"".join(blocks), int(answer["ContentLength"]))
