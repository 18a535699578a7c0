"""What an input consists of: partitions, their files, and what names their content."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import Advance, progress
from pipeline.core.stop import StopSignal
from pipeline.data.rows import RawBatch
from pipeline.io.commit import record_of
from pipeline.io.storage import ObjectStat, Storage

FLAT = "flat"
_DAY = re.compile(r"dt=(\d{4}-\d{2}-\d{2})")


@dataclass(frozen=True)
class InputFile:
    """A file to read; `key` is relative to the input's root. `content_id` changes when its content does."""

    key: str
    format: str
    content_id: str
    size_bytes: int = 0


@dataclass(frozen=True)
class Partition:
    """The files of one day (`dt=YYYY-MM-DD`), or of a flat input. `extra_ids`: contents joined to every row."""

    name: str
    files: tuple[InputFile, ...]
    extra_ids: tuple[str, ...] = ()

    @property
    def watermark(self) -> str:
        return self.name.removeprefix("dt=") if self.name != FLAT else ""

    @property
    def content_id(self) -> str:
        """One name for the content of all files (and for their names, since sample ids contain them)."""
        return fingerprint([self.name, [[file.key, file.content_id] for file in self.files], list(self.extra_ids)])


class Source(Protocol):
    """An input. `read` yields the rows of a file in their one order, cut to the columns of some fields (None: all)."""

    @property
    def partitions(self) -> tuple[Partition, ...]: ...
    @property
    def fixed_labels(self) -> dict[str, float]:
        """Labels this layout defines, least relevant first, with their gains; empty when the data decides."""

    def num_rows(self) -> int | None:
        """Rows of all files when that is cheap to know."""

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]: ...


@contextmanager
def reading(doing: str, source: Source, files: Sequence[InputFile]) -> Iterator[Callable[[RawBatch | None], None]]:
    """Shows the progress of reading files: yields what is to be told of every batch, or of None while one waits.

    In bytes, which are known of every file before it is read; in rows where rows are generated.
    """
    size_bytes = sum(file.size_bytes for file in files)
    is_all = len(files) == sum(len(partition.files) for partition in source.partitions)
    rows = source.num_rows() if is_all and not size_bytes else None
    with progress(doing, size_bytes or rows, "bytes" if size_bytes else "rows") as advance:

        def tell(batch: RawBatch | None) -> None:
            advance((batch.input_bytes if size_bytes else batch.num_rows) if batch else 0)

        yield tell


def content_ids(storage: Storage, stats: Sequence[ObjectStat], stop: StopSignal) -> list[str]:
    """content_id of each; local files are read for it."""
    with progress("looking for changes in the input", sum(stat.size_bytes for stat in stats), "bytes") as advance:
        return [content_id(storage, stat, stop, advance) for stat in stats]


def content_id(storage: Storage, stat: ObjectStat, stop: StopSignal, advance: Advance = lambda count: None) -> str:
    """What names a file's content: its xxh3 when local (times lie), its ETag and size on S3 (free with the listing)."""
    if storage.local_path(stat.key) is None:
        return f"{stat.etag}-{stat.size_bytes}"
    with storage.open_read(stat.key) as file:
        return record_of(file, stop, advance).xxh3_128


def group_by_day(files: Sequence[InputFile], path: str, extra_ids: tuple[str, ...] = ()) -> tuple[Partition, ...]:
    """Partitions in order of date, or the one called `flat`. Raises DataError when both layouts are mixed."""
    days: dict[str, list[InputFile]] = {}
    for file in files:
        match = _DAY.fullmatch(file.key.split("/")[0])
        days.setdefault(match.group(0) if match else FLAT, []).append(file)
    if FLAT in days and len(days) > 1:
        raise DataError(
            f"{path} holds dt= folders and also {days[FLAT][0].key}",
            expected="either dt=YYYY-MM-DD/ folders or a flat folder",
            next_command=f"move {days[FLAT][0].key} into a dt= folder",
        )
    return tuple(Partition(name, tuple(days[name]), extra_ids) for name in sorted(days))
