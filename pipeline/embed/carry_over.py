"""Vectors of an earlier cycle: which cycle, where its rows lie by the hashes of id and text, and taking them over."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field, JsonValue

from pipeline.core.arrays import Bools, Float32s, Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.format import natural_key
from pipeline.core.progress import progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.embed.vectors import Stored, VectorLayout, VectorSet, find_vectors
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

    `wanted` is output.carry_over.
    """
    others = [name for name in workspace.list_dirs("embeddings") if name != cycle]
    found = run_parallel(
        lambda name: _finished(workspace, name),
        others,
        num_threads=_READ_THREADS,
        stop=workspace.stop,
        doing="looking for earlier vectors",
    )
    sets = [one for one in found if one is not None]
    sets.sort(key=lambda one: (one.info.generation, natural_key(one.info.cycle)))
    fitting = (one for one in reversed(sets) if _made(one.info.made_by, one.layout) == _made(made_by, layout))
    chosen = next(fitting, None) if wanted == "auto" else None
    previous, carry_from = (
        EarlierCycle(cycle=one.info.cycle, digest=one.manifest.digest) if one else None
        for one in (sets[-1] if sets else None, chosen)
    )
    return Earlier(previous, carry_from, sets[-1].info.generation if sets else 0)


def _finished(workspace: Storage, cycle: str) -> VectorSet | None:
    """Return the vectors of a cycle; None if they are unfinished, damaged or of another version."""
    try:
        return find_vectors(workspace, cycle)
    except DataError:
        return None


def _made(made_by: Mapping[str, JsonValue], layout: VectorLayout) -> dict[str, JsonValue]:
    """Return all that must be equal for vectors to be taken over; the format of their files may differ."""
    return {**made_by, **layout.model_dump(exclude={"format"})}


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
    folder = scratch / "embed" / "index" / vectors.manifest.digest
    with os_errors("writing", f"file://{folder}"), atomic.exclusive(folder.with_suffix(".lock"), stop):
        if folder.is_dir():
            return folder
        ids, texts, places = (list[Any]() for _ in range(3))
        with progress("reading the earlier vectors' ids", vectors.info.rows, "rows") as advance:
            for part in range(len(vectors.info.parts)):
                stop.raise_if_set("reading the earlier vectors' ids")
                id_hash, text_hash = vectors.hashes(part)
                ids.append(id_hash)
                texts.append(text_hash)
                places.append(place_of(part, np.arange(len(id_hash), dtype=np.int64)))
                advance(len(id_hash))
        order = np.argsort(np.concatenate(ids), kind="stable") if ids else np.zeros(0, dtype=np.int64)
        making = folder.with_suffix(".making")
        making.mkdir(exist_ok=True)
        for name, values in (("hash", ids), ("text", texts), ("place", places)):
            (np.concatenate(values)[order] if values else order).tofile(making / name)
        making.rename(folder)
    return folder


class RowIndex:
    """A finished index, mapped into memory. Pages are returned to the system after each look-up."""

    def __init__(self, folder: Path) -> None:
        self._maps: list[mmap.mmap] = []
        self._hash, self._text = self._open(folder / "hash"), self._open(folder / "text")
        self._place = self._open(folder / "place").view(np.int64)

    def look_up(self, id_hash: UInt64s, text_hash: UInt64s | None = None) -> tuple[Int64s, Bools]:
        """Return places [N] of rows with this id and this text (None: any) or -1, and which ids were found [N].

        Rows are compared by these hashes of 64 bits alone.
        """
        at = np.searchsorted(self._hash, id_hash)
        known = at < len(self._hash)
        known[known] = self._hash[at[known]] == id_hash[known]
        same = known.copy()
        if text_hash is not None:
            same[known] = self._text[at[known]] == text_hash[known]
        place = np.full(len(at), -1, dtype=np.int64)
        place[same] = self._place[at[same]]
        for one in self._maps:
            one.madvise(mmap.MADV_DONTNEED)
        return place, known

    def _open(self, path: Path) -> UInt64s:
        if not path.stat().st_size:
            return np.zeros(0, dtype=np.uint64)
        with path.open("rb") as file:
            self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return np.frombuffer(self._maps[-1], dtype=np.uint64)


def take_over(vectors: VectorSet, place: Int64s) -> tuple[Stored, Float32s | None]:
    """Return stored vectors [N, dim] and scales [N] of rows by their place in the earlier cycle."""
    parts, rows = part_and_row(place)
    values = np.empty((len(place), vectors.layout.dim), dtype=vectors.layout.numpy_dtype)
    scale = np.empty(len(place), dtype=np.float32) if vectors.layout.has_scale else None
    for part in np.unique(parts).tolist():
        chosen = np.flatnonzero(parts == part)
        values[chosen], found = vectors.stored(part, rows[chosen])
        if scale is not None and found is not None:
            scale[chosen] = found
    return values, scale
