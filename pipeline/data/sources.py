"""Where rows come from: files below a path, in days; the ESCI layout; or the synthetic catalogue."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data import esci, synthetic
from pipeline.data.config import DataConfig
from pipeline.data.readers import Planner, object_version, parquet_rows, read_file, suffix_format, version_of
from pipeline.data.rows import (
    BadRow,
    ColumnPlan,
    RawBatch,
    batch_rows,
    feature_pairs,
    plan_columns,
    shorten,
    text_characters,
    to_fields,
)
from pipeline.io.commit import record_of
from pipeline.io.paths import user_path
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import ObjectStat, Storage, open_storage, os_errors, place_of

FLAT = "flat"
_MAX_FOOTERS = 1000
"""Of Parquet files that are read to count rows."""
_DAY = re.compile(r"dt=(\d{4}-\d{2}-\d{2})")


@dataclass(frozen=True)
class InputFile:
    """A file to read; `key` is relative to the input's root. `content_id` changes when its content does.

    `version` tells that without reading it, but only since it was listed.
    """

    key: str
    format: str
    content_id: str
    size_bytes: int = 0
    version: str | None = None


@dataclass(frozen=True)
class Files:
    """The files of a table and the format of each. The one reader of what a path in the settings names."""

    storage: Storage
    found: tuple[tuple[ObjectStat, str], ...]

    def __post_init__(self) -> None:
        """Raises DataError for a name that is not UTF-8: it could not stand in what is stored of a file."""
        for stat, _ in self.found:
            try:
                stat.key.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"the name of an input file is not UTF-8: {shorten(stat.key)}",
                    expected="names in UTF-8",
                    next_command="rename it (convmv -f latin1 -t utf8), or move it out of the input",
                ) from error

    @cached_property
    def inputs(self) -> tuple[InputFile, ...]:
        """The files with what names their content: the xxh3 of a local one (times lie), ETag and size on S3."""
        storage, inputs = self.storage, list[InputFile]()
        size_bytes = sum(stat.size_bytes for stat, _ in self.found)
        with progress("looking for changes in the input", size_bytes, "bytes") as advance:
            for stat, name in self.found:
                content = version = object_version(stat)
                if storage.local_path(stat.key) is not None:
                    version = version_of(storage, stat.key)
                    with storage.open_read(stat.key) as file:
                        content = record_of(file, storage.stop, advance).xxh3_128
                inputs.append(InputFile(stat.key, name, content, stat.size_bytes, version))
        return tuple(inputs)

    def read(self, plan: Callable[[str], Planner], num_rows: int, doing: str) -> Iterator[RawBatch]:
        """All rows, at most `num_rows` at a time. `plan`: given the URI of a file, what is read of it."""
        with progress(doing, sum(stat.size_bytes for stat, _ in self.found), "bytes") as advance:
            for stat, name in self.found:
                uri = self.storage.uri(stat.key)
                for batch in read_file(self.storage, stat.key, name, plan(uri), num_rows):
                    self.storage.stop.raise_if_set(f"reading {uri}")
                    advance(batch.input_bytes)
                    yield batch


def open_files(
    path: str, wanted: str, stop: StopSignal, setting: str = "--data.path", retry: RetryPolicy | None = None
) -> Files:
    """The files below a path that can be read, by suffix or (without a known one) as the `wanted` format.

    Raises DataError, naming the `setting`, when there is none.
    """
    storage, stats = find_files(path, stop, setting, retry)
    return choose_files(storage, stats, wanted, path, setting)


def choose_files(
    storage: Storage, stats: Sequence[ObjectStat], wanted: str, path: str, setting: str = "--data.path"
) -> Files:
    found: list[tuple[ObjectStat, str]] = []
    for stat in stats:
        name = suffix_format(stat.key)
        if wanted != "auto" and name in (None, wanted):
            name = wanted
        if name:
            found.append((stat, name))
    if not found:
        raise DataError(
            f"no input file below {path}; seen: {', '.join(shorten(stat.key) for stat in stats[:5]) or 'nothing'}",
            expected="*.parquet, *.csv or *.jsonl files",
            next_command=f"correct {setting}, or set {setting.rpartition('.')[0]}.format for files of another suffix",
        )
    return Files(storage, tuple(found))


def find_files(
    path: str, stop: StopSignal, setting: str = "--data.path", retry: RetryPolicy | None = None
) -> tuple[Storage, list[ObjectStat]]:
    """The storage to read from and its visible files. Hidden ones (`_SUCCESS`, `.crc`) are left out.

    Raises DataError, naming the `setting`, for a path that does not exist.
    """
    is_local = "://" not in path or path.startswith("file:///")
    local = user_path(path.removeprefix("file://") if is_local else "/")
    with os_errors("looking at", path):
        may_be_file = not local.is_dir() if is_local else bool(urlsplit(path).path.strip("/"))
        is_missing = is_local and not local.exists()
    if is_missing:
        raise DataError(
            f"{path} does not exist",
            expected="a file or folder with rows",
            next_command=f"correct {setting}, or leave it out",
        )
    if may_be_file:
        storage, name = place_of(path, retry=retry or RetryPolicy(), stop=stop)
        if stat := storage.stat(name):
            return storage, [stat]
    storage = open_storage(path, retry=retry, stop=stop)
    return storage, [stat for stat in storage.list("") if not any(p[:1] in "_." for p in stat.key.split("/"))]


# An input of training: partitions of files, and the rows of each file.


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


def group_by_day(files: Sequence[InputFile], path: str, extra_ids: tuple[str, ...] = ()) -> tuple[Partition, ...]:
    """Partitions in order of date, or the one called `flat`. Raises DataError when both are mixed, or for no date."""
    days: dict[str, list[InputFile]] = {}
    for file in files:
        match = _DAY.fullmatch(file.key.split("/")[0])
        days.setdefault(match.group(0) if match else FLAT, []).append(file)
    for name in days.keys() - {FLAT}:
        try:
            date.fromisoformat(name.removeprefix("dt="))
        except ValueError as error:
            raise DataError(
                f"{path} holds {name}, which is no day: {error}",
                expected="dt=YYYY-MM-DD: days are trained in their order",
                next_command=f"rename {name}",
            ) from error
    if FLAT in days and len(days) > 1:
        raise DataError(
            f"{path} holds dt= folders and also {days[FLAT][0].key}",
            expected="either dt=YYYY-MM-DD/ folders or a flat folder",
            next_command=f"move {days[FLAT][0].key} into a dt= folder",
        )
    return tuple(Partition(name, tuple(days[name]), extra_ids) for name in sorted(days))


class Source(Protocol):
    """An input. `read` yields the rows of a file in their one order, cut to the columns of some fields (None: all).

    It raises DataError, and TransientError for a file that was changed since it was listed.
    """

    @property
    def partitions(self) -> tuple[Partition, ...]: ...
    @property
    def fixed_labels(self) -> Mapping[str, float]:
        """Labels this layout defines, least relevant first, with their gains; empty when the data decides."""

    def num_rows(self) -> int | None:
        """Rows of all files when that is cheap to know."""

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]: ...


@contextmanager
def reading_progress(
    doing: str, source: Source, files: Sequence[InputFile]
) -> Iterator[Callable[[RawBatch | None], None]]:
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


def open_source(config: DataConfig, *, scratch: Path, stop: StopSignal) -> Source:
    """The input that the settings name. Raises DataError when there is nothing to read."""
    if config.path is None:
        return SyntheticSource(config)
    storage, stats = find_files(config.path, stop)
    if _is_esci(config, stats):
        return _open_esci(config, storage, stats, scratch, stop)
    files = choose_files(storage, stats, config.format, config.path)
    return FileSource(config, storage, group_by_day(files.inputs, config.path))


def _is_esci(config: DataConfig, stats: Iterable[ObjectStat]) -> bool:
    names = (stat.key.rpartition("/")[2] for stat in stats)
    return config.format == "esci" or (config.format == "auto" and esci.EXAMPLES in names)


def list_input_objects(config: DataConfig, stop: StopSignal) -> frozenset[ObjectStat]:
    """What lies at the input's path, listed anew and not read; nothing for the synthetic catalogue."""
    return frozenset() if config.path is None else frozenset(find_files(config.path, stop)[1])


def input_rows(config: DataConfig, stop: StopSignal) -> int | None:
    """Rows of the input when that is cheap to know, without a look at contents. Raises DataError when there is none."""
    if config.path is None:
        return SyntheticSource(config).num_rows()
    storage, stats = find_files(config.path, stop)
    if _is_esci(config, stats):
        return None
    found = choose_files(storage, stats, config.format, config.path).found
    return _footer_rows(storage, [(stat.key, name) for stat, name in found])


def _footer_rows(storage: Storage, files: Sequence[tuple[str, str]]) -> int | None:
    """Rows of files with these keys and formats, unless that is much to read."""
    if any(name != "parquet" for _, name in files) or len(files) > _MAX_FOOTERS:
        return None
    return sum(parquet_rows(storage, key) for key, _ in files)


class SyntheticSource:
    fixed_labels: Mapping[str, float] = {}

    def __init__(self, config: DataConfig) -> None:
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
        plan = plan_columns(self._config, synthetic.SCHEMA.names, "the synthetic catalogue").only(fields)
        size, first = batch_rows(self._config.rows_per_chunk), 0
        for batch in synthetic.generate(self._config.synthetic, file.key.split("/")[0]):
            for start in range(0, len(batch), size):
                part = batch.slice(start, size)
                columns = dict(zip(part.schema.names, part.columns, strict=True))
                yield RawBatch(to_fields(columns, plan), np.arange(first, first + len(part), dtype=np.int64))
                first += len(part)


class FileSource:
    fixed_labels: Mapping[str, float] = {}

    def __init__(self, config: DataConfig, storage: Storage, partitions: tuple[Partition, ...]) -> None:
        self._config, self._storage, self.partitions = config, storage, partitions

    def num_rows(self) -> int | None:
        files = [(file.key, file.format) for partition in self.partitions for file in partition.files]
        return _footer_rows(self._storage, files)

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        uri = self._storage.uri(file.key)
        yield from read_file(
            self._storage,
            file.key,
            file.format,
            lambda names: plan_columns(self._config, names, uri).only(fields),
            batch_rows(self._config.rows_per_chunk),
            file.version,
        )


def _open_esci(
    config: DataConfig, storage: Storage, stats: Sequence[ObjectStat], scratch: Path, stop: StopSignal
) -> "EsciSource":
    """Find both files. Raises DataError when one is missing."""
    examples = [stat for stat in stats if stat.key.endswith(esci.EXAMPLES)]
    if not examples and len(stats) == 1:
        examples = list(stats)
    products = [stat for stat in stats if stat.key.endswith(esci.PRODUCTS)]
    if not products and (beside := storage.stat(esci.PRODUCTS)):
        products = [beside]
    if not examples or len(products) != 1:
        raise DataError(
            f"{config.path} holds {len(examples)} ESCI example files and {len(products)} product files",
            expected=f"{esci.EXAMPLES} (also in dt= folders) and one {esci.PRODUCTS}",
            next_command="set --data.path to the folder with both files",
        )
    *files, product = Files(storage, tuple((stat, "parquet") for stat in (*examples, *products))).inputs
    return EsciSource(config, storage, group_by_day(files, str(config.path), (product.content_id,)), product, scratch)


class EsciSource:
    """Examples with their products' titles. `text` is brand, colour, bullet points and description, in this order."""

    fixed_labels: Mapping[str, float] = esci.GAINS

    def __init__(
        self, config: DataConfig, storage: Storage, partitions: tuple[Partition, ...], products: InputFile, folder: Path
    ) -> None:
        self._config, self._storage, self.partitions = config, storage, partitions
        self._product_file, self._folder = products, folder / "esci"

    def num_rows(self) -> int | None:
        return sum(parquet_rows(self._storage, file.key) for part in self.partitions for file in part.files)

    @cached_property
    def _products(self) -> esci.ProductIndex:
        locale = self._config.esci_locale
        limit = 4 * text_characters(self._config.bucket_shapes)  # a character has at most 4 bytes
        folder = self._folder / fingerprint([self._product_file.content_id, locale, limit])
        file = self._product_file
        return esci.open_products(self._storage, file.key, folder, locale, limit, file.version)

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        """Rows of the wanted locale with title and text; rows without a product are bad."""
        plan = ColumnPlan((*esci.FIELDS.items(), *feature_pairs(self._config)))
        plan = plan.only(None if fields is None else [*fields, "product_id"])
        plan = ColumnPlan((*plan.pairs, ("locale", esci.LOCALE)))
        uri, num_rows = self._storage.uri(file.key), batch_rows(self._config.rows_per_chunk)
        for batch in read_file(
            self._storage, file.key, "parquet", lambda names: esci.checked(plan, names, uri), num_rows, file.version
        ):
            self._storage.stop.raise_if_set(f"reading {uri}")
            columns, rows = batch.columns, batch.rows
            if self._config.esci_locale:
                keep = pc.equal(columns["locale"], self._config.esci_locale.encode()).fill_null(False)
                columns, rows = columns.filter(keep), rows[keep.to_numpy(zero_copy_only=False)]
            ids, locales = columns["product_id"].to_pylist(), columns["locale"].to_pylist()
            titles, texts, found = self._products.look_up(ids, locales)
            columns = columns.append_column("title", pa.array(titles, pa.large_binary()))
            columns = columns.append_column("text", pa.array(texts, pa.large_binary()))
            yield replace(
                batch,
                columns=columns.filter(pa.array(found)).drop_columns(["locale"]),
                rows=rows[found],
                bad=tuple(
                    BadRow(file.key, int(rows[i]), esci.NO_PRODUCT, f"{ids[i]!r} in {locales[i]!r}")
                    for i in np.flatnonzero(~found)
                ),
                left_out=len(batch.rows) - len(rows),
            )
