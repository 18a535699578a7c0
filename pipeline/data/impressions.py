"""Count the impressions and clicks in a log of search results, by query, product and position.

The log is either a table with a row per impression, or the events of OpenSearch UBI (User Behavior Insights), in which
impressions and clicks are separate rows. Memory depends on the number of different queries, products and positions, but
not on the number of rows.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.arrays import Bools, Int64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.data.click_model import ClickCounts
from pipeline.data.config import DataConfig
from pipeline.data.input_files import Files
from pipeline.data.readers import Planner
from pipeline.data.rows import ColumnPlan, RawBatch, by_spelling, match_columns
from pipeline.data.validate import EMPTY_QUERY, EMPTY_TITLE, to_floats

POSITION, CLICKED, ACTION = "position", "clicked", "action_name"
EMPTY_PRODUCT, BAD_POSITION = "empty product id", "position is not a whole number from 1"
BAD_CLICK, OTHER_ACTION = "clicked is neither 0 nor 1", "action other than impression and click"
REPEATED_CLICK, UNSEEN_CLICK = "repeated click in the same search", "click without an impression"
_HARMLESS = (OTHER_ACTION, REPEATED_CLICK, UNSEEN_CLICK)
"""Reasons that do not count towards data.max_bad_fraction."""
_LARGEST_POSITION = 1_000_000
_BATCH_ROWS = 65_536
_MERGE_ROWS = 2_000_000
_UBI = {
    "query": "user_query",
    "product_id": "event_attributes_object_object_id",
    POSITION: "event_attributes_position_ordinal",
    ACTION: ACTION,
    "query_id": "query_id",
}
"""The columns of UBI events, with any characters between the words."""
_ACTIONS = {b"impression": (1, 0), b"click": (0, 1)}
_OUTCOMES = {b"0": (1, 0), b"false": (1, 0), b"1": (1, 1), b"true": (1, 1)}
_COLUMNS = ["query", "product", "position", "impressions", "clicks"]


def _setting(name: str) -> str:
    if name == "title":
        return "--products CATALOGUE, or --data.columns.title"
    return {POSITION: "--position", CLICKED: "--clicked"}.get(name, f"--data.columns.{name}")


class NumberedTexts:
    """Distinct texts, numbered in the order of their first occurrence."""

    def __init__(self) -> None:
        self.numbers, self.texts = dict[str, int](), list[str]()

    def encode(self, column: pa.Array, *, fold: bool = False) -> Int64s:
        """Return the number of each text of a large_binary column, or -1 if it is blank or not UTF-8.

        If `fold` is set, texts that only differ in case have the same number.
        """
        encoded, numbers = column.dictionary_encode(), list[int]()
        for value in encoded.dictionary.to_pylist():
            text = value.decode(errors="replace").strip()
            if not text or "\ufffd" in text:
                numbers.append(-1)
                continue
            number = self.numbers.setdefault(text.lower() if fold else text, len(self.texts))
            numbers.append(number)
            if number == len(self.texts):
                self.texts.append(text)
        return _looked_up([*numbers, -1], encoded)


def _looked_up(values: Sequence[int], encoded: pa.Array) -> Int64s:
    """Return the value of each row of a dictionary-encoded column. The last value is that of nulls."""
    rows: Int64s = encoded.indices.fill_null(len(values) - 1).to_numpy()
    return np.array(values, dtype=np.int64)[rows]


class ClickLog:
    """The counts of a log, and the number of its rows that are not used, by reason.

    Args:
        config: names of the columns, and the maximum fraction of bad rows.
        position: column with the position.
        clicked: column that is 1 if the product was clicked, and 0 otherwise.
        has_titles: False if the titles are looked up in a catalogue, so that the log does not need any.
    """

    def __init__(self, config: DataConfig, position: str, clicked: str, *, has_titles: bool) -> None:
        self._config, self._position, self._clicked, self._has_titles = config, position, clicked, has_titles
        self.queries, self.products, self.titles = NumberedTexts(), NumberedTexts(), dict[int, str]()
        self.rows, self.is_ubi = 0, False
        self.unused, self._first, self._file = Counter[str](), dict[str, str](), ""
        self._clicks_seen, self._tables, self._merged_rows = set[int](), list[pa.Table](), 0

    def read(self, files: Files) -> None:
        """Add all rows of the files. Raises DataError if a column is missing, or if too many rows are bad."""
        for batch in files.read(self._start_file, _BATCH_ROWS, "reading impressions"):
            self._add(batch)
        bad = [reason for reason in self.unused if reason not in _HARMLESS]
        limit, rows = self._config.max_bad_fraction, sum(self.unused[reason] for reason in bad)
        if not self.rows or rows > limit * self.rows:
            raise DataError(
                ", ".join([f"{rows:,} of {self.rows:,} rows are bad", *map(self.describe, bad)]),
                expected=f"impressions, of which at most {limit:.1%} are bad (data.max_bad_fraction)",
                next_command="correct the rows, choose other columns with --position, --clicked and --data.columns, or"
                " leave the rows out with a higher --data.max-bad-fraction",
            )

    def _start_file(self, uri: str) -> Planner:
        self._file = uri
        return self._plan

    def _plan(self, available: Sequence[str]) -> ColumnPlan:
        names, spelled = self._config.columns, by_spelling(available)
        pairs = [("query", names.query), ("product_id", names.product_id or "product_id")]
        pairs += [(POSITION, self._position), (CLICKED, self._clicked)]
        if ACTION in spelled and self._clicked not in available:
            is_set = {*names.model_fields_set, *([POSITION] if self._position != POSITION else [])}
            set_columns = {field: column for field, column in pairs if field in is_set}
            pairs = [(field, set_columns.get(field) or spelled.get(name, name)) for field, name in _UBI.items()]
        pairs += [("title", names.title)] if self._has_titles else []
        optional = ("query_id", "product_id") if self._has_titles else ("query_id",)
        return match_columns(pairs, available, self._file, _setting, optional)

    def describe(self, reason: str) -> str:
        """Return the number of rows that are not used for a reason, and the first of them."""
        first = f" (first: {self._first[reason]})" if reason in self._first else ""
        return f"{self.unused[reason]:,} {reason}{first}"

    def counts(self) -> tuple[ClickCounts, Int64s, Int64s]:
        """Return the counts of all rows, and the query and the product of each pair.

        UBI logs clicks separately, so clicks in excess of the impressions of a pair at a position are left out.
        """
        table = self._merge()
        clicks = pc.min_element_wise(table["clicks"], table["impressions"])
        self.unused += Counter({UNSEEN_CLICK: pc.sum(pc.subtract(table["clicks"], clicks)).as_py() or 0})
        table = table.set_column(4, "clicks", clicks).filter(pc.greater(table["impressions"], 0))
        query, product, position, shown, clicks = (column.to_numpy() for column in table.columns)
        num_products = max(1, len(self.products.texts))
        keys, pair = np.unique(query * num_products + product, return_inverse=True)
        positions, place = np.unique(position, return_inverse=True)
        order = np.argsort(pair, kind="stable")
        arrays = (array[order] for array in (pair, place, shown, clicks))
        return ClickCounts(len(keys), positions, *arrays), keys // num_products, keys % num_products

    def _add(self, batch: RawBatch) -> None:
        table, reasons = batch.columns, np.full(len(batch.rows), "", dtype=object)

        def leave_out(mask: Bools, reason: str) -> None:
            reasons[mask & (reasons == "")] = reason

        has_ids, self.is_ubi = "product_id" in table.schema.names, ACTION in table.schema.names
        column, meaning = (ACTION, _ACTIONS) if self.is_ubi else (CLICKED, _OUTCOMES)
        encoded = table[column].dictionary_encode()
        outcomes = [meaning.get(value.strip().lower(), (0, 0)) for value in encoded.dictionary.to_pylist()]
        shown, clicks = (_looked_up(values, encoded) for values in zip(*outcomes, (0, 0), strict=True))
        leave_out(shown + clicks == 0, OTHER_ACTION if self.is_ubi else BAD_CLICK)
        query = self.queries.encode(table["query"], fold=True)
        leave_out(query < 0, EMPTY_QUERY)
        product = self.products.encode(table["product_id" if has_ids else "title"], fold=not has_ids)
        leave_out(product < 0, EMPTY_PRODUCT if has_ids else EMPTY_TITLE)
        encoded = table[POSITION].dictionary_encode()
        numbers = to_floats(encoded.dictionary)
        is_valid = (numbers >= 1) & (numbers <= _LARGEST_POSITION) & (np.floor(numbers) == numbers)
        position = _looked_up([*np.where(is_valid, numbers, -1).astype(np.int64).tolist(), -1], encoded)
        leave_out(position < 0, BAD_POSITION)
        if self._has_titles:
            has_title = np.array([bool((title or b"").strip()) for title in table["title"].to_pylist()], dtype=np.bool_)
            usable = np.flatnonzero(has_title & (product >= 0))
            for row in usable[np.unique(product[usable], return_index=True)[1]].tolist():
                title = table["title"][row].as_py().decode(errors="replace").strip()
                self.titles.setdefault(int(product[row]), title)
        if "query_id" in table.schema.names:
            searches = table["query_id"].to_pylist()
            for row in np.flatnonzero((reasons == "") & (clicks == 1)).tolist():
                key = hash63(f"{searches[row]}|{product[row]}")
                if key in self._clicks_seen:
                    reasons[row] = REPEATED_CLICK
                elif searches[row]:
                    self._clicks_seen.add(key)
        self.rows += batch.rows_read
        for row in np.flatnonzero(reasons != "").tolist():
            line = f"row {batch.rows[row]}" if batch.lines is None else f"line {batch.lines[row]}"
            self._first.setdefault(reasons[row], f"{self._file}, {line}")
            self.unused[reasons[row]] += 1
        for bad in batch.bad:
            self._first.setdefault(bad.reason, f"{self._file}, line {bad.line}")
            self.unused[bad.reason] += bad.count
        good = reasons == ""
        columns = (query[good], product[good], position[good], shown[good], clicks[good])
        self._tables.append(_grouped(pa.table(dict(zip(_COLUMNS, columns, strict=True)))))
        if sum(map(len, self._tables)) > _MERGE_ROWS + 2 * self._merged_rows:
            self._merge()

    def _merge(self) -> pa.Table:
        table = _grouped(pa.concat_tables(self._tables))
        self._tables, self._merged_rows = [table], len(table)
        return table


def _grouped(table: pa.Table) -> pa.Table:
    """Sum the counts of each query, product and position."""
    keys, counts = list(_COLUMNS[:3]), _COLUMNS[3:]
    grouped = table.group_by(keys, use_threads=False).aggregate([(name, "sum") for name in counts])
    return grouped.select([*keys, *(f"{name}_sum" for name in counts)]).rename_columns(_COLUMNS)
