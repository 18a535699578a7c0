"""A catalogue file: items, and for each the query it is relevant to.

It is read twice: for the queries, then for the titles, window by window. Memory: 17 bytes a row, and the queries asked.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipeline.core.arrays import Bools, Int64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint, hash63
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.encode import product_text
from pipeline.data.partitions import content_ids
from pipeline.data.readers import read_file, suffix_format
from pipeline.data.rows import FILTER, ColumnPlan, RawBatch
from pipeline.data.sources import find_files
from pipeline.data.validate import filter_mask
from pipeline.evaluate.config import RetrievalConfig
from pipeline.io.storage import Storage

NO_QUERY = -1
_BATCH_ROWS = 8192
_OPTIONAL_TEXT = "text"


@dataclass(frozen=True)
class CatalogueFile:
    """The files of a catalogue."""

    config: RetrievalConfig
    storage: Storage
    files: tuple[tuple[str, str], ...]
    """(key, format) of each."""
    content: str
    """Fingerprint of what they hold."""
    size_bytes: int

    def queries(self, stop: StopSignal) -> "CatalogueQueries":
        """Which queries there are and what is relevant to them. Raises DataError for missing columns or no query."""
        texts: dict[int, str] = {}
        valid_texts: dict[int, str] = {}
        asking = [(texts, self.config.queries)]
        asking += [(valid_texts, self.config.valid_queries)] if self.config.valid_queries else []
        item_hashes: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        numbers: list[Int64s] = [np.zeros(0, dtype=np.int64)]
        for batch in self._batches(("id", "query", "query_id"), stop):
            ids, queries, names = (_texts(batch, field) for field in ("id", "query", "query_id"))
            asked_for = [hash63(name or query) if query else NO_QUERY for query, name in _pairs(queries, names)]
            for known, wanted in asking:
                may = filter_mask(batch.columns, wanted).tolist()
                for number, query, may_ask in zip(asked_for, queries, may, strict=True):
                    if may_ask and number != NO_QUERY:
                        known.setdefault(number, query)
            item_hashes.append(np.array([hash63(item) for item in ids], dtype=np.int64))
            numbers.append(np.array(asked_for, dtype=np.int64))
        every = np.concatenate(item_hashes)
        is_item = np.zeros(len(every), dtype=np.bool_)
        is_item[np.unique(every, return_index=True)[1]] = True
        query_of = np.concatenate(numbers)[is_item]
        there = set(np.unique(query_of).tolist())
        texts = {number: text for number, text in texts.items() if number in there}
        valid_texts = {number: text for number, text in valid_texts.items() if number in there and number not in texts}
        if not texts:
            raise DataError(
                f"the catalogue {self.config.catalogue} asks no query ({len(every):,} items read)",
                expected=f"items with a {self.config.query!r}"
                + (f" among {dict(self.config.queries)}" if self.config.queries else ""),
                next_command="check --evaluate.retrieval.query and --evaluate.retrieval.queries",
            )
        return CatalogueQueries(texts, valid_texts, query_of, is_item)

    def windows(
        self, is_item: Bools, rows: int, mine: Callable[[int], bool], stop: StopSignal, limit: int
    ) -> Iterator[tuple[int, list[str]]]:
        """What the encoder reads of each item, cut to `limit` characters, `rows` items at a time.

        Yields (number of the first item, texts), and only the windows whose number is `mine`.
        """
        held: list[str] = []
        number = row = 0
        for batch in self._batches(("title", "text"), stop):
            titles, texts = _texts(batch, "title"), _texts(batch, "text")
            kept = is_item[row : row + len(titles)].tolist()
            row += len(titles)
            held += [_text(*pair, limit) for pair, keep in zip(_pairs(titles, texts), kept, strict=True) if keep]
            while len(held) >= rows:
                if mine(number):
                    yield number * rows, held[:rows]
                held, number = held[rows:], number + 1
        if held and mine(number):
            yield number * rows, held

    def _batches(self, fields: Sequence[str], stop: StopSignal) -> Iterator[RawBatch]:
        with progress("reading the catalogue", self.size_bytes, "bytes") as advance:
            for key, format_name in self.files:
                uri = self.storage.uri(key)
                planner = partial(self._plan, uri=uri, fields=fields)
                for batch in read_file(self.storage, key, format_name, planner, _BATCH_ROWS):
                    stop.raise_if_set(f"reading {uri}")
                    advance(batch.input_bytes)
                    if batch.bad:
                        raise DataError(
                            f"{uri} has a bad row at {batch.bad[0].row}: {batch.bad[0].reason}",
                            expected="whole rows: retrieval is judged against all items",
                            next_command="repair the file",
                        )
                    yield batch

    def _plan(self, names: Sequence[str], uri: str, fields: Sequence[str]) -> ColumnPlan:
        config = self.config
        pairs = [("id", config.id), ("title", config.title), ("query", config.query)]
        if config.query_id:
            pairs.append(("query_id", config.query_id))
        if config.text in names or config.text != _OPTIONAL_TEXT:
            pairs.append(("text", config.text))
        pairs += [(FILTER + column, column) for column in {**config.queries, **config.valid_queries}]
        for field, column in pairs:
            if column not in names:
                setting = field.replace("_", "-")
                if field.startswith(FILTER):
                    setting = "queries" if column in config.queries else "valid-queries"
                raise DataError(
                    f"{uri} has no column {column!r}",
                    expected="one of its columns: " + ", ".join(names),
                    next_command=f"name the right column with --evaluate.retrieval.{setting}",
                )
        return ColumnPlan(tuple(pairs)).only(fields)


@dataclass(frozen=True)
class CatalogueQueries:
    """The queries asked, number to text, and the number of the query each of N items is relevant to, or NO_QUERY.

    `valid_texts`: further queries, from which the weight of hybrid search is chosen; none of those asked. `is_item`: of
    every row, whether it is an item; the second row of an id is none.
    """

    texts: dict[int, str]
    valid_texts: dict[int, str]
    query_of: Int64s
    is_item: Bools


def open_catalogue(config: RetrievalConfig, path: str, stop: StopSignal) -> CatalogueFile:
    """Find the files. Raises DataError when there is none."""
    storage, stats = find_files(path, stop, setting="--evaluate.retrieval.catalogue")
    formats = [(stat, suffix_format(stat.key) if config.format == "auto" else config.format) for stat in stats]
    chosen = [(stat, name) for stat, name in formats if name]
    if not chosen:
        raise DataError(
            f"no catalogue at {path}",
            expected="a *.parquet, *.csv or *.jsonl file, or a folder of them",
            next_command="correct --evaluate.retrieval.catalogue, or leave it out",
        )
    stats = [stat for stat, _ in chosen]
    ids = content_ids(storage, stats, stop)
    content = fingerprint([[stat.key, found] for stat, found in zip(stats, ids, strict=True)])
    files = tuple((stat.key, name) for stat, name in chosen)
    return CatalogueFile(config, storage, files, content, sum(stat.size_bytes for stat in stats))


def _texts(batch: RawBatch, field: str) -> list[str]:
    """Stripped texts of a field; bytes that are not UTF-8 are replaced. Empty when the file has no such column."""
    if field not in batch.columns.schema.names:
        return []
    return [(value or b"").decode("utf-8", "replace").strip() for value in batch.columns[field].to_pylist()]


def _pairs(first: Sequence[str], second: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Two columns side by side; the second may be missing."""
    return zip(first, second or [""] * len(first), strict=True)


def _text(title: str, text: str, limit: int) -> str:
    return product_text(title, text, limit) if title else text[:limit]
