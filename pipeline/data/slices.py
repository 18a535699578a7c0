"""Columns by which evaluation tells rows apart. A value is stored as the hash of its name; the names lie beside it.

So the workers that tokenise need not agree on numbers, and neither do partitions.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63

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
    """The slices of the rows `kept` [N] of some columns. Raises DataError for a column with far too many values."""
    values = np.full((len(kept), len(columns)), NO_VALUE, dtype=np.int64)
    names: list[tuple[str, set[str]]] = []
    for place, (column, cells) in enumerate(columns.items()):
        texts = [(cells[row] or b"").decode("utf-8", "backslashreplace").strip() for row in kept]
        hashes = {text: hash63(text) if text else NO_VALUE for text in set(texts)}
        values[:, place] = [hashes[text] for text in texts]
        names.append((column, hashes.keys() - {""}))
    return Slices(values, merge_names([{column: tuple(found)} for column, found in names]))


def merge_names(parts: Iterable[Mapping[str, Iterable[str]]]) -> Names:
    """All names of each column, sorted. Raises DataError for a column with far too many."""
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
    """Hashes [N] as codes [N] into `names`; -1 for NO_VALUE. Raises DataError for a hash of no name."""
    hashes = np.array([hash63(name) for name in names], dtype=np.int64)
    order = np.argsort(hashes)
    places = np.minimum(np.searchsorted(hashes[order], values), max(0, len(names) - 1))
    codes = order[places] if len(names) else np.zeros(len(values), dtype=np.int64)
    known = hashes[codes] == values if len(names) else np.zeros(len(values), dtype=np.bool_)
    if not (known | (values == NO_VALUE)).all():
        raise DataError(
            "token shards hold a slice value that their partition does not name",
            expected="the shards that prepare committed",
            next_command="delete the token set and run trnpipe prepare again",
        )
    return np.where(known, codes, -1)
