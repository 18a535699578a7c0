"""Where rows come from: files of a path; the ESCI layout; or the synthetic catalogue."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data import esci, synthetic
from pipeline.data.config import DataConfig
from pipeline.data.input_files import (
    Files,
    InputFile,
    Listing,
    Partition,
    choose_files,
    find_files,
    group_by_day,
    input_warnings,
    names_of,
)
from pipeline.data.readers import parquet_rows, read_file, suffix_format
from pipeline.data.rows import (
    BadRow,
    ColumnPlan,
    RawBatch,
    batch_rows,
    feature_pairs,
    plan_columns,
    text_characters,
    to_fields,
)
from pipeline.io.storage import ObjectStat, Storage

_MAX_FOOTERS = 1000
"""Of Parquet files that are read to count rows."""


class Source(Protocol):
    """An input. `read` yields the rows of a file in their one order, cut to the columns of some fields (None: all).

    It raises DataError, and TransientError for a file that was changed since it was listed.
    """

    @property
    def partitions(self) -> tuple[Partition, ...]: ...
    @property
    def passed_over(self) -> tuple[str, ...]:
        """Keys of files below the path that were not read."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of the input."""

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
    listing = find_files(config.path, stop)
    if _is_esci(config, listing.stats):
        return _open_esci(config, listing, scratch, stop)
    files = choose_files(listing, config.format, config.path)
    warnings = input_warnings(files.inputs, files.passed_over, config.path)
    partitions = group_by_day(files.inputs, config.path)
    return FileSource(config, listing.storage, partitions, files.passed_over, warnings)


def _is_esci(config: DataConfig, stats: Iterable[ObjectStat]) -> bool:
    return config.format == "esci" or (config.format == "auto" and esci.EXAMPLES in map(_name, stats))


def _name(stat: ObjectStat) -> str:
    return stat.key.rpartition("/")[2]


def list_input_objects(config: DataConfig, stop: StopSignal) -> frozenset[ObjectStat]:
    """What lies at the input's path, listed anew and not read; nothing for the synthetic catalogue."""
    return frozenset() if config.path is None else frozenset(find_files(config.path, stop).stats)


def input_rows(config: DataConfig, stop: StopSignal) -> int | None:
    """Rows of the input when that is cheap to know, without a look at contents. Raises DataError when there is none."""
    if config.path is None:
        return SyntheticSource(config).num_rows()
    listing = find_files(config.path, stop)
    if _is_esci(config, listing.stats):
        return None
    found = choose_files(listing, config.format, config.path).found
    return _footer_rows(listing.storage, [(stat.key, name) for stat, name in found])


def _footer_rows(storage: Storage, files: Sequence[tuple[str, str]]) -> int | None:
    """Rows of files with these keys and formats, unless that is much to read."""
    if any(name != "parquet" for _, name in files) or len(files) > _MAX_FOOTERS:
        return None
    return sum(parquet_rows(storage, key) for key, _ in files)


class SyntheticSource:
    fixed_labels: Mapping[str, float] = {}
    passed_over: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

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

    def __init__(
        self,
        config: DataConfig,
        storage: Storage,
        partitions: tuple[Partition, ...],
        passed_over: tuple[str, ...] = (),
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._config, self._storage, self.partitions = config, storage, partitions
        self.passed_over, self.warnings = passed_over, warnings

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


def _open_esci(config: DataConfig, listing: Listing, scratch: Path, stop: StopSignal) -> "EsciSource":
    """Find both files. Raises DataError when one is missing, or when others hold rows."""
    storage, stats, path = listing.storage, listing.stats, str(config.path)
    examples = [stat for stat in stats if _name(stat) == esci.EXAMPLES]
    if not examples and len(stats) == 1:
        examples = list(stats)
    products = [stat for stat in stats if _name(stat) == esci.PRODUCTS]
    others = [stat.key for stat in stats if stat not in (*examples, *products)]
    if not products and (beside := storage.stat(esci.PRODUCTS)):
        products = [beside]
    if not examples or len(products) != 1:
        raise DataError(
            f"{path} holds {len(examples)} ESCI example files and {len(products)} product files",
            expected=f"{esci.EXAMPLES} (also in dt= folders) and one {esci.PRODUCTS}",
            next_command="set --data.path to the folder with both files",
        )
    if unread := [key for key in others if suffix_format(key) and not key.endswith(esci.SOURCES)]:
        raise DataError(
            f"{path} holds files that the ESCI layout does not have: {names_of(unread)}",
            expected=f"{esci.EXAMPLES} (also in dt= folders) and one {esci.PRODUCTS}, nothing else with rows",
            next_command="name the folder of these two with --data.path, or move the others out of it",
        )
    *files, product = Files(storage, tuple((stat, "parquet") for stat in (*examples, *products))).inputs
    passed_over = (*listing.passed_over, *others)
    partitions = group_by_day(files, path, (product.content_id,))
    warnings = input_warnings(files, passed_over, path)
    return EsciSource(config, storage, partitions, product, scratch, passed_over, warnings)


class EsciSource:
    """Examples with their products' titles. `text` is brand, colour, bullet points and description, in this order."""

    fixed_labels: Mapping[str, float] = esci.GAINS

    def __init__(
        self,
        config: DataConfig,
        storage: Storage,
        partitions: tuple[Partition, ...],
        products: InputFile,
        folder: Path,
        passed_over: tuple[str, ...],
        warnings: tuple[str, ...],
    ) -> None:
        self._config, self._storage, self.partitions = config, storage, partitions
        self._product_file, self._folder = products, folder / "esci"
        self.passed_over, self.warnings = passed_over, warnings

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
