"""Storage on S3 and what speaks its protocol. Every object is written whole: S3 shows it at once or not at all."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from botocore.exceptions import BotoCoreError, ClientError

from pipeline.core.errors import ConfigError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.io import storage
from pipeline.io.requests import RequestCounts, RetryPolicy, run_parallel
from pipeline.io.s3_client import (
    S3_ERRORS,
    S3Client,
    is_missing,
    is_precondition_failed,
    missing_bucket,
    status_of,
    translate,
)
from pipeline.io.s3_transfer import (
    Target,
    TransferSettings,
    buffered,
    checked_length,
    download_file,
    range_header,
    upload_file,
)
from pipeline.io.storage import Names, ObjectStat, key_not_found

DELETE_BATCH = 1000  # S3 limit of DeleteObjects
WRITER_TAG = "trnpipe-writer"


class S3Storage:
    """`s3://bucket/prefix`."""

    def __init__(self, client: S3Client, bucket: str, prefix: str, transfer: TransferSettings | None = None) -> None:
        self._client, self._bucket, self._prefix = client, bucket, prefix
        self._transfer = transfer or TransferSettings()
        self.root = f"s3://{storage.join_key(bucket, prefix)}" if prefix else f"s3://{bucket}"

    @property
    def stop(self) -> StopSignal:
        return self._client.stop

    @property
    def requests(self) -> RequestCounts:
        return self._client.requests

    def uri(self, key: str) -> str:
        return f"{self.root}/{key}" if key else self.root

    def local_path(self, key: str) -> Path | None:
        return None

    def stat(self, key: str) -> ObjectStat | None:
        target = self._target(key)
        try:
            found = self._client.attempt("looking at", target.uri, lambda raw: raw.head_object(**target.where))
        except S3_ERRORS as error:
            if is_missing(error):
                return None
            raise translate(error, "looking at", target.uri) from error
        return ObjectStat(key, int(found["ContentLength"]), str(found["ETag"]))

    def list(self, prefix: str) -> Iterator[ObjectStat]:
        cut = len(self._folder(""))
        for page in self._pages(prefix):
            for item in page.get("Contents", ()):
                # A key that ends in '/' is what consoles create to show an empty folder.
                if not item["Key"].endswith("/"):
                    yield ObjectStat(item["Key"][cut:], int(item["Size"]), str(item["ETag"]))

    def list_dirs(self, prefix: str) -> Names:
        cut = len(self._folder(prefix))
        pages = self._pages(prefix, Delimiter="/")
        names = (item["Prefix"][cut:].rstrip("/") for page in pages for item in page.get("CommonPrefixes", ()))
        return sorted(names, key=str.encode)  # S3 sorts them with their '/', which puts a-b before a

    def read_bytes(self, key: str) -> bytes:
        target = self._target(key)
        return self._client.call("reading", target.uri, lambda raw: _body(raw.get_object(**target.where)))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        return self._read_range(self._target(key), start, length)

    def open_read(self, key: str) -> BinaryIO:
        found, target = self._require(key), self._target(key)
        return buffered(
            lambda start, length: self._read_range(target, start, length, IfMatch=found.etag), found.size_bytes
        )

    def write_bytes(self, key: str, data: bytes) -> None:
        target = self._target(key)
        self._client.call("writing", target.uri, lambda raw: raw.put_object(**target.where, Body=data))

    def write_if_absent(self, key: str, data: bytes) -> bool:
        return self._write_if(key, data, IfNoneMatch="*")

    def write_if_match(self, key: str, data: bytes, etag: str) -> bool:
        return self._write_if(key, data, IfMatch=etag)

    def delete(self, keys_: Iterable[str]) -> None:
        full_keys = [self._target(key).key for key in keys_]
        for start in range(0, len(full_keys), DELETE_BATCH):
            self._delete_batch(full_keys[start : start + DELETE_BATCH])

    def delete_prefix(self, prefix: str) -> None:
        storage.check_key(storage.folder_key(prefix))
        found = [stat.key for stat in self.list(prefix)]
        markers = {key for key in found if key.rsplit("/", 1)[-1] == MANIFEST_NAME}
        self.delete(sorted(markers))
        self.delete(key for key in found if key not in markers)

    def upload(self, local: Path, key: str) -> None:
        upload_file(self._client, self._target(key), local, self._transfer)

    def download(self, key: str, local: Path) -> None:
        self._download(self._require(key), local)

    def upload_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        names = tuple(names)
        sizes = {name: _size(local_dir / name) for name in names}
        self._each_file(
            lambda name: self.upload(local_dir / name, storage.join_key(prefix, name)), sizes, f"uploading {prefix}"
        )

    def download_dir(self, prefix: str, local_dir: Path, names: Iterable[str]) -> None:
        names = tuple(names)
        found = {stat.key: stat for stat in self.list(prefix)} if names else {}
        stats = {name: found.get(storage.join_key(prefix, name)) for name in names}
        sizes = {name: stat.size_bytes if stat else 0 for name, stat in stats.items()}

        def get(name: str) -> None:
            stat = stats[name]
            if stat is None:
                raise key_not_found(self.uri(storage.join_key(prefix, name)))
            self._download(stat, local_dir / name)

        self._each_file(get, sizes, f"downloading {prefix}")

    def _each_file(self, call: Callable[[str], None], sizes: Mapping[str, int], doing: str) -> None:
        """Small files side by side; large ones one by one, since their parts already go side by side."""
        small = [name for name, size in sizes.items() if size <= self._transfer.part_bytes]
        large = sorted(sizes.keys() - set(small))
        for names, threads in ((small, self._transfer.num_threads), (large, 1)):
            run_parallel(
                call, names, num_threads=threads, stop=self.stop, doing=doing, size_bytes=lambda name: sizes[name]
            )

    def _download(self, stat: ObjectStat, local: Path) -> None:
        download_file(self._client, self._target(stat.key), stat.size_bytes, stat.etag, local, self._transfer)

    def _target(self, key: str) -> Target:
        return Target(self._bucket, storage.join_key(self._prefix, storage.check_key(key)), self.uri(key))

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
        where = {"Bucket": self._bucket, "Prefix": self._folder(prefix), **options}
        token: dict[str, str] = {}
        while True:
            page = self._list_page(prefix, where | token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _list_page(self, prefix: str, request: dict[str, str]) -> dict[str, Any]:
        return self._client.call("listing", self.uri(prefix), lambda raw: raw.list_objects_v2(**request))

    def _read_range(self, target: Target, start: int, length: int, **options: str) -> bytes:
        """S3 answers 416 to a start at or after the end."""
        if length <= 0:
            return b""

        def get(raw: Any) -> bytes:
            answer = raw.get_object(**target.where, Range=range_header(start, length), **options)
            total = int(str(answer["ContentRange"]).rsplit("/", 1)[-1])
            return checked_length(_body(answer), min(length, total - start))

        try:
            return self._client.attempt("reading", target.uri, get)
        except S3_ERRORS as error:
            if status_of(error) == 416:
                return b""
            raise translate(error, "reading", target.uri) from error

    def _write_if(self, key: str, data: bytes, **condition: str) -> bool:
        """A conditional PUT. When its answer is lost, the repeat meets our own object: the writer's tag tells."""
        target, writer = self._target(key), secrets.token_hex(8)
        attempts = 0

        def put(raw: Any) -> None:
            nonlocal attempts
            attempts += 1
            raw.put_object(**target.where, Body=data, Metadata={WRITER_TAG: writer}, **condition)

        try:
            self._client.attempt("writing", target.uri, put)
        except S3_ERRORS as error:
            if is_precondition_failed(error):
                return attempts > 1 and self._writer_of(target) == writer
            if "IfMatch" in condition and is_missing(error):
                return False
            raise translate(error, "writing", target.uri) from error
        return True

    def _writer_of(self, target: Target) -> str:
        found = self._client.call("looking at", target.uri, lambda raw: raw.head_object(**target.where))
        return str(found.get("Metadata", {}).get(WRITER_TAG, ""))

    def _delete_batch(self, full_keys: Names) -> None:
        request = {"Objects": [{"Key": key} for key in full_keys], "Quiet": True}

        def remove(raw: Any) -> None:
            answer = raw.delete_objects(Bucket=self._bucket, Delete=request)
            for error in answer.get("Errors", ()):
                # The request is a 200 even when single keys fail: give such a key's error its usual form.
                raise ClientError({"Error": {"Code": error["Code"]}, "ResponseMetadata": {}}, "DeleteObjects")

        self._client.call("deleting", self.root, remove)


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
        if status_of(error) != 403:
            raise translate(error, "opening", root) from error
    return S3Storage(client, parts.netloc, prefix)


def _body(answer: dict[str, Any]) -> bytes:
    with answer["Body"] as body:
        return checked_length(body.read(), int(answer["ContentLength"]))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
