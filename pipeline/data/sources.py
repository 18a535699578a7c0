"""The source of rows: files of a path, the ESCI layout, or the synthetic catalogue."""

import errno
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data import synthetic
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
from pipeline.data.readers import read_file, suffix_format
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
from pipeline.data.validate import filter_mask
from pipeline.io import atomic
from pipeline.io.storage import ObjectStat, Storage, os_errors


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

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]: ...


@contextmanager
def reading_progress(doing: str, files: Sequence[InputFile]) -> Iterator[Callable[[RawBatch | None], None]]:
    """Show the progress of reading files. Yields a function to call with every batch, and with None while waiting.

    Counts bytes, or rows without a total if they are generated.
    """
    size_bytes = sum(file.size_bytes for file in files)
    with progress(doing, size_bytes or None, "bytes" if size_bytes else "rows") as advance:

        def tell(batch: RawBatch | None) -> None:
            advance((batch.input_bytes if size_bytes else batch.num_rows) if batch else 0)

        yield tell


def open_source(config: DataConfig, *, scratch: Path, stop: StopSignal) -> Source:
    """Open the input that the settings name. Raises DataError if there is nothing to read."""
    if config.path is None:
        return SyntheticSource(config)
    listing = find_files(config.path, stop)
    if _is_esci(config, listing.stats):
        return _open_esci(config, listing, scratch)
    files = choose_files(listing, config.format, config.path)
    warnings = input_warnings(files.inputs, files.passed_over, config.path)
    partitions = group_by_day(files.inputs, config.path)
    return FileSource(config, listing.storage, partitions, files.passed_over, warnings)


def _is_esci(config: DataConfig, stats: Iterable[ObjectStat]) -> bool:
    return config.format == "esci" or (
        config.format == "auto" and any(stat.key.rpartition("/")[2] == ESCI_EXAMPLES for stat in stats)
    )


def list_input_objects(config: DataConfig, stop: StopSignal) -> frozenset[ObjectStat]:
    """List the input's path without reading anything; nothing for the synthetic catalogue."""
    return frozenset() if config.path is None else frozenset(find_files(config.path, stop).stats)


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

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        uri, num_rows = self.storage.uri(file.key), batch_rows(self.config.rows_per_chunk)

        def plan(names: list[str]) -> ColumnPlan:
            return plan_columns(self.config, names, uri).only(fields)

        yield from read_file(self.storage, file.key, file.format, plan, num_rows, file.version)


# The Amazon Shopping Queries (ESCI) layout: a file of examples, joined with a file of products on id and locale. The
# texts of the products are in a SQLite file below scratch, so memory does not grow with them.

ESCI_EXAMPLES = "shopping_queries_dataset_examples.parquet"
ESCI_PRODUCTS = "shopping_queries_dataset_products.parquet"
ESCI_SOURCES = "shopping_queries_dataset_sources.csv"
"""Third file of the published folder, which is not read."""
ESCI_GAINS = {"I": 0.0, "C": 0.01, "S": 0.1, "E": 1.0}
"""Gains of the four judgements, least relevant first (Reddy et al., Shopping Queries Dataset, arXiv:2206.06588)."""
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


def _open_esci(config: DataConfig, listing: Listing, scratch: Path) -> "EsciSource":
    """Find both files. Raises DataError if one is missing, or if other files hold rows."""
    storage, stats, path = listing.storage, listing.stats, str(config.path)
    names = [stat.key.rpartition("/")[2] for stat in stats]
    examples = [stat for stat, name in zip(stats, names, strict=True) if name == ESCI_EXAMPLES]
    products = [stat for stat, name in zip(stats, names, strict=True) if name == ESCI_PRODUCTS]
    if not examples and len(stats) == 1:
        examples = list(stats)
    others = [stat.key for stat in stats if stat not in (*examples, *products)]
    if not products and (neighbour := storage.stat(ESCI_PRODUCTS)):
        products = [neighbour]
    unread = [key for key in others if suffix_format(key) and not key.endswith(ESCI_SOURCES)]
    if not examples or len(products) != 1 or unread:
        seen = f"{len(examples)} ESCI example files and {len(products)} product files"
        raise DataError(
            f"{path} holds {seen}" + (f", and others with rows: {names_of(unread)}" if unread else ""),
            expected=f"{ESCI_EXAMPLES} (also in dt= folders) and one {ESCI_PRODUCTS}, nothing else with rows",
            next_command="set --data.path to the folder with these files alone",
        )
    *files, product = Files(storage, tuple((stat, "parquet") for stat in (*examples, *products))).inputs
    passed_over = (*listing.passed_over, *others)
    partitions = group_by_day(files, path, (product.content_id,))
    warnings = input_warnings(files, passed_over, path)
    return EsciSource(config, storage, partitions, product, scratch / "esci", passed_over, warnings)


@dataclass(frozen=True)
class EsciSource:
    """Examples with their products' titles. `text` is brand, colour, bullet points and description, in this order."""

    config: DataConfig
    storage: Storage
    partitions: tuple[Partition, ...]
    products: InputFile
    folder: Path
    passed_over: tuple[str, ...]
    warnings: tuple[str, ...]
    fixed_labels: ClassVar[Mapping[str, float]] = ESCI_GAINS

    @cached_property
    def index(self) -> sqlite3.Connection:
        """A table of products in a file, which one process at a time builds and which appears whole."""
        limit = 4 * text_characters(self.config.bucket_shapes)  # a character has at most 4 bytes
        folder = self.folder / fingerprint([self.products.content_id, limit])
        path = folder / "products.db"
        with os_errors("writing", f"file://{folder}"), atomic.exclusive(folder / "index.lock", self.storage.stop):
            if not path.exists():
                _index_products(self.storage, self.products, path.with_suffix(".tmp"), limit)
                path.with_suffix(".tmp").replace(path)
        return sqlite3.connect(path, check_same_thread=False)

    def look_up(self, product_id: bytes | None, locale: bytes | None) -> tuple[bytes, bytes] | None:
        """Return the title and the text of a product; None if it does not exist."""
        wanted = "SELECT title, text FROM products WHERE id = ? AND locale = ?"
        found: tuple[bytes, bytes] | None = self.index.execute(wanted, (product_id or b"", locale or b"")).fetchone()
        return found

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        """Yield rows with title and text; rows without a product are bad."""
        plan = ColumnPlan((*_ESCI_FIELDS.items(), *feature_pairs(self.config)))
        plan = plan.only(None if fields is None else [*fields, "product_id", "locale"])
        uri, num_rows = self.storage.uri(file.key), batch_rows(self.config.rows_per_chunk)
        for batch in read_file(
            self.storage, file.key, "parquet", lambda names: _checked(plan, names, uri), num_rows, file.version
        ):
            self.storage.stop.raise_if_set(f"reading {uri}")
            columns = batch.columns
            ids, locales = columns["product_id"].to_pylist(), columns["locale"].to_pylist()
            products = [self.look_up(*key) for key in zip(ids, locales, strict=True)]
            for place, name in enumerate(("title", "text")):
                values = [product and product[place] for product in products]
                columns = columns.append_column(name, pa.array(values, pa.large_binary()))
            is_missing = np.array([product is None for product in products], dtype=np.bool_)
            is_bad = is_missing & filter_mask(columns, self.config.filter)
            bad = tuple(
                BadRow(file.key, int(batch.rows[i]), NO_PRODUCT, f"{ids[i]!r} in {locales[i]!r}")
                for i in np.flatnonzero(is_bad)
            )
            columns = columns.filter(pa.array(~is_bad)).drop_columns(["locale"])
            yield replace(batch, columns=columns, rows=batch.rows[~is_bad], bad=bad)


def _index_products(storage: Storage, products: InputFile, path: Path, limit: int) -> None:
    """Write titles, and texts cut to `limit` bytes; of equal products the first. Raises as read_file(), and OSError."""
    uri = storage.uri(products.key)

    def plan(names: Sequence[str]) -> ColumnPlan:
        wanted = ("product_id", ESCI_LOCALE, "product_title", *(column for column in _ESCI_TEXTS if column in names))
        return _checked(ColumnPlan(tuple((column, column) for column in wanted)), names, uri)

    def rows(batch: RawBatch) -> Iterator[tuple[bytes, ...]]:
        columns = batch.columns.to_pydict()
        texts = [columns[column] for column in _ESCI_TEXTS if column in columns]
        keys = zip(columns["product_id"], columns[ESCI_LOCALE], columns["product_title"], strict=True)
        for row, key in enumerate(keys):
            text = b" ".join(filter(None, (column[row] for column in texts)))
            if len(text) > limit:  # never cut inside a character
                text = text[:limit].decode("utf-8", "ignore").encode()
            yield (*(value or b"" for value in key), text)

    path.unlink(missing_ok=True)
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as table,
        progress("indexing products", products.size_bytes or None, "bytes") as advance,
    ):
        try:
            table.execute("PRAGMA journal_mode = OFF")  # a half-built file is never used
            table.execute("CREATE TABLE products (id, locale, title, text, PRIMARY KEY (id, locale))")
            for batch in read_file(storage, products.key, "parquet", plan, 4096, products.version):
                storage.stop.raise_if_set(f"indexing {uri}")
                advance(batch.input_bytes)
                table.execute("BEGIN")
                table.executemany("INSERT OR IGNORE INTO products VALUES (?, ?, ?, ?)", rows(batch))
                table.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise OSError(errno.ENOSPC if "full" in str(error) else errno.EIO, str(error), str(path)) from error


def _checked(plan: ColumnPlan, names: Sequence[str], uri: str) -> ColumnPlan:
    if missing := [column for column in plan.inputs if column not in names]:
        raise DataError(
            f"{uri} has no column {', '.join(map(repr, missing))}",
            expected="the ESCI columns; seen: " + ", ".join(names),
            next_command="download the file again, or set --data.format parquet",
        )
    return plan
