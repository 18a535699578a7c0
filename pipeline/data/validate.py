"""Validate raw rows, and determine the reason why a row cannot be used."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.data.attributes import MISSING_NUMBER, SIDES, field_of
from pipeline.data.config import DataConfig
from pipeline.data.lexical import code_features
from pipeline.data.rows import CATEGORICAL, FILTER, NUMERIC, SLICE, RowChunk, canonical_text, row_content
from pipeline.data.token_sets import SPLITS, QuarantinedRow
from pipeline.model.config import Attribute

EMPTY_QUERY, EMPTY_TITLE = "empty query", "empty title"
NO_LABEL, UNKNOWN_LABEL, UNKNOWN_SPLIT = "no label", "unknown label", "unknown split"
BAD_GAIN = "gain is not a number from 0 to 1"
_LARGEST_NUMBER = 1e38  # beyond it are the infinities of some devices, and the stand-in for a missing number
_BOOLEANS = {b"true": 1.0, b"false": 0.0}
_SPLIT_NAMES = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}

# Slices are columns by which evaluation breaks down its metrics. A row stores the hash of its value, and a partition
# stores the list of values. As a result, different workers and partitions do not have to agree on a numbering.

Names = dict[str, tuple[str, ...]]
NO_VALUE = -1
MAX_NAMES = 1000


@dataclass(frozen=True)
class Slices:
    """The values of N rows in S slice columns.

    `values` [N, S] contains int64 hashes, or NO_VALUE if a value is missing. `names` contains the distinct values of
    each column, sorted.
    """

    values: Int64s
    names: Names


def slice_rows(columns: Mapping[str, Sequence[bytes | None]], kept: Sequence[int]) -> Slices:
    """Hash the slice values of all rows that are kept. Raises DataError if a column has more than MAX_NAMES values."""
    values = np.full((len(kept), len(columns)), NO_VALUE, dtype=np.int64)
    names: dict[str, set[str]] = {}
    for index, (column, cells) in enumerate(columns.items()):
        texts = [(cells[row] or b"").decode("utf-8", "backslashreplace").strip() for row in kept]
        hashes = {text: hash63(text) if text else NO_VALUE for text in set(texts)}
        values[:, index] = [hashes[text] for text in texts]
        names[column] = hashes.keys() - {""}
    return Slices(values, merge_names([names]))


def merge_names(mappings: Iterable[Mapping[str, Iterable[str]]]) -> Names:
    """Merge the names of each column and sort them. Raises DataError if a column has more than MAX_NAMES names."""
    merged: dict[str, set[str]] = {}
    for mapping in mappings:
        for column, names in mapping.items():
            merged.setdefault(column, set()).update(names)
    for column, values in merged.items():
        if len(values) > MAX_NAMES:
            raise DataError(
                f"slice column {column!r} has more than {MAX_NAMES} different values, such as {min(values)!r}",
                expected="a column with few different values",
                next_command="remove it from --data.slices",
            )
    return {column: tuple(sorted(values)) for column, values in merged.items()}


def to_codes(values: Int64s, names: Sequence[str]) -> Int64s:
    """Convert hashes to indices into `names`. The index of NO_VALUE is -1.

    Raises DataError if a hash does not belong to any of the names.
    """
    codes = {hash63(name): code for code, name in enumerate(names)} | {NO_VALUE: -1}
    hashes, inverse = np.unique(values, return_inverse=True)
    if any(value not in codes for value in hashes.tolist()):
        raise DataError(
            "token shards contain a slice value that is not listed in their manifest",
            expected="the shards that were committed by the prepare stage",
            next_command="delete the token set and run trnpipe prepare again",
        )
    return np.array([codes[value] for value in hashes.tolist()], dtype=np.int64)[inverse]


# Rows.


@dataclass(frozen=True)
class RowRules:
    """The rules by which the rows of a partition are validated.

    `label_gains` is the gain of each label, used for rows that do not have a gain. If `carve_valid` is set, some rows
    are moved from the train split to the validation split, because datasets such as ESCI do not have the latter.
    """

    config: DataConfig
    partition: str
    labels: tuple[str, ...]
    label_gains: tuple[float, ...]
    carve_valid: bool


@dataclass(frozen=True)
class CleanRows:
    """N valid rows. `split` contains indices into SPLITS, and `label` is -1 if the data has no labels."""

    query: list[str]
    title: list[str]
    text: list[str]
    label: npt.NDArray[np.int16]
    gain: npt.NDArray[np.float32]
    numeric: npt.NDArray[np.float32]
    categorical: npt.NDArray[np.int32]
    sample_id: Int64s
    query_id: Int64s
    product_id: Int64s
    split: npt.NDArray[np.int8]
    slices: Slices


def filter_mask(columns: pa.RecordBatch | pa.Table, conditions: Mapping[str, str]) -> npt.NDArray[np.bool_]:
    """Return a mask of the rows that satisfy all conditions. A condition lists allowed values of a column (`a|b`)."""
    mask = np.ones(columns.num_rows, dtype=np.bool_)
    for column, condition in conditions.items():
        allowed = pa.array([canonical_text(value).encode() for value in condition.split("|")], pa.large_binary())
        values = pc.fill_null(columns[FILTER + column].cast(pa.large_binary()), b"")
        equal = pc.is_in(values, value_set=allowed)
        mask &= equal.to_numpy(zero_copy_only=False) if isinstance(equal, pa.Array) else equal.to_numpy()
    return mask


def to_floats(column: pa.Array) -> npt.NDArray[np.float64]:
    """Convert a field of floats or bytes to numbers.

    Booleans are converted to 1 and 0. Nulls and all strings that are not numbers are converted to NaN.
    """
    if pa.types.is_floating(column.type):
        return np.asarray(column.fill_null(float("nan")).to_numpy(zero_copy_only=False), dtype=np.float64)
    floats = np.full(len(column), np.nan)
    for row, value in enumerate(column.to_pylist()):
        if value and b"_" in value:  # Python's float() would accept 1_000
            continue
        with suppress(ValueError):
            floats[row] = float(_BOOLEANS.get(value.strip().lower(), value) if value else "nan")
    return floats


class _Rows:
    """The columns of a chunk. For each bad row, this keeps track of the first reason why it is bad."""

    def __init__(self, table: pa.Table, rows: Int64s, lines: Int64s) -> None:
        self.table, self.rows, self.lines, self.fields = table, rows, lines, table.column_names
        self.reason: list[str | None] = [None] * len(rows)

    def mark_bad(self, mask: npt.NDArray[np.bool_], reason: str) -> None:
        for row in np.flatnonzero(mask).tolist():
            self.reason[row] = self.reason[row] or reason

    def text(self, field: str) -> list[str]:
        """Return the texts of a field without surrounding whitespace.

        A missing text is replaced by an empty string. So is a text that is not valid UTF-8, and its row is marked as
        bad.
        """
        if field not in self.fields:
            return [""] * len(self.rows)
        column = self.table[field]
        try:
            return [value.strip() if value else "" for value in pc.cast(column, pa.large_string()).to_pylist()]
        except pa.ArrowInvalid:  # at least one row is not valid UTF-8, so decode them one by one
            texts = []
            for row, value in enumerate(column.to_pylist()):
                try:
                    texts.append(value.decode().strip() if value else "")
                except UnicodeDecodeError:
                    self.reason[row] = self.reason[row] or f"{field} is not UTF-8"
                    texts.append("")
            return texts


def validate_chunk(chunk: RowChunk, rules: RowRules) -> tuple[CleanRows, list[QuarantinedRow], int]:
    """Apply the filter to a chunk and validate the remaining rows.

    Returns the valid rows, the bad rows (starting with those that the reader could not parse), and the number of rows
    that remain after the filter.
    """
    table = chunk.table()
    mask = filter_mask(table, rules.config.filter)
    lines = np.zeros(len(chunk.rows), dtype=np.int64) if chunk.lines is None else chunk.lines
    rows = _Rows(table.filter(pa.array(mask)) if rules.config.filter else table, chunk.rows[mask], lines[mask])
    query, title, text = rows.text("query"), rows.text("title"), rows.text("text")
    for values, reason in ((query, EMPTY_QUERY), (title, EMPTY_TITLE)):
        rows.mark_bad(np.array([not value for value in values], dtype=np.bool_), reason)
    label, gain = _labels_and_gains(rows, rules)
    numeric, categorical = _features(rows, rules.config)
    query_id, product_id, split = _ids_and_splits(rows, rules, query, title)
    good = np.array([reason is None for reason in rows.reason], dtype=np.bool_)
    kept = np.flatnonzero(good).tolist()
    prefix = f"{rules.partition}|{chunk.file}|"
    usable = CleanRows(
        [query[row] for row in kept],
        [title[row] for row in kept],
        [text[row] for row in kept],
        label[good],
        gain[good],
        numeric[good],
        categorical[good],
        np.array([hash63(f"{prefix}{rows.rows[row]}") for row in kept], dtype=np.int64),
        query_id[good],
        product_id[good],
        split[good],
        slice_rows({column: rows.table[SLICE + column].to_pylist() for column in rules.config.slices}, kept),
    )
    bad = list(chunk.bad)
    for index, row_reason in enumerate(rows.reason):
        if row_reason:
            row, line, content = int(rows.rows[index]), int(rows.lines[index]), row_content(rows.table, index)
            bad.append(QuarantinedRow(file=chunk.file, row=row, line=line, reason=row_reason, content=content))
    return usable, bad, len(rows.rows) + sum(row.count for row in chunk.bad)


def _labels_and_gains(rows: _Rows, rules: RowRules) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]:
    label = np.full(len(rows.rows), -1, dtype=np.int16)
    if rules.labels:
        indices = {canonical_text(name): index for index, name in enumerate(rules.labels)}
        names = rows.text("label")
        label = np.array([indices.get(name, -1) for name in names], dtype=np.int16)
        rows.mark_bad(np.array([not name for name in names], dtype=np.bool_) & (label < 0), NO_LABEL)
        rows.mark_bad(label < 0, UNKNOWN_LABEL)
    if "gain" not in rows.fields:
        gains = np.array([*rules.label_gains, 0.0], dtype=np.float32)  # the last entry is for label -1
        return label, gains[label]
    gain = to_floats(rows.table["gain"].combine_chunks())
    is_bad = ~((gain >= 0) & (gain <= 1))
    rows.mark_bad(is_bad, BAD_GAIN)
    return label, np.where(is_bad, 0.0, gain).astype(np.float32)


def _features(rows: _Rows, config: DataConfig) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return the numeric features and the categorical ids. Categories are hashed as bytes and can have any encoding."""
    numbers = [_numbers(rows, NUMERIC + column, column)[:, None] for column in config.numeric]
    numbers += [_compare(rows, attribute) for attribute in config.attributes]
    numeric = np.concatenate([np.zeros((len(rows.rows), 0), dtype=np.float32), *numbers], axis=1)
    categorical = np.zeros((len(rows.rows), len(config.categorical)), dtype=np.int32)
    for index, info in enumerate(config.categorical):
        values = rows.table[CATEGORICAL + info.column].to_pylist()
        categorical[:, index] = [category_id(value, info.num_ids) for value in values]
    return numeric, categorical


def _numbers(rows: _Rows, field: str, column: str) -> npt.NDArray[np.float32]:
    """Return the numbers of a field, where an empty cell, null or NaN is missing and is returned as NaN.

    Rows with an infinite number or with any other text are marked as bad.
    """
    values = rows.table[field].combine_chunks()
    with np.errstate(over="ignore"):
        numbers = to_floats(values).astype(np.float32)
    is_missing = np.isnan(numbers)
    if not pa.types.is_floating(values.type):
        empty = pc.fill_null(pc.match_substring_regex(values, MISSING_NUMBER), True)
        is_missing = empty.to_numpy(zero_copy_only=False)
    rows.mark_bad(~is_missing & ~(np.abs(numbers) < _LARGEST_NUMBER), f"feature {column} is not a finite number")
    return numbers


def _compare(rows: _Rows, attribute: Attribute) -> npt.NDArray[np.float32]:
    """Return the numeric features of an attribute, of shape [N, len(attribute.features)]."""
    sides = [field for side in SIDES if (field := field_of(attribute, side)) in rows.fields]
    if not attribute.features:
        return np.zeros((len(rows.rows), 0), dtype=np.float32)
    if attribute.kind == "text":
        return code_features(*map(rows.text, sides))
    query, *product = (_numbers(rows, field, attribute.name) for field in sides)
    if not product:
        return query[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where((query > 0) & (product[0] > 0), np.log(product[0] / query), np.nan)
    return np.stack([product[0] - query, ratio], axis=1).astype(np.float32)


def category_id(value: bytes | None, num_ids: int) -> int:
    """Hash a category to an id from 1 to num_ids - 1. The id of a missing value is 0."""
    stripped = value.strip() if value else b""
    return 1 + hash63(stripped) % (num_ids - 1) if stripped else 0


def _ids_and_splits(
    rows: _Rows, rules: RowRules, queries: Sequence[str], titles: Sequence[str]
) -> tuple[Int64s, Int64s, npt.NDArray[np.int8]]:
    """Return the hashed query id, the hashed product id and the split of each row.

    If a row does not have an id, the query or the title in lower case is hashed instead. Without a split column, the
    split depends only on the items that `data.split_by` selects: a row is in the test split if any of its items is, or
    else in the validation split if any of its items is. With `both`, items are texts rather than ids, because ids of
    queries and products are often numbered separately although the same text may be on either side.
    """
    texts = [text.lower() for text in queries], [text.lower() for text in titles]
    query_id = _hashes([given or text for given, text in zip(rows.text("query_id"), texts[0], strict=True)])
    given_ids = rows.table["product_id"].to_pylist() if "product_id" in rows.fields else [None] * len(titles)
    product_id = _hashes([(given or b"").strip() or text for given, text in zip(given_ids, texts[1], strict=True)])
    items = {"query": [query_id], "product": [product_id]}.get(rules.config.split_by) or list(map(_hashes, texts))
    unique, inverse = np.unique(np.stack(items), return_inverse=True)
    scores = np.array([hash63(f"split|{value}") / 2**63 for value in unique.tolist()])[inverse]
    test, held_out = rules.config.test_fraction, rules.config.test_fraction + rules.config.valid_fraction
    by_item = np.where(scores < test, 2, np.where(scores < held_out, 1, 0)).astype(np.int8).reshape(len(items), -1)
    if "split" not in rows.fields:
        return query_id, product_id, by_item.max(axis=0)
    split = np.array([_SPLIT_NAMES.get(name.lower(), -1) for name in rows.text("split")], dtype=np.int8)
    rows.mark_bad(split < 0, UNKNOWN_SPLIT)
    if rules.carve_valid:
        split[(split == 0) & (by_item == SPLITS.index("valid")).any(axis=0)] = SPLITS.index("valid")
    return query_id, product_id, split


def _hashes(keys: Sequence[str | bytes]) -> Int64s:
    hashes = {key: hash63(key) for key in set(keys)}
    return np.array([hashes[key] for key in keys], dtype=np.int64)
