"""Where rows come from: partitions of files, or the synthetic catalogue."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.stop import StopSignal
from pipeline.data import synthetic
from pipeline.data.config import DataConfig
from pipeline.data.esci import ESCI_EXAMPLES, open_esci
from pipeline.data.partitions import InputFile, Partition, Source, content_ids, group_by_day
from pipeline.data.readers import parquet_rows, read_file, suffix_format
from pipeline.data.rows import ColumnPlan, RawBatch, batch_rows, plan_columns, to_fields
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import ObjectStat, Storage, open_storage


class SyntheticSource:
    """The built-in catalogue."""

    def __init__(self, config: DataConfig) -> None:
        self.fixed_labels: dict[str, float] = {}
        self._config = config
        version = {"generator": synthetic.GENERATOR_VERSION, **config.synthetic.model_dump(exclude={"num_days"})}
        self.partitions = tuple(
            Partition(name, (InputFile(f"{name}/synthetic", "synthetic", fingerprint({"day": name, **version})),))
            for name in synthetic.partitions(config.synthetic)
        )

    def num_rows(self) -> int | None:
        made = self._config.synthetic
        return made.num_queries * made.num_days * made.candidates_per_query

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        plan = _narrow(plan_columns(self._config, synthetic.SCHEMA.names, "the synthetic catalogue"), fields)
        size, first = batch_rows(self._config.rows_per_chunk), 0
        for batch in synthetic.generate(self._config.synthetic, file.key.split("/")[0]):
            for start in range(0, len(batch), size):
                part = batch.slice(start, size)
                columns = dict(zip(part.schema.names, part.columns, strict=True))
                yield RawBatch(to_fields(columns, plan), np.arange(first, first + len(part), dtype=np.int64))
                first += len(part)


class FileSource:
    """Parquet, CSV and JSON lines files."""

    def __init__(self, config: DataConfig, storage: Storage, partitions: tuple[Partition, ...]) -> None:
        self._config, self._storage, self.partitions = config, storage, partitions
        self.fixed_labels: dict[str, float] = {}

    def num_rows(self) -> int | None:
        files = [file for partition in self.partitions for file in partition.files]
        if any(file.format != "parquet" for file in files) or len(files) > 1000:
            return None
        return sum(parquet_rows(self._storage, file.key) for file in files)

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        uri = self._storage.uri(file.key)
        yield from read_file(
            self._storage,
            file.key,
            file.format,
            lambda names: _narrow(plan_columns(self._config, names, uri), fields),
            batch_rows(self._config.rows_per_chunk),
        )


def _narrow(plan: ColumnPlan, fields: Sequence[str] | None) -> ColumnPlan:
    return plan if fields is None else plan.only(fields)


def open_source(config: DataConfig, *, scratch: Path, stop: StopSignal) -> Source:
    """The input that the settings name. Raises DataError when there is nothing to read."""
    if config.path is None:
        return SyntheticSource(config)
    storage, stats = find_files(config.path, stop)
    names = [stat.key.rsplit("/", 1)[-1] for stat in stats]
    if config.format == "esci" or (config.format == "auto" and ESCI_EXAMPLES in names):
        return open_esci(config, storage, stats, scratch=scratch, stop=stop)
    chosen = [(stat, name) for stat in stats if (name := _format_of(stat.key, config.format))]
    if not chosen:
        raise DataError(
            f"no input file below {config.path}; seen: {', '.join(names[:5]) or 'nothing'}",
            expected="*.parquet, *.csv or *.jsonl files, flat or in dt=YYYY-MM-DD/ folders",
            next_command="correct --data.path, or set --data.format for files with another suffix",
        )
    ids = content_ids(storage, [stat for stat, _ in chosen], stop)
    files = [
        InputFile(stat.key, name, content, stat.size_bytes) for (stat, name), content in zip(chosen, ids, strict=True)
    ]
    return FileSource(config, storage, group_by_day(files, config.path))


def _format_of(key: str, wanted: str) -> str | None:
    by_suffix = suffix_format(key)
    return by_suffix if wanted == "auto" or by_suffix not in (None, wanted) else wanted


def find_files(
    path: str, stop: StopSignal, setting: str = "--data.path", retry: RetryPolicy | None = None
) -> tuple[Storage, list[ObjectStat]]:
    """The storage to read from and its visible files. Hidden ones (`_SUCCESS`, `.crc`) are left out.

    Raises DataError, naming the `setting`, for a path that does not exist.
    """
    parent, _, name = path.rstrip("/").rpartition("/")
    if name and (parent or "://" not in path) and not (path.startswith("s3://") and not urlsplit(path).path.strip("/")):
        storage = open_storage(parent or ("/" if path.startswith("/") else "."), retry=retry, stop=stop)
        if stat := storage.stat(name):
            return storage, [stat]
    local = path.removeprefix("file://")
    if "://" not in local and not Path(local).expanduser().exists():
        raise DataError(
            f"{path} does not exist",
            expected="a file or folder with rows",
            next_command=f"correct {setting}, or leave it out",
        )
    storage = open_storage(path, retry=retry, stop=stop)
    return storage, [stat for stat in storage.list("") if not any(p[:1] in "_." for p in stat.key.split("/"))]
