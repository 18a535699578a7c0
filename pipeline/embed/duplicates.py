"""Ids that are in more than one part. Within a part they are found as rows are read; this is the look over all."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.embed.index import part_and_row, place_of
from pipeline.embed.spill import HashSpill

RECORD = np.dtype([("hash", "<u8"), ("place", "<i8")])


def find_duplicates(
    hashes: Iterable[UInt64s],
    ids_of: Callable[[int, Int64s], list[Any]],
    *,
    folder: Path,
    expected: int,
    limit: int,
    stop: StopSignal,
) -> dict[int, Int64s]:
    """Rows, by part, whose id is in an earlier part: the first in the order of the catalogue stays.

    Args:
        hashes: those of the ids of each part, in order.
        ids_of: the ids of some rows of a part; asked only where hashes meet.
        folder: for sorting on disk.
        limit: give up once more rows than these are found; the result then has at least so many.
    Memory: a part's hashes, a file of the spill, and the ids of rows whose hash is not the only one.
    """
    places, found = [np.zeros(0, dtype=np.int64)], 0
    with (
        HashSpill(folder, RECORD, expected) as spill,
        progress("looking for ids in several parts", 2 * expected, "rows") as advance,  # read, then sorted
    ):
        for part, values in enumerate(hashes):
            stop.raise_if_set("looking for ids in several parts")
            advance(len(values))
            records = np.empty(len(values), dtype=RECORD)
            records["hash"], records["place"] = values, place_of(part, np.arange(len(values), dtype=np.int64))
            spill.add(records)
        for records in spill.sorted():
            stop.raise_if_set("looking for ids in several parts")
            advance(len(records))
            starts = np.flatnonzero(np.diff(records["hash"], prepend=~records["hash"][:1]))
            sizes = np.diff(starts, append=len(records))
            places.append(records["place"][np.repeat(sizes > 1, sizes)])
            found += len(records) - len(starts)
            if found > limit:
                break
    return _by_part(_later_ones(np.concatenate(places), ids_of))


def _later_ones(places: Int64s, ids_of: Callable[[int, Int64s], list[Any]]) -> Int64s:
    """Places whose id was at one before them; equal hashes alone prove nothing. In: by hash, then by place."""
    parts, rows = part_and_row(places)
    names = np.empty(len(places), dtype=object)
    for part in np.unique(parts).tolist():
        chosen = np.flatnonzero(parts == part)
        chosen = chosen[np.argsort(rows[chosen])]
        names[chosen] = ids_of(part, rows[chosen])
    later, seen = list[int](), set[Any]()
    for place, name in zip(places.tolist(), names.tolist(), strict=True):
        if name in seen:
            later.append(place)
        seen.add(name)
    return np.array(sorted(later), dtype=np.int64)


def _by_part(places: Int64s) -> dict[int, Int64s]:
    parts, rows = part_and_row(places)
    return {part: rows[parts == part] for part in np.unique(parts).tolist()}
