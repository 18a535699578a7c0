"""Vectors of an earlier cycle: which cycle, and where its rows lie by the hashes of id and text."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.lib import format as npy
from pydantic import Field, JsonValue

from pipeline.core.arrays import Bools, Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.format import natural_key
from pipeline.core.progress import progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.embed.vectors import VectorLayout, VectorSet, find_vectors
from pipeline.io import atomic
from pipeline.io.requests import run_parallel
from pipeline.io.storage import Storage, os_errors

_READ_THREADS = 16


class EarlierCycle(Record):
    """Vectors that were finished when this cycle was planned."""

    cycle: str
    digest: str = Field(description="Digest of their manifest")


@dataclass(frozen=True)
class Earlier:
    previous: EarlierCycle | None = None
    carry_from: EarlierCycle | None = None
    generation: int = 0


def find_earlier(
    workspace: Storage, cycle: str, wanted: str, made_by: Mapping[str, JsonValue], layout: VectorLayout
) -> Earlier:
    """Find finished vectors of other cycles: the newest, and the newest that were made as ours will be.

    Those that are unfinished, damaged or of another version are passed over. `wanted` is output.carry_over.
    """

    def finished(name: str) -> VectorSet | None:
        try:
            return find_vectors(workspace, name)
        except DataError:
            return None

    def made(made_by: Mapping[str, JsonValue], layout: VectorLayout) -> dict[str, JsonValue]:
        """Return all that must be equal for vectors to be taken over; the format of their files may differ."""
        return {**made_by, **layout.model_dump(exclude={"format"})}

    def named(vectors: VectorSet | None) -> EarlierCycle | None:
        return EarlierCycle(cycle=vectors.info.cycle, digest=vectors.manifest.digest) if vectors else None

    others = [name for name in workspace.list_dirs("embeddings") if name != cycle]
    doing = "looking for earlier vectors"
    found = run_parallel(finished, others, num_threads=_READ_THREADS, stop=workspace.stop, doing=doing)
    sets = [vectors for vectors in found if vectors is not None]
    sets.sort(key=lambda vectors: (vectors.info.generation, natural_key(vectors.info.cycle)), reverse=True)
    fitting = (one for one in sets if wanted == "auto" and made(one.info.made_by, one.layout) == made(made_by, layout))
    newest = sets[0] if sets else None
    return Earlier(named(newest), named(next(fitting, None)), newest.info.generation if newest else 0)


def open_earlier(workspace: Storage, earlier: EarlierCycle) -> VectorSet:
    """Open the vectors that the plan names. Raises DataError if they are gone or have changed."""
    found = find_vectors(workspace, earlier.cycle)
    if found.manifest.digest != earlier.digest:
        raise DataError(
            f"{workspace.uri(found.prefix)} has digest {found.manifest.digest}",
            expected=f"{earlier.digest}, as when this cycle was planned",
            next_command="embed in a new cycle",
        )
    return found


_PART_BITS = 32


def place_of(part: int, rows: Int64s) -> Int64s:
    """Return part and row of a part as one number."""
    return (part << _PART_BITS) + rows


def part_and_row(place: Int64s) -> tuple[Int64s, Int64s]:
    """Return (part, row): the inverse of `place_of`."""
    return place >> _PART_BITS, place & ((1 << _PART_BITS) - 1)


def index_of(vectors: VectorSet, scratch: Path, stop: StopSignal) -> Path:
    """Return the row index of finished vectors, made below `scratch` if it is not there.

    Processes of one machine make it once. Memory: 40 bytes a row while it is made.
    """
    path, doing = scratch / "embed" / "index" / f"{vectors.manifest.digest}.npy", "reading the earlier vectors' ids"
    with os_errors("writing", f"file://{path}"), atomic.exclusive(path.with_suffix(".lock"), stop):
        if path.exists():
            return path
        columns = tuple([np.zeros(0, dtype=np.uint64)] for _ in range(3))  # hash of the id, of the text, and the place
        with progress(doing, vectors.info.rows, "rows") as advance:
            for part in range(len(vectors.info.parts)):
                stop.raise_if_set(doing)
                id_hash, text_hash = vectors.hashes(part)
                place = place_of(part, np.arange(len(id_hash), dtype=np.int64)).view(np.uint64)
                for column, values in zip(columns, (id_hash, text_hash, place), strict=True):
                    column.append(values)
                advance(len(id_hash))
        order, making = np.argsort(np.concatenate(columns[0]), kind="stable"), path.with_suffix(".making")
        header = {"descr": "<u8", "fortran_order": False, "shape": (len(columns), len(order))}
        with making.open("wb") as file:
            npy.write_array_header_1_0(file, header)
            for column in columns:
                np.concatenate(column)[order].tofile(file)
        making.rename(path)
    return path


class RowIndex:
    """A finished index, mapped into memory. Pages are returned to the system after each look-up."""

    def __init__(self, path: Path) -> None:
        self._index = np.load(path, mmap_mode="r")

    def look_up(self, id_hash: UInt64s, text_hash: UInt64s | None = None) -> tuple[Int64s, Bools]:
        """Return places [N] of rows with this id and this text (None: any) or -1, and which ids were found [N].

        Rows are compared by these hashes of 64 bits alone.
        """
        ids, texts, places = self._index
        at = np.searchsorted(ids, id_hash)
        known = at < len(ids)
        known[known] = ids[at[known]] == id_hash[known]
        same = known.copy()
        if text_hash is not None:
            same[known] = texts[at[known]] == text_hash[known]
        place = np.full(len(at), -1, dtype=np.int64)
        place[same] = places[at[same]]
        self._index.base.madvise(mmap.MADV_DONTNEED)
        return place, known
