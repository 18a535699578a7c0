"""The products of the Amazon Shopping Queries (ESCI) layout, with which its examples are joined.

Memory: 24 bytes per product for the index (44 MB for the 1.8 M products of the full set), three times that while it is
built. The product texts lie in one file below scratch and are looked up through a memory map, so the operating system
may drop them.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.core.errors import DataError
from pipeline.core.progress import progress
from pipeline.data.readers import read_file
from pipeline.data.rows import ColumnPlan
from pipeline.io import atomic
from pipeline.io.storage import Storage, os_errors

EXAMPLES = "shopping_queries_dataset_examples.parquet"
PRODUCTS = "shopping_queries_dataset_products.parquet"
SOURCES = "shopping_queries_dataset_sources.csv"
"""Of the queries; beside the two in the published folder, and not read."""
GAINS = {"I": 0.0, "C": 0.01, "S": 0.1, "E": 1.0}
"""Gains of the four judgements, least relevant first (Reddy et al., Shopping Queries Dataset, arXiv:2206.06588)."""
NO_PRODUCT = "product not among the products"
FIELDS = {
    "query": "query",
    "label": "esci_label",
    "query_id": "query_id",
    "product_id": "product_id",
    "split": "split",
}
LOCALE = "product_locale"
_TEXT_COLUMNS = ("product_brand", "product_color", "product_bullet_point", "product_description")


def checked(plan: ColumnPlan, names: Sequence[str], uri: str) -> ColumnPlan:
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
        starts = self._starts[places]
        middles = starts + self._title_sizes[places]
        ends = middles + self._text_sizes[places]
        rows = list(zip(found.tolist(), starts.tolist(), middles.tolist(), ends.tolist(), strict=True))
        titles = [self._texts[start:middle] if is_found else None for is_found, start, middle, _ in rows]
        texts = [self._texts[middle:end] if is_found else None for is_found, _, middle, end in rows]
        return titles, texts, found


def open_products(
    storage: Storage, key: str, folder: Path, locale: str | None, limit: int, version: str | None = None
) -> ProductIndex:
    """The index of a file of products, of one locale (None: all), with texts cut to `limit` bytes.

    It is built in `folder` unless it is there, by one process at a time; `index.npz` appears last, so that a half-built
    index is never used, nor one of a file that is no longer of this `version`. Raises what read_file() raises, and
    DiskFull.
    """
    if not (folder / "index.npz").exists():
        with os_errors("writing", f"file://{folder}"), atomic.exclusive(folder / "index.lock", storage.stop):
            if not (folder / "index.npz").exists():
                _index_products(storage, key, folder, locale, limit, version)
    return ProductIndex(folder)


def _index_products(
    storage: Storage, key: str, folder: Path, locale: str | None, limit: int, version: str | None
) -> None:
    all_keys: list[int] = []
    all_sizes: list[tuple[int, int]] = []
    uri = storage.uri(key)
    stat = storage.stat(key)

    def plan(names: Sequence[str]) -> ColumnPlan:
        wanted = ("product_id", LOCALE, "product_title", *(column for column in _TEXT_COLUMNS if column in names))
        return checked(ColumnPlan(tuple((column, column) for column in wanted)), names, uri)

    with (
        (folder / "texts.bin").open("wb") as file,
        progress("indexing products", stat.size_bytes if stat else None, "bytes") as advance,
    ):
        for batch in read_file(storage, key, "parquet", plan, 4096, version):
            storage.stop.raise_if_set(f"indexing {uri}")
            advance(batch.input_bytes)
            columns = batch.columns.to_pydict()
            text_columns = [column for column in _TEXT_COLUMNS if column in columns]
            for row in range(len(batch.rows)):
                if locale and columns[LOCALE][row] != locale.encode():
                    continue
                title = columns["product_title"][row] or b""
                text = cut_utf8(b" ".join(filter(None, (columns[c][row] for c in text_columns))), limit)
                all_keys.append(_key(columns["product_id"][row], columns[LOCALE][row]))
                all_sizes.append((len(title), len(text)))
                file.write(title + text)
    sizes = np.array(all_sizes, dtype=np.int32).reshape(-1, 2)
    ends = np.cumsum(sizes.sum(axis=1, dtype=np.int64))
    unique, first = np.unique(np.array(all_keys, dtype=np.uint64), return_index=True)  # the first of equal ones wins
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
