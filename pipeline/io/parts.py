"""Parts of one piece of work: several workers commit them in any order, and whoever finds all of them combines them.

A part is its files, then a record with their sizes and checksums, which is the marker. Nothing is written over: the
first file under a name stays, whoever wrote it, and the record describes what is there. So a worker that was thought
dead, and comes back, does no harm, and every part exists once.
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
    """The record of one part. A subclass adds what is to be known of a part without reading its files."""

    index: int
    files: dict[str, FileRecord] = Field({})


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Parts(Generic[P]):
    """The parts of one piece of work.

    Args:
        records: prefix of the markers. It must name the work (by a fingerprint), as a marker of other work proves
            nothing.
        files: prefix of the files.
        kind: the class of the markers.
        names: the names of the files of a part by its index, in the order in which they are written.
        is_same_work: given the bytes of the last file of a part, whether this work wrote it. Only needed if `files`
            does not name the work.
    """

    storage: Storage
    records: str
    files: str
    kind: type[P]
    names: Callable[[int], Sequence[str]]
    is_same_work: Callable[[bytes], bool] = lambda last: True

    def done(self) -> set[int]:
        """Return the indices of the parts that are complete, by two listings of names."""
        records = list_names(self.storage, self.records)
        files = list_names(self.storage, self.files) if records else set()
        indices = (int(name.removesuffix(".json")) for name in records if name.removesuffix(".json").isdecimal())
        return {index for index in indices if files.issuperset(self.names(index))}

    def commit(self, part: P, files: Mapping[str, bytes]) -> P:
        """Publish the files of one part, then its record. Return the record that counts. May be repeated."""
        there = part.model_copy(update={"files": self._put(files)})
        key, data = self._key(part.index), there.model_dump_json().encode()
        if not self.storage.write_if_absent(key, data):
            earlier = self.read(part.index)
            if earlier.files == there.files:
                return earlier
            self.storage.write_bytes(key, data)  # the files that it describes were deleted
        return there

    def read(self, index: int) -> P:
        """Return the record of a part. Raises TransientError if there is none, DataError if it is damaged."""
        key = self._key(index)
        record = read_record(self.storage, key, self.kind, "the record of a part", "the same command")
        if record is None:
            raise _gone(self.storage.uri(key))
        return record

    def read_all(self, indices: Iterable[int]) -> Iterator[P]:
        """Yield the records of some parts in order, reading a few ahead. Raises as `read`."""
        left = list(indices)
        while left:
            now, left = left[:_RECORDS_AT_A_TIME], left[_RECORDS_AT_A_TIME:]
            yield from run_parallel(
                self.read, now, num_threads=NUM_READ_THREADS, stop=self.storage.stop, doing="reading records of parts"
            )

    def fetch(self, index: int, cache_dir: Path) -> list[Path]:
        """Return local copies of the files of a part, in the order of their names, every byte verified.

        Files on S3 are downloaded into `cache_dir`, which processes may share. Raises TransientError if the part is
        gone, DataError naming a file that is missing or damaged.
        """
        record = self.read(index)
        return [self._fetch(name, record.files[name], cache_dir.absolute()) for name in self.names(index)]

    def delete(self) -> None:
        """Delete all parts, markers first: what they were combined to is committed elsewhere."""
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
            raise _gone(uri) from error
        return path

    def _put(self, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
        """Write the files that are not there yet, and those of other work again. Return what they hold then."""
        there: dict[str, FileRecord] = {}
        for name, data in files.items():
            key = join_key(self.files, name)
            if not self.storage.write_if_absent(key, data) and (found := self.storage.read_bytes(key)) != data:
                if self._is_same_work(list(files)[-1]):
                    data = found
                else:
                    self.storage.write_bytes(key, data)
            there[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
        return there

    def _is_same_work(self, last: str) -> bool:
        try:
            return self.is_same_work(self.storage.read_bytes(join_key(self.files, last)))
        except KeyNotFound:
            return False


def _gone(uri: str) -> TransientError:
    return TransientError(
        f"{uri} does not exist: the part was not finished, or was combined with the others and deleted",
        expected="the files of a finished part and its record",
        next_command="the same command again: it finds what is done",
    )
