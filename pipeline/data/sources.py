"""Open the input, which can be the files below a path, the ESCI dataset, or the synthetic catalogue."""

import errno
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.optional import missing_package
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data import synthetic
from pipeline.data.attributes import attribute_pairs
from pipeline.data.config import DataConfig
from pipeline.data.input_files import (
    Files,
    InputFile,
    InputPartition,
    Listing,
    choose_files,
    find_files,
    group_by_day,
    input_warnings,
    names_of,
)
from pipeline.data.readers import Planner, read_file, suffix_format
from pipeline.data.rows import (
    ColumnPlan,
    RawBatch,
    batch_rows,
    feature_pairs,
    plan_columns,
    split_by_error,
    text_characters,
    to_fields,
)
from pipeline.data.token_sets import QuarantinedRow
from pipeline.data.validate import filter_mask
from pipeline.io import atomic
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import ObjectStat, Storage, os_errors

ICEBERG = "iceberg://"


@dataclass(frozen=True)
class Source:
    """An input that has been opened.

    `reader` takes the settings, a file and the fields to read (None: all). If the dataset defines its own labels,
    `fixed_labels` contains their gains, least relevant first. Otherwise it is empty. `skipped` contains the keys of
    files below the path that are not read, and `warnings` describes potential problems with the input.
    """

    partitions: tuple[InputPartition, ...]
    config: DataConfig
    reader: Callable[[DataConfig, InputFile, Sequence[str] | None], Iterator[RawBatch]]
    fixed_labels: Mapping[str, float]
    skipped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def files(self) -> list[InputFile]:
        return [file for partition in self.partitions for file in partition.files]

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        """Yield the rows of a file in order, restricted to the given fields (None: all).

        Raises DataError if the file cannot be read, and TransientError if it has changed since it was listed.
        """
        return self.reader(self.config, file, fields)


@contextmanager
def reading_progress(doing: str, files: Sequence[InputFile]) -> Iterator[Callable[[RawBatch | None], None]]:
    """Display the progress of reading files.

    Yields a function that must be called with every batch. While waiting for something else, it can be called with None
    to keep the display up to date.
    """
    size_bytes = sum(file.size_bytes for file in files)
    with progress(doing, size_bytes or None, "bytes" if size_bytes else "rows") as advance:

        def advance_by(batch: RawBatch | None) -> None:
            advance((batch.input_bytes if size_bytes else batch.num_rows) if batch else 0)

        yield advance_by


def read_products(
    source: Source, stop: StopSignal, fields: Sequence[str] = ("product_id", "title", "text")
) -> Iterator[RawBatch]:
    """Yield the given fields of every row in the input, by default those that describe the product.

    Raises Preempted if a stop is requested. See `Source.read` for other errors.
    """
    with reading_progress("reading products", source.files) as advance:
        for file in source.files:
            for batch in source.read(file, fields):
                stop.raise_if_set(f"reading {file.key}")
                advance(batch)
                yield batch


def open_source(config: DataConfig, *, scratch: Path, stop: StopSignal, retry: RetryPolicy | None = None) -> Source:
    """Open the configured input. Raises DataError if it does not contain any data files."""
    if config.path is None:
        return _synthetic_source(config)
    if config.path.startswith(ICEBERG):
        storage, partitions = _iceberg().open_partitions(config.path, stop, retry)
        return Source(partitions, config, file_reader(storage), {})
    listing = find_files(config.path, stop, retry=retry)
    names = [stat.key.rpartition("/")[2] for stat in listing.stats]
    if config.format == "esci" or (config.format == "auto" and ESCI_EXAMPLES in names):
        return _open_esci(config, listing, scratch)
    files = choose_files(listing, config.format, config.path)
    warnings = input_warnings(files.inputs, files.skipped, config.path)
    partitions = group_by_day(files.inputs, config.path)
    return Source(partitions, config, file_reader(listing.storage), {}, files.skipped, warnings)


def list_input_objects(config: DataConfig, stop: StopSignal, retry: RetryPolicy | None = None) -> frozenset[ObjectStat]:
    """List the files of the input without reading them. The synthetic catalogue does not have any files."""
    if config.path is None:
        return frozenset()
    if config.path.startswith(ICEBERG):
        by_append = _iceberg().list_files(config.path, stop, retry)[1]
        return frozenset(stat for stats in by_append.values() for stat in stats)
    return frozenset(find_files(config.path, stop, retry=retry).stats)


def _iceberg() -> ModuleType:
    """Import the reader of Iceberg tables. Raises ConfigError if pyiceberg is not installed."""
    try:
        return import_module("pipeline.data.iceberg")
    except ImportError as error:
        raise missing_package("pyiceberg", f"data.path {ICEBERG}...", error) from error


def _synthetic_source(config: DataConfig) -> Source:
    version: dict[str, JsonValue] = {
        "generator": synthetic.GENERATOR_VERSION,
        "num_queries": config.synthetic.num_queries,
        "candidates_per_query": len(synthetic.GRADES),
        "first_day": str(synthetic.FIRST_DAY),
        "seed": synthetic.SEED,
    }
    partitions = tuple(
        InputPartition(name, (InputFile(f"{name}/synthetic", "synthetic", fingerprint({"day": name, **version})),))
        for name in synthetic.partitions(config.synthetic)
    )

    def read(config: DataConfig, file: InputFile, fields: Sequence[str] | None) -> Iterator[RawBatch]:
        plan = plan_columns(config, synthetic.SCHEMA.names, "the synthetic catalogue").only(fields)
        size, first = batch_rows(config.rows_per_chunk), 0
        for batch in synthetic.generate(config.synthetic, file.key.split("/")[0]):
            for start in range(0, len(batch), size):
                part = batch.slice(start, size)
                columns = dict(zip(part.schema.names, part.columns, strict=True))
                yield RawBatch(to_fields(columns, plan), np.arange(first, first + len(part), dtype=np.int64))
                first += len(part)

    return Source(partitions, config, read, {})


def file_reader(storage: Storage) -> Callable[[DataConfig, InputFile, Sequence[str] | None], Iterator[RawBatch]]:
    """Return a function that reads the files of a table."""

    def read(config: DataConfig, file: InputFile, fields: Sequence[str] | None) -> Iterator[RawBatch]:
        def plan(names: list[str]) -> ColumnPlan:
            return plan_columns(config, names, storage.uri(file.key)).only(fields)

        return read_file(storage, file.key, file.format, plan, batch_rows(config.rows_per_chunk), file.version)

    return read


# The Amazon Shopping Queries (ESCI) dataset consists of a file of examples, which has to be joined with a file of
# products on product id and locale. For this purpose, the product texts are stored in a SQLite database in the scratch
# folder, so that memory usage does not grow with the size of the catalogue.

ESCI_EXAMPLES = "shopping_queries_dataset_examples.parquet"
ESCI_PRODUCTS = "shopping_queries_dataset_products.parquet"
ESCI_SOURCES = "shopping_queries_dataset_sources.csv"  # the third file of the published dataset, which is not used
ESCI_GAINS = {"I": 0.0, "C": 0.01, "S": 0.1, "E": 1.0}
"""Gains of the four labels, least relevant first (Reddy et al., Shopping Queries Dataset, arXiv:2206.06588)."""
NO_PRODUCT = "product not among the products"
ESCI_LOCALE = "product_locale"
_ESCI_FIELDS = {
    "query": "query",
    "label": "esci_label",
    "query_id": "query_id",
    "product_id": "product_id",
    "split": "split",
    "locale": ESCI_LOCALE,
}
_ESCI_TEXTS = ("product_brand", "product_color", "product_bullet_point", "product_description")


def _open_esci(config: DataConfig, listing: Listing, scratch: Path) -> Source:
    """Open the ESCI dataset. Raises DataError if one of its files is missing, or if there are other data files."""
    storage, stats, path = listing.storage, listing.stats, str(config.path)
    if config.split_by != "query":
        raise split_by_error(path, _ESCI_FIELDS["split"], config.split_by)
    examples, products, others = list[ObjectStat](), list[ObjectStat](), list[str]()
    for stat in stats:
        name = stat.key.rpartition("/")[2]
        if name == ESCI_EXAMPLES or len(stats) == 1:
            examples.append(stat)
        elif name == ESCI_PRODUCTS:
            products.append(stat)
        else:
            others.append(stat.key)
    if not products and (sibling := storage.stat(ESCI_PRODUCTS)):
        products = [sibling]
    unread = [key for key in others if suffix_format(key) and not key.endswith(ESCI_SOURCES)]
    if not examples or len(products) != 1 or unread:
        raise DataError(
            f"{path} has {len(examples)} ESCI example files and {len(products)} product files"
            f" (other data files: {names_of(unread) or 'none'})",
            expected=f"{ESCI_EXAMPLES} (also in dt= folders), one {ESCI_PRODUCTS}, and no other data files",
            next_command="set --data.path to a folder with only these files",
        )
    *files, product = Files(storage, tuple((stat, "parquet") for stat in (*examples, *products))).inputs
    skipped = (*listing.skipped, *others)
    limit = 4 * text_characters(config.bucket_shapes)  # UTF-8 uses at most 4 bytes per character
    table = EsciProducts(storage, product, scratch / "esci", limit)
    return Source(
        group_by_day(files, path, (product.content_id,)),
        config,
        partial(_read_esci, table),
        ESCI_GAINS,
        skipped,
        input_warnings(files, skipped, path),
    )


def _read_esci(
    products: "EsciProducts", config: DataConfig, file: InputFile, fields: Sequence[str] | None
) -> Iterator[RawBatch]:
    """Yield the examples, joined with the titles and texts of their products.

    An example whose product does not exist is yielded as a bad row.
    """
    attributes = attribute_pairs(config.attributes, (), "the ESCI dataset")  # brand and colour are part of the text
    plan = ColumnPlan((*_ESCI_FIELDS.items(), *feature_pairs(config), *attributes))
    plan = plan.only(None if fields is None else [*fields, "product_id", "locale"])
    storage, num_rows = products.storage, batch_rows(config.rows_per_chunk)
    planner = _esci_planner(plan, storage.uri(file.key))
    for batch in read_file(storage, file.key, "parquet", planner, num_rows, file.version):
        storage.stop.raise_if_set(f"reading {storage.uri(file.key)}")
        columns = batch.columns
        ids, locales = columns["product_id"].to_pylist(), columns["locale"].to_pylist()
        matches = [products.look_up(*key) for key in zip(ids, locales, strict=True)]
        for position, name in enumerate(("title", "text")):
            values = [product and product[position] for product in matches]
            columns = columns.append_column(name, pa.array(values, pa.large_binary()))
        is_missing = np.array([product is None for product in matches], dtype=np.bool_)
        is_bad = is_missing & filter_mask(columns, config.filter)
        bad = tuple(
            QuarantinedRow(
                file=file.key, row=int(batch.rows[i]), reason=NO_PRODUCT, content=f"{ids[i]!r} in {locales[i]!r}"
            )
            for i in np.flatnonzero(is_bad)
        )
        columns = columns.filter(pa.array(~is_bad)).drop_columns(["locale"])
        yield replace(batch, columns=columns, rows=batch.rows[~is_bad], bad=bad)


@dataclass(frozen=True)
class EsciProducts:
    """An on-disk index of the titles and texts of all ESCI products.

    The text of a product consists of its brand, colour, bullet points and description, truncated to `limit` bytes.
    """

    storage: Storage
    file: InputFile
    folder: Path
    limit: int

    @cached_property
    def index(self) -> sqlite3.Connection:
        """Return a connection to the database. The first process that needs the database builds it."""
        folder = self.folder / fingerprint([self.file.content_id, self.limit])
        path = folder / "products.db"
        with os_errors("writing", f"file://{folder}"), atomic.exclusive(folder / "index.lock", self.storage.stop):
            if not path.exists():
                self.write_index(path.with_suffix(".tmp"))
                path.with_suffix(".tmp").replace(path)
        return sqlite3.connect(path, check_same_thread=False)

    def look_up(self, product_id: bytes | None, locale: bytes | None) -> tuple[bytes, bytes] | None:
        """Return the title and the text of a product, or None if it does not exist."""
        statement = "SELECT title, text FROM products WHERE id = ? AND locale = ?"
        row: tuple[bytes, bytes] | None = self.index.execute(statement, (product_id or b"", locale or b"")).fetchone()
        return row

    def write_index(self, path: Path) -> None:
        """Write the database. If a product occurs more than once, its first occurrence is used.

        Raises OSError if writing fails. See `read_file` for other errors.
        """
        uri, stop = self.storage.uri(self.file.key), self.storage.stop

        def plan(names: list[str]) -> ColumnPlan:
            texts = [column for column in _ESCI_TEXTS if column in names]
            required = ("product_id", ESCI_LOCALE, "product_title", *texts)
            return _esci_planner(ColumnPlan(tuple((column, column) for column in required)), uri)(names)

        path.unlink(missing_ok=True)
        with (
            closing(sqlite3.connect(path, isolation_level=None)) as table,
            progress("indexing products", self.file.size_bytes or None, "bytes") as advance,
        ):
            try:
                table.execute("PRAGMA journal_mode = OFF")  # safe because an incomplete database is never used
                table.execute("CREATE TABLE products (id, locale, title, text, PRIMARY KEY (id, locale))")
                for batch in read_file(self.storage, self.file.key, "parquet", plan, 4096, self.file.version):
                    stop.raise_if_set(f"indexing {uri}")
                    advance(batch.input_bytes)
                    table.execute("BEGIN")
                    table.executemany("INSERT OR IGNORE INTO products VALUES (?, ?, ?, ?)", self._rows(batch))
                    table.execute("COMMIT")
            except sqlite3.OperationalError as error:
                raise OSError(errno.ENOSPC if "full" in str(error) else errno.EIO, str(error), str(path)) from error

    def _rows(self, batch: RawBatch) -> Iterator[tuple[bytes, ...]]:
        for product_id, locale, title, *texts in zip(*batch.columns.to_pydict().values(), strict=True):
            text = b" ".join(filter(None, texts))
            if len(text) > self.limit:  # decode to avoid cutting a multi-byte character in half
                text = text[: self.limit].decode("utf-8", "ignore").encode()
            yield product_id or b"", locale or b"", title or b"", text


def _esci_planner(plan: ColumnPlan, uri: str) -> Planner:
    def check(names: list[str]) -> ColumnPlan:
        if missing := [column for column in plan.inputs if column not in names]:
            raise DataError(
                f"{uri} has no column {', '.join(map(repr, missing))}",
                expected=f"the columns of the ESCI dataset (the file has {', '.join(names)})",
                next_command="download the file again, or set --data.format parquet",
            )
        return plan

    return check
