"""Judge raw rows: every row either passes or gets one reason why it cannot be used."""

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
from pipeline.data.config import DataConfig
from pipeline.data.rows import CATEGORICAL, FILTER, NUMERIC, SLICE, BadRow, RowChunk, canonical_text, row_content
from pipeline.data.token_sets import SPLITS

EMPTY_QUERY, EMPTY_TITLE = "empty query", "empty title"
NO_LABEL, UNKNOWN_LABEL, UNKNOWN_SPLIT = "no label", "unknown label", "unknown split"
BAD_GAIN = "gain is not a number from 0 to 1"
_TRUTHS = {b"true": 1.0, b"false": 0.0}
_SPLIT_NAMES = {"train": 0, "valid": 1, "validation": 1, "val": 1, "dev": 1, "test": 2}

# Columns by which evaluation groups rows. A value is stored as the hash of its name, and the names separately, so that
# workers and partitions need not agree on numbers.

Names = dict[str, tuple[str, ...]]
NO_VALUE = -1
MAX_NAMES = 1000


@dataclass(frozen=True)
class Slices:
    """`values` int64 [N, S], the hash of each row's value in each of S columns, NO_VALUE where it has none.

    `names`: the values that occur, sorted, by column.
    """

    values: Int64s
    names: Names


def slice_rows(columns: Mapping[str, Sequence[bytes | None]], kept: Sequence[int]) -> Slices:
    """Return the slices of the rows `kept` [N]. Raises DataError for a column with far too many values."""
    values = np.full((len(kept), len(columns)), NO_VALUE, dtype=np.int64)
    names: list[tuple[str, set[str]]] = []
    for place, (column, cells) in enumerate(columns.items()):
        texts = [(cells[row] or b"").decode("utf-8", "backslashreplace").strip() for row in kept]
        hashes = {text: hash63(text) if text else NO_VALUE for text in set(texts)}
        values[:, place] = [hashes[text] for text in texts]
        names.append((column, hashes.keys() - {""}))
    return Slices(values, merge_names([{column: tuple(found)} for column, found in names]))


def merge_names(parts: Iterable[Mapping[str, Iterable[str]]]) -> Names:
    """Return all names of each column, sorted. Raises DataError for a column with far too many."""
    merged: dict[str, set[str]] = {}
    for part in parts:
        for column, names in part.items():
            merged.setdefault(column, set()).update(names)
    for column, found in merged.items():
        if len(found) > MAX_NAMES:
            raise DataError(
                f"column {column!r} has over {MAX_NAMES} different values, such as {min(found)!r}",
                expected="a column of a few kinds of rows",
                next_command="leave it out of --data.slices",
            )
    return {column: tuple(sorted(found)) for column, found in merged.items()}


def codes_of(values: Int64s, names: Sequence[str]) -> Int64s:
    """Return hashes [N] as codes [N] into `names`, -1 for NO_VALUE. Raises DataError for a hash without a name."""
    codes = {hash63(name): code for code, name in enumerate(names)} | {NO_VALUE: -1}
    found, place = np.unique(values, return_inverse=True)
    if any(value not in codes for value in found.tolist()):
        raise DataError(
            "token shards hold a slice value that their partition does not name",
            expected="the shards that prepare committed",
            next_command="delete the token set and run trnpipe prepare again",
        )
    return np.array([codes[value] for value in found.tolist()], dtype=np.int64)[place]


# Rows.


@dataclass(frozen=True)
class RowRules:
    """What makes a row usable. `label_gains`: by label, for rows without a gain.

    `carve_valid`: take the validation rows out of train by hash, for layouts that only know train and test (ESCI).
    """

    config: DataConfig
    partition: str
    labels: tuple[str, ...]
    label_gains: tuple[float, ...]
    carve_valid: bool


@dataclass(frozen=True)
class CleanRows:
    """N usable rows; arrays have length N. `split` indexes SPLITS; `label` is -1 without labels."""

    query: list[str]
    title: list[str]
    text: list[str]
    label: npt.NDArray[np.int16]
    gain: npt.NDArray[np.float32]
    numeric: npt.NDArray[np.float32]
    categorical: npt.NDArray[np.int32]
    sample_id: Int64s
    query_id: Int64s
    split: npt.NDArray[np.int8]
    slices: Slices


def filter_mask(columns: pa.RecordBatch | pa.Table, wanted: Mapping[str, str]) -> npt.NDArray[np.bool_]:
    """Return the rows [N] whose filter columns each equal one of the wanted values (`a|b`)."""
    keep = np.ones(columns.num_rows, dtype=np.bool_)
    for column, value in wanted.items():
        wanted_values = pa.array([canonical_text(part).encode() for part in value.split("|")], pa.large_binary())
        values = pc.fill_null(columns[FILTER + column].cast(pa.large_binary()), b"")
        equal = pc.is_in(values, value_set=wanted_values)
        keep &= equal.to_numpy(zero_copy_only=False) if isinstance(equal, pa.Array) else equal.to_numpy()
    return keep


def numbers(column: pa.Array) -> npt.NDArray[np.float64]:
    """Return the numbers of a field of floats or bytes [N], NaN for anything else. Booleans are 1 and 0."""
    if pa.types.is_floating(column.type):
        return np.asarray(column.fill_null(float("nan")).to_numpy(zero_copy_only=False), dtype=np.float64)
    found = np.full(len(column), np.nan)
    for row, value in enumerate(column.to_pylist()):
        if value and b"_" in value:  # Python's float() reads 1_000
            continue
        with suppress(ValueError):
            found[row] = float(_TRUTHS.get(value.strip().lower(), value) if value else "nan")
    return found


class _Rows:
    """The columns of a chunk with one reason or None for each row; the first reason is kept."""

    def __init__(self, table: pa.Table, rows: Int64s, lines: Int64s) -> None:
        self.table, self.rows, self.lines, self.fields = table, rows, lines, table.column_names
        self.reason: list[str | None] = [None] * len(rows)

    def mark(self, wrong: npt.NDArray[np.bool_], reason: str) -> None:
        for row in np.flatnonzero(wrong).tolist():
            self.reason[row] = self.reason[row] or reason

    def text(self, field: str) -> list[str]:
        """Return stripped texts. Missing and undecodable ones are empty, and the latter are marked."""
        if field not in self.fields:
            return [""] * len(self.rows)
        column = self.table[field]
        try:
            return [value.strip() if value else "" for value in pc.cast(column, pa.large_string()).to_pylist()]
        except pa.ArrowInvalid:  # some row is not UTF-8: find out which
            texts = []
            for row, value in enumerate(column.to_pylist()):
                try:
                    texts.append(value.decode().strip() if value else "")
                except UnicodeDecodeError:
                    self.reason[row] = self.reason[row] or f"{field} is not UTF-8"
                    texts.append("")
            return texts


def clean(chunk: RowChunk, rules: RowRules) -> tuple[CleanRows, list[BadRow], int]:
    """Apply the filter, then judge every row.

    Returns the usable rows, the bad ones (first those of the reader), and the number of rows judged.
    """
    table = chunk.table()
    keep = filter_mask(table, rules.config.filter)
    lines = np.zeros(len(chunk.rows), dtype=np.int64) if chunk.lines is None else chunk.lines
    rows = _Rows(table.filter(pa.array(keep)) if rules.config.filter else table, chunk.rows[keep], lines[keep])
    query, title, text = rows.text("query"), rows.text("title"), rows.text("text")
    for values, empty in ((query, EMPTY_QUERY), (title, EMPTY_TITLE)):
        rows.mark(np.array([not value for value in values], dtype=np.bool_), empty)
    label, gain = _labels_and_gains(rows, rules)
    numeric, categorical = _features(rows, rules.config)
    query_id, split = _queries_and_splits(rows, rules, query)
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
        split[good],
        slice_rows({column: rows.table[SLICE + column].to_pylist() for column in rules.config.slices}, kept),
    )
    bad = list(chunk.bad)
    for row, reason in enumerate(rows.reason):
        if reason:
            place, line = int(rows.rows[row]), int(rows.lines[row])
            bad.append(BadRow(chunk.file, place, reason, row_content(rows.table, row), line=line))
    return usable, bad, len(rows.rows) + sum(row.count for row in chunk.bad)


def _labels_and_gains(rows: _Rows, rules: RowRules) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float32]]:
    label = np.full(len(rows.rows), -1, dtype=np.int16)
    if rules.labels:
        places = {canonical_text(name): place for place, name in enumerate(rules.labels)}
        names = rows.text("label")
        label = np.array([places.get(name, -1) for name in names], dtype=np.int16)
        rows.mark(np.array([not name for name in names], dtype=np.bool_) & (label < 0), NO_LABEL)
        rows.mark(label < 0, UNKNOWN_LABEL)
    if "gain" not in rows.fields:
        of_label = np.array([*rules.label_gains, 0.0], dtype=np.float32)  # label -1 reads the last entry
        return label, of_label[label]
    gain = numbers(rows.table["gain"].combine_chunks())
    wrong = ~((gain >= 0) & (gain <= 1))
    rows.mark(wrong, BAD_GAIN)
    return label, np.where(wrong, 0.0, gain).astype(np.float32)


def _features(rows: _Rows, config: DataConfig) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    """Return numeric features and the hash ids of categories; bytes are hashed whether they are valid text or not."""
    numeric = np.zeros((len(rows.rows), len(config.numeric)), dtype=np.float32)
    for place, column in enumerate(config.numeric):
        with np.errstate(over="ignore"):
            numeric[:, place] = numbers(rows.table[NUMERIC + column].combine_chunks()).astype(np.float32)
        rows.mark(~np.isfinite(numeric[:, place]), f"feature {column} is not a finite number")
    categorical = np.zeros((len(rows.rows), len(config.categorical)), dtype=np.int32)
    for place, info in enumerate(config.categorical):
        values = rows.table[CATEGORICAL + info.column].to_pylist()
        categorical[:, place] = [category_id(value, info.num_ids) for value in values]
    return numeric, categorical


def category_id(value: bytes | None, num_ids: int) -> int:
    """Return the id of a category: 0 for missing, else 1 + hash modulo (num_ids - 1)."""
    stripped = value.strip() if value else b""
    return 1 + hash63(stripped) % (num_ids - 1) if stripped else 0


def _queries_and_splits(rows: _Rows, rules: RowRules, queries: Sequence[str]) -> tuple[Int64s, npt.NDArray[np.int8]]:
    """Return the hash of the query id (default: of the query in lower case) and the split of each row.

    Without a split column the split is a function of the query, so all rows of a query are in one.
    """
    keys = [given or query.lower() for given, query in zip(rows.text("query_id"), queries, strict=True)]
    hashes = {key: hash63(key) for key in set(keys)}
    query_id = np.array([hashes[key] for key in keys], dtype=np.int64)

    unique, place = np.unique(query_id, return_inverse=True)
    share = np.array([hash63(f"split|{value}") / 2**63 for value in unique.tolist()])
    held_out = rules.config.test_fraction + rules.config.valid_fraction
    by_hash = np.where(share < rules.config.test_fraction, 2, np.where(share < held_out, 1, 0)).astype(np.int8)[place]
    if "split" not in rows.fields:
        return query_id, by_hash
    split = np.array([_SPLIT_NAMES.get(name.lower(), -1) for name in rows.text("split")], dtype=np.int8)
    rows.mark(split < 0, UNKNOWN_SPLIT)
    if rules.carve_valid:
        split[(split == 0) & (by_hash == SPLITS.index("valid"))] = SPLITS.index("valid")
    return query_id, split
