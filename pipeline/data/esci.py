"""The Amazon Shopping Queries (ESCI) layout: examples joined with products on product_id and product_locale.

Memory: 24 bytes per product for the index (44 MB for the 1.8 M products of the full set), three times that while it is
built, and one chunk of rows. The product texts lie in one file below scratch and are looked up through a memory map, so
the operating system may drop them.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.encode import text_characters
from pipeline.data.partitions import InputFile, Partition, content_ids, group_by_day
from pipeline.data.readers import parquet_rows, read_file
from pipeline.data.rows import CATEGORICAL, FILTER, NUMERIC, SLICE, BadRow, ColumnPlan, RawBatch, batch_rows
from pipeline.io.storage import ObjectStat, Storage

ESCI_EXAMPLES = "shopping_queries_dataset_examples.parquet"
ESCI_PRODUCTS = "shopping_queries_dataset_products.parquet"
GAINS = {"I": 0.0, "C": 0.01, "S": 0.1, "E": 1.0}
"""Gains of the four judgements, least relevant first (Reddy et al., Shopping Queries Dataset, arXiv:2206.06588)."""

NO_PRODUCT = "product not among the products"
_FIELDS = {
    "query": "query",
    "label": "esci_label",
    "query_id": "query_id",
    "product_id": "product_id",
    "split": "split",
}
_LOCALE = "product_locale"
_TEXT_COLUMNS = ("product_brand", "product_color", "product_bullet_point", "product_description")


def open_esci(
    config: DataConfig, storage: Storage, stats: Sequence[ObjectStat], *, scratch: Path, stop: StopSignal
) -> "EsciSource":
    """Find both files. Raises DataError when one is missing."""
    examples = [stat for stat in stats if stat.key.endswith(ESCI_EXAMPLES)]
    if not examples and len(stats) == 1:
        examples = list(stats)
    products = [stat for stat in stats if stat.key.endswith(ESCI_PRODUCTS)]
    if not products and (beside := storage.stat(ESCI_PRODUCTS)):
        products = [beside]
    if not examples or len(products) != 1:
        raise DataError(
            f"{config.path} holds {len(examples)} ESCI example files and {len(products)} product files",
            expected=f"{ESCI_EXAMPLES} (also in dt= folders) and one {ESCI_PRODUCTS}",
            next_command="set --data.path to the folder with both files",
        )
    *ids, product_id = content_ids(storage, [*examples, products[0]], stop)
    files = [
        InputFile(stat.key, "parquet", content, stat.size_bytes) for stat, content in zip(examples, ids, strict=True)
    ]
    partitions = group_by_day(files, str(config.path), (product_id,))
    return EsciSource(config, storage, partitions, products[0].key, scratch / "esci", stop)


class EsciSource:
    """Examples with their products' titles. `text` is brand, colour, bullet points and description, in this order."""

    fixed_labels = GAINS

    def __init__(
        self,
        config: DataConfig,
        storage: Storage,
        partitions: tuple[Partition, ...],
        products: str,
        scratch: Path,
        stop: StopSignal,
    ) -> None:
        self._config, self._storage, self.partitions = config, storage, partitions
        self._products_key, self._scratch, self._stop = products, scratch, stop
        self._products: ProductIndex | None = None

    def num_rows(self) -> int | None:
        return sum(parquet_rows(self._storage, file.key) for part in self.partitions for file in part.files)

    def _index(self) -> "ProductIndex":
        if self._products is None:
            limit = 4 * text_characters(self._config.bucket_shapes)  # a character has at most 4 bytes
            name = fingerprint([self.partitions[0].extra_ids[0], self._config.esci_locale, limit])
            folder = self._scratch / name
            if not (folder / "index.npz").exists():
                _build_index(
                    self._storage, self._products_key, folder, self._config.esci_locale, limit, stop=self._stop
                )
            self._products = ProductIndex(folder)
        return self._products

    def read(self, file: InputFile, fields: Sequence[str] | None = None) -> Iterator[RawBatch]:
        plan = ColumnPlan(tuple(_FIELDS.items()) + self._feature_pairs())
        if fields is not None:
            plan = plan.only([*fields, "product_id"])
        plan = ColumnPlan((*plan.pairs, ("locale", _LOCALE)))
        uri = self._storage.uri(file.key)
        batches = read_file(
            self._storage, file.key, "parquet", lambda names: _checked(plan, names, uri), self._batch_rows
        )
        for batch in batches:
            self._stop.raise_if_set(f"reading {uri}")
            yield self._joined(batch, file.key)

    @property
    def _batch_rows(self) -> int:
        return batch_rows(self._config.rows_per_chunk)

    def _feature_pairs(self) -> tuple[tuple[str, str], ...]:
        config = self._config
        return (
            *((NUMERIC + column, column) for column in config.numeric),
            *((CATEGORICAL + feature.column, feature.column) for feature in config.categorical),
            *((SLICE + column, column) for column in config.slices),
            *((FILTER + column, column) for column in config.filter),
        )

    def _joined(self, batch: RawBatch, file: str) -> RawBatch:
        """Rows of the wanted locale with title and text; rows without a product are bad."""
        columns, rows = batch.columns, batch.rows
        if self._config.esci_locale:
            keep = pa.compute.equal(columns["locale"], self._config.esci_locale.encode()).fill_null(False)
            columns, rows = columns.filter(keep), rows[keep.to_numpy(zero_copy_only=False)]
        ids, locales = columns["product_id"].to_pylist(), columns["locale"].to_pylist()
        titles, texts, found = self._index().look_up(ids, locales)
        bad = tuple(
            BadRow(file, int(rows[i]), NO_PRODUCT, f"{ids[i]!r} in {locales[i]!r}") for i in np.flatnonzero(~found)
        )
        columns = columns.append_column("title", pa.array(titles, pa.large_binary()))
        columns = columns.append_column("text", pa.array(texts, pa.large_binary()))
        return replace(
            batch,
            columns=columns.filter(pa.array(found)).drop_columns(["locale"]),
            rows=rows[found],
            bad=bad,
            left_out=len(batch.rows) - len(rows),
        )


def _checked(plan: ColumnPlan, names: Sequence[str], uri: str) -> ColumnPlan:
    if missing := [column for column in plan.inputs if column not in names]:
        raise DataError(
            f"{uri} has no column {', '.join(map(repr, missing))}",
            expected="the ESCI columns; seen: " + ", ".join(names),
            next_command="download the file again, or set --data.format parquet",
        )
    return plan


class ProductIndex:
    """Titles and texts by (product_id, locale): a sorted array of key hashes over one memory-mapped file of texts."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "index.npz") as arrays:
            self._keys, self._starts = arrays["keys"], arrays["starts"]
            self._title_sizes, self._text_sizes = arrays["title_sizes"], arrays["text_sizes"]
        with (folder / "texts.bin").open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._texts: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""

    def look_up(
        self, ids: Sequence[bytes | None], locales: Sequence[bytes | None]
    ) -> tuple[list[bytes | None], list[bytes | None], npt.NDArray[np.bool_]]:
        """Titles, texts and whether the product exists, each of length N."""
        keys = np.array([_key(*pair) for pair in zip(ids, locales, strict=True)], dtype=np.uint64)
        if not len(self._keys):
            return [None] * len(ids), [None] * len(ids), np.zeros(len(ids), dtype=np.bool_)
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        found = self._keys[places] == keys
        titles: list[bytes | None] = []
        texts: list[bytes | None] = []
        for place, start, title_size, text_size in zip(
            found.tolist(),
            self._starts[places].tolist(),
            self._title_sizes[places].tolist(),
            self._text_sizes[places].tolist(),
            strict=True,
        ):
            middle = start + title_size
            titles.append(self._texts[start:middle] if place else None)
            texts.append(self._texts[middle : middle + text_size] if place else None)
        return titles, texts, found


def _build_index(storage: Storage, key: str, folder: Path, locale: str | None, limit: int, *, stop: StopSignal) -> None:
    """Stream the products once; `index.npz` appears last, so that a half-built index is never used."""
    folder.mkdir(parents=True, exist_ok=True)
    keys: list[int] = []
    sizes: list[tuple[int, int]] = []
    uri = storage.uri(key)
    stat = storage.stat(key)
    with (
        (folder / "texts.bin").open("wb") as texts,
        progress("indexing products", stat.size_bytes if stat else None, "bytes") as advance,
    ):
        for batch in read_file(storage, key, "parquet", lambda names: _product_plan(names, uri), 4096):
            stop.raise_if_set(f"indexing {uri}")
            advance(batch.input_bytes)
            columns = batch.columns.to_pydict()
            text_columns = [column for column in _TEXT_COLUMNS if column in columns]
            for row in range(len(batch.rows)):
                if locale and columns[_LOCALE][row] != locale.encode():
                    continue
                title = columns["product_title"][row] or b""
                text = cut_utf8(b" ".join(filter(None, (columns[c][row] for c in text_columns))), limit)
                keys.append(_key(columns["product_id"][row], columns[_LOCALE][row]))
                sizes.append((len(title), len(text)))
                texts.write(title + text)
    _write_index(folder, np.array(keys, dtype=np.uint64), np.array(sizes, dtype=np.int32).reshape(-1, 2))


def _product_plan(names: Sequence[str], uri: str) -> ColumnPlan:
    wanted = ("product_id", _LOCALE, "product_title", *(column for column in _TEXT_COLUMNS if column in names))
    return _checked(ColumnPlan(tuple((column, column) for column in wanted)), names, uri)


def _write_index(folder: Path, keys: npt.NDArray[np.uint64], sizes: npt.NDArray[Any]) -> None:
    ends = np.cumsum(sizes.sum(axis=1, dtype=np.int64))
    unique, first = np.unique(keys, return_index=True)  # the first of equal products wins
    with (folder / "index.tmp").open("wb") as file:
        np.savez(
            file,
            keys=unique,
            starts=(ends - sizes.sum(axis=1))[first],
            title_sizes=sizes[first, 0],
            text_sizes=sizes[first, 1],
        )
    (folder / "index.tmp").replace(folder / "index.npz")


def _key(product_id: bytes | None, locale: bytes | None) -> int:
    return xxhash.xxh3_64_intdigest((product_id or b"") + b"\0" + (locale or b""))


def cut_utf8(data: bytes, limit: int) -> bytes:
    """At most `limit` bytes, never cut inside a character."""
    if len(data) <= limit:
        return data
    while limit and data[limit] & 0xC0 == 0x80:
        limit -= 1
    return data[:limit]
