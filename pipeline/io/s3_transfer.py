"""Files to and from S3 in parallel parts, each part with a retry budget of its own.

s3transfer (boto3's TransferManager) repeats a part only through boto3's retries, which have no total deadline and do
not poll our stop signal; without them one SlowDown restarts a whole file. So the parts are sent here.
"""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline.core.errors import DataError
from pipeline.io.atomic import fsync_path, temp_file
from pipeline.io.requests import run_parallel
from pipeline.io.s3_client import S3_ERRORS, PartialBody, S3Client, code_of, is_missing, translate
from pipeline.io.storage import os_errors

# A seekable file over ranged GETs.

MIN_RANGE_BYTES = 8 * 2**20
BODY_BLOCK_BYTES = 2**20
RangeReader = Any  # Callable[[int, int], bytes]; kept loose for RawIOBase


class RangeFile(io.RawIOBase):
    """Raw reader: each read is one request. Wrap it with buffered()."""

    def __init__(self, read_range: RangeReader, size_bytes: int) -> None:
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


def buffered(read_range: RangeReader, size_bytes: int) -> BinaryIO:
    """A buffered reader that asks for at least 8 MiB at a time (or all that is left)."""
    buffer_bytes = max(1, min(MIN_RANGE_BYTES, size_bytes))
    return cast(BinaryIO, io.BufferedReader(RangeFile(read_range, size_bytes), buffer_bytes))


def range_header(start: int, length: int) -> str:
    """HTTP ranges are inclusive."""
    return f"bytes={start}-{start + length - 1}"


def checked_length(data: bytes, expected: int) -> bytes:
    """The data; PartialBody, which is retried, when it is not `expected` bytes."""
    if len(data) != expected:
        raise PartialBody(f"{len(data)} of {expected} bytes")
    return data


MAX_PARTS = 10_000  # S3 limit
MIB = 2**20


@dataclass(frozen=True)
class TransferSettings:
    """Part size (S3 minimum 5 MiB) and threads. 8 x 16 MiB is what an upload holds in memory."""

    part_bytes: int = 16 * MIB
    num_threads: int = 8


@dataclass(frozen=True)
class Target:
    """One object. `uri` is for messages."""

    bucket: str
    key: str
    uri: str

    @property
    def where(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self.key}


def part_ranges(size_bytes: int, part_bytes: int) -> list[tuple[int, int]]:
    """(start, length) of at most 10,000 parts that cover the object; one empty part for an empty object."""
    part_bytes = max(part_bytes, -(-size_bytes // MAX_PARTS))
    starts = range(0, max(size_bytes, 1), part_bytes)
    return [(start, min(part_bytes, size_bytes - start)) for start in starts]


def upload_file(client: S3Client, target: Target, local: Path, settings: TransferSettings) -> None:
    """One PUT for a small file, else a multipart upload, aborted when it fails."""
    with os_errors("reading", f"file://{local}"):
        size_bytes = local.stat().st_size
        if size_bytes > settings.part_bytes:
            _upload_parts(client, target, local, part_ranges(size_bytes, settings.part_bytes), settings)
            return
        data = local.read_bytes()
    client.call("writing", target.uri, lambda raw: raw.put_object(**target.where, Body=data))


def download_file(
    client: S3Client, target: Target, size_bytes: int, etag: str, local: Path, settings: TransferSettings
) -> None:
    """Parallel ranged GETs of exactly the version `etag` into a temp file, then fsync and rename."""
    with os_errors("writing", f"file://{local}"):
        with temp_file(local) as (file, temp):
            descriptor = file.fileno()
            if size_bytes:
                # Fails at once when the disk is too small, not after hours.
                os.posix_fallocate(descriptor, 0, size_bytes)
            run_parallel(
                lambda part: _download_part(client, target, etag, part, descriptor),
                part_ranges(size_bytes, settings.part_bytes) if size_bytes else [],
                num_threads=settings.num_threads,
                stop=client.stop,
                doing=f"downloading {target.uri}",
                size_bytes=lambda part: part[1],
            )
            os.fsync(descriptor)
            temp.replace(local)
        fsync_path(local.parent)


def _upload_parts(
    client: S3Client, target: Target, local: Path, parts: list[tuple[int, int]], settings: TransferSettings
) -> None:
    doing = f"uploading {target.uri}"
    created = client.call("writing", target.uri, lambda raw: raw.create_multipart_upload(**target.where))
    upload = {**target.where, "UploadId": created["UploadId"]}
    try:
        with local.open("rb") as file:

            def put_part(number: int) -> dict[str, Any]:
                start, length = parts[number - 1]
                data = os.pread(file.fileno(), length, start)
                if len(data) != length:
                    raise DataError(f"{local} became shorter during its upload", expected="a finished file")
                done = client.call(
                    "writing",
                    target.uri,
                    lambda raw: raw.upload_part(**upload, PartNumber=number, Body=data),
                )
                return {"PartNumber": number, "ETag": done["ETag"]}

            numbers = range(1, len(parts) + 1)
            done = run_parallel(
                put_part,
                numbers,
                num_threads=settings.num_threads,
                stop=client.stop,
                doing=doing,
                size_bytes=lambda number: parts[number - 1][1],
            )
        _complete(client, target, upload, done, sum(length for _, length in parts))
    except BaseException as error:
        _abort(client, upload, error)
        raise


def _complete(
    client: S3Client, target: Target, upload: dict[str, str], parts: list[dict[str, Any]], size_bytes: int
) -> None:
    """Make the object visible. A repeat after a lost answer finds no upload any more, but the object."""
    try:
        client.attempt(
            "writing",
            target.uri,
            lambda raw: raw.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}),
        )
    except S3_ERRORS as error:
        if code_of(error) == "NoSuchUpload" and _size_of(client, target) == size_bytes:
            return
        raise translate(error, "writing", target.uri) from error


def _size_of(client: S3Client, target: Target) -> int | None:
    """Size of an object in bytes, None when it is missing."""
    try:
        found = client.attempt("looking at", target.uri, lambda raw: raw.head_object(**target.where))
    except S3_ERRORS as error:
        if is_missing(error):
            return None
        raise translate(error, "looking at", target.uri) from error
    return int(found["ContentLength"])


def _abort(client: S3Client, upload: dict[str, str], cause: BaseException) -> None:
    """Free the parts. Once, without the retry budget: the process may be about to be killed."""
    try:
        client.raw.abort_multipart_upload(**upload)
    except S3_ERRORS as error:
        cause.add_note(f"the parts stay until a lifecycle rule removes them ({type(error).__name__} while aborting)")


def _download_part(client: S3Client, target: Target, etag: str, part: tuple[int, int], descriptor: int) -> None:
    start, length = part

    def get(raw: Any) -> None:
        answer = raw.get_object(**target.where, Range=range_header(start, length), IfMatch=etag)
        done = 0
        with answer["Body"] as body:
            while block := body.read(BODY_BLOCK_BYTES):
                client.stop.raise_if_set(f"downloading {target.uri}")
                if done + len(block) > length:
                    raise PartialBody(f"more than {length} bytes")
                _write_at(descriptor, block, start + done)
                done += len(block)
        if done != length:
            raise PartialBody(f"{done} of {length} bytes")

    client.call("reading", target.uri, get)


def _write_at(descriptor: int, block: bytes, offset: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
