"""Split the output of a computation into parts that several workers write independently.

Workers may commit their parts in any order, and a worker that notices that all parts exist combines them. A part
consists of its files and a record with their sizes and checksums. The part is complete once the record exists, so it is
written last. Existing files are kept instead of overwritten, and the record always describes the files that are stored.
This means that it does no harm if a worker that was presumed dead resumes and writes the same part again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import Field

from pipeline.core.errors import TransientError
from pipeline.core.manifest import FileRecord
from pipeline.core.record import Record
from pipeline.io import atomic
from pipeline.io.commit import check_record, file_record, hash_bytes
from pipeline.io.requests import run_parallel
from pipeline.io.storage import KeyNotFound, Storage, join_key, list_names, os_errors, read_record

NUM_READ_THREADS = 16
_RECORDS_AT_A_TIME = 64


class Part(Record):
    """The record of a single part. Subclasses add metadata that can be used without reading the files."""

    index: int
    files: dict[str, FileRecord] = Field({})


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Parts(Generic[P]):
    """The output parts of one computation.

    Args:
        storage: the storage that all workers share.
        records: prefix for the records. It must be unique to this computation, for example by including a fingerprint.
        files: prefix for the files.
        kind: class of the records.
        names: returns the file names of a part, given its index, in the order in which they are written.
        is_same_work: given the contents of a part's last file, returns whether this computation wrote it. This is only
            needed if `files` is not unique to this computation.
    """

    storage: Storage
    records: str
    files: str
    kind: type[P]
    names: Callable[[int], Sequence[str]]
    is_same_work: Callable[[bytes], bool] = lambda last: True

    def done(self) -> set[int]:
        """Return the indices of all complete parts. This takes two listings."""
        records = list_names(self.storage, self.records)
        files = list_names(self.storage, self.files) if records else set()
        indices = (int(name.removesuffix(".json")) for name in records if name.removesuffix(".json").isdecimal())
        return {index for index in indices if files.issuperset(self.names(index))}

    def commit(self, part: P, files: Mapping[str, bytes]) -> P:
        """Store the files of a part, followed by its record. Return the record that is stored.

        It is safe to call this again for the same part.
        """
        record = part.model_copy(update={"files": self._put(files)})
        key, data = self._key(part.index), record.model_dump_json().encode()
        if not self.storage.write_if_absent(key, data):
            earlier = self.read(part.index)
            if earlier.files == record.files:
                return earlier
            self.storage.write_bytes(key, data)  # the files that the earlier record describes have been deleted
        return record

    def read(self, index: int) -> P:
        """Return the record of a part. Raises TransientError if it doesn't exist and DataError if it is damaged."""
        key = self._key(index)
        record = read_record(self.storage, key, self.kind, "the record of a part", "the same command")
        if record is None:
            raise _missing_part(self.storage.uri(key))
        return record

    def read_all(self, indices: Iterable[int]) -> Iterator[P]:
        """Yield the records of several parts in order. Records are read in batches of 64 parallel requests."""
        remaining = list(indices)
        while remaining:
            batch, remaining = remaining[:_RECORDS_AT_A_TIME], remaining[_RECORDS_AT_A_TIME:]
            yield from run_parallel(
                self.read, batch, num_threads=NUM_READ_THREADS, stop=self.storage.stop, doing="reading records of parts"
            )

    def fetch(self, index: int, cache_dir: Path) -> list[Path]:
        """Return local paths to the verified files of a part, in the order of `names`.

        Files on S3 are downloaded to `cache_dir`, which several processes may share. Raises TransientError if the part
        doesn't exist, and DataError if a file is damaged.
        """
        record = self.read(index)
        return [self._fetch(name, record.files[name], cache_dir.absolute()) for name in self.names(index)]

    def delete(self) -> None:
        """Delete all parts, starting with their records. Call this after the combined output has been committed."""
        self.storage.delete_prefix(self.records)
        self.storage.delete_prefix(self.files)

    def _key(self, index: int) -> str:
        return join_key(self.records, f"{index:05d}.json")

    def _fetch(self, name: str, expected: FileRecord, cache_dir: Path) -> Path:
        key, stop = join_key(self.files, name), self.storage.stop
        uri, path = self.storage.uri(key), self.storage.local_path(key)
        try:
            if path is None:
                path = cache_dir / f"{expected.xxh3_128}-{name}"
                with os_errors("writing", f"file://{path}"), atomic.exclusive(path.with_suffix(".lock"), stop):
                    if not path.is_file() or file_record(path, stop) != expected:
                        self.storage.download(key, path)
            with os_errors("reading", uri):
                check_record(uri, expected, file_record(path, stop))
        except KeyNotFound as error:
            raise _missing_part(uri) from error
        return path

    def _put(self, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
        """Write the files of a part unless they already exist. Return the records of the files that are stored.

        If an existing file was written by a different computation, it is replaced.
        """
        stored: dict[str, FileRecord] = {}
        for name, data in files.items():
            key = join_key(self.files, name)
            if not self.storage.write_if_absent(key, data) and (existing := self.storage.read_bytes(key)) != data:
                if self._is_same_work(list(files)[-1]):
                    data = existing
                else:
                    self.storage.write_bytes(key, data)
            stored[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
        return stored

    def _is_same_work(self, last: str) -> bool:
        try:
            return self.is_same_work(self.storage.read_bytes(join_key(self.files, last)))
        except KeyNotFound:
            return False


def _missing_part(uri: str) -> TransientError:
    return TransientError(
        f"{uri} does not exist: the part was never finished, or it was deleted after all parts were combined",
        expected="the files of a finished part and its record",
        next_command="run the same command again, which reuses the parts that are finished",
    )
