"""The source of rows: files of a path, the ESCI layout, or the synthetic catalogue."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
from pydantic import JsonValue

from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data import esci, synthetic
from pipeline.data.config import DataConfig
from pipeline.data.input_files import InputFile, Partition, choose_files, find_files, group_by_day, input_warnings
from pipeline.data.readers import parquet_rows, read_file
from pipeline.data.rows import ColumnPlan, RawBatch, batch_rows, plan_columns, to_fields
from pipeline.io.storage import ObjectStat, Storage

_MAX_FOOTERS = 1000
"""More Parquet files than this are not opened to count their rows."""


class Source(Protocol):
    """An input. `read` yields the rows of a file in order with the columns of some fields (None: all).

    It raises DataError, and TransientError for a file that was changed since it was listed.
    """

    @property
    def partitions(self) -> tuple[Partition, ...]: ...
    @property
    def passed_over(self) -> tuple[str, ...]:
        """Keys of files below the path that are not read."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about an input that is read all the same."""

    @property
    def fixed_labels(self) -> Mapping[str, float]:
        """Labels with their gains that the layout defines, least relevant first; empty if the data decides."""

    def num_rows(self) -> int | None:
        """Return the rows of all files if they are cheap to count."""

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]: ...


@contextmanager
def reading_progress(
    doing: str, source: Source, files: Sequence[InputFile]
) -> Iterator[Callable[[RawBatch | None], None]]:
    """Show the progress of reading files. Yields a function to call with every batch, and with None while waiting.

    Counts bytes, which are known before a file is read, or rows if they are generated.
    """
    size_bytes = sum(file.size_bytes for file in files)
    is_all = len(files) == sum(len(partition.files) for partition in source.partitions)
    rows = source.num_rows() if is_all and not size_bytes else None
    with progress(doing, size_bytes or rows, "bytes" if size_bytes else "rows") as advance:

        def tell(batch: RawBatch | None) -> None:
            advance((batch.input_bytes if size_bytes else batch.num_rows) if batch else 0)

        yield tell


def open_source(config: DataConfig, *, scratch: Path, stop: StopSignal) -> Source:
    """Open the input that the settings name. Raises DataError if there is nothing to read."""
    if config.path is None:
        return SyntheticSource(config)
    listing = find_files(config.path, stop)
    if _is_esci(config, listing.stats):
        return esci.open_esci(config, listing, scratch)
    files = choose_files(listing, config.format, config.path)
    warnings = input_warnings(files.inputs, files.passed_over, config.path)
    partitions = group_by_day(files.inputs, config.path)
    return FileSource(config, listing.storage, partitions, files.passed_over, warnings)


def _is_esci(config: DataConfig, stats: Iterable[ObjectStat]) -> bool:
    return config.format == "esci" or (
        config.format == "auto" and any(stat.key.rpartition("/")[2] == esci.EXAMPLES for stat in stats)
    )


def list_input_objects(config: DataConfig, stop: StopSignal) -> frozenset[ObjectStat]:
    """List the input's path without reading anything; nothing for the synthetic catalogue."""
    return frozenset() if config.path is None else frozenset(find_files(config.path, stop).stats)


def input_rows(config: DataConfig, stop: StopSignal) -> int | None:
    """Return the rows of the input if they are cheap to count. Raises DataError if there is no input."""
    if config.path is None:
        return SyntheticSource(config).num_rows()
    listing = find_files(config.path, stop)
    if _is_esci(config, listing.stats):
        return None
    found = choose_files(listing, config.format, config.path).found
    return _footer_rows(listing.storage, [(stat.key, name) for stat, name in found])


def _footer_rows(storage: Storage, files: Sequence[tuple[str, str]]) -> int | None:
    """Return the rows of files with these keys and formats; None if that is much to read."""
    if any(name != "parquet" for _, name in files) or len(files) > _MAX_FOOTERS:
        return None
    return sum(parquet_rows(storage, key) for key, _ in files)


class SyntheticSource:
    fixed_labels: Mapping[str, float] = {}
    passed_over: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        version: dict[str, JsonValue] = {
            "generator": synthetic.GENERATOR_VERSION,
            "num_queries": config.synthetic.num_queries,
            "candidates_per_query": len(synthetic.GRADES),
            "first_day": str(synthetic.FIRST_DAY),
            "seed": synthetic.SEED,
        }
        self.partitions = tuple(
            Partition(name, (InputFile(f"{name}/synthetic", "synthetic", fingerprint({"day": name, **version})),))
            for name in synthetic.partitions(config.synthetic)
        )

    def num_rows(self) -> int | None:
        made = self._config.synthetic
        return made.num_queries * made.num_days * len(synthetic.GRADES)

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        plan = plan_columns(self._config, synthetic.SCHEMA.names, "the synthetic catalogue").only(fields)
        size, first = batch_rows(self._config.rows_per_chunk), 0
        for batch in synthetic.generate(self._config.synthetic, file.key.split("/")[0]):
            for start in range(0, len(batch), size):
                part = batch.slice(start, size)
                columns = dict(zip(part.schema.names, part.columns, strict=True))
                yield RawBatch(to_fields(columns, plan), np.arange(first, first + len(part), dtype=np.int64))
                first += len(part)


@dataclass(frozen=True)
class FileSource:
    """Files of one table."""

    config: DataConfig
    storage: Storage
    partitions: tuple[Partition, ...]
    passed_over: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fixed_labels: ClassVar[Mapping[str, float]] = {}

    def num_rows(self) -> int | None:
        files = [(file.key, file.format) for partition in self.partitions for file in partition.files]
        return _footer_rows(self.storage, files)

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        uri, num_rows = self.storage.uri(file.key), batch_rows(self.config.rows_per_chunk)

        def plan(names: list[str]) -> ColumnPlan:
            return plan_columns(self.config, names, uri).only(fields)

        yield from read_file(self.storage, file.key, file.format, plan, num_rows, file.version)
