"""Find the vectors of an earlier cycle that can be reused, and look them up by the hashes of their ids and texts."""

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
    """A cycle that already had complete vectors when the current cycle was planned."""

    cycle: str
    digest: str = Field(description="Digest of the vectors' manifest")


@dataclass(frozen=True)
class Earlier:
    previous: EarlierCycle | None = None
    carry_from: EarlierCycle | None = None
    generation: int = 0


def find_earlier(
    workspace: Storage, cycle: str, mode: str, made_by: Mapping[str, JsonValue], layout: VectorLayout
) -> Earlier:
    """Find the newest complete vectors of any other cycle, and the newest ones that can be reused.

    Vectors can be reused if they were made with the same model and settings and if `mode`, the setting
    output.carry_over, is "auto". Vectors that are incomplete, damaged or from a different version are skipped.
    """

    def complete_vectors(name: str) -> VectorSet | None:
        try:
            return find_vectors(workspace, name)
        except DataError:
            return None

    def reuse_key(made_by: Mapping[str, JsonValue], layout: VectorLayout) -> dict[str, JsonValue]:
        """Return the values that must be equal for vectors to be reused. The file format is allowed to differ."""
        return {**made_by, **layout.model_dump(exclude={"format"})}

    def reference(vectors: VectorSet | None) -> EarlierCycle | None:
        return EarlierCycle(cycle=vectors.info.cycle, digest=vectors.manifest.digest) if vectors else None

    others = [name for name in workspace.list_dirs("embeddings") if name != cycle]
    doing = "looking for earlier vectors"
    candidates = run_parallel(complete_vectors, others, num_threads=_READ_THREADS, stop=workspace.stop, doing=doing)
    sets = [vectors for vectors in candidates if vectors is not None]
    sets.sort(key=lambda vectors: (vectors.info.generation, natural_key(vectors.info.cycle)), reverse=True)
    key = reuse_key(made_by, layout)
    reusable = (each for each in sets if mode == "auto" and reuse_key(each.info.made_by, each.layout) == key)
    newest = sets[0] if sets else None
    return Earlier(reference(newest), reference(next(reusable, None)), newest.info.generation if newest else 0)


def open_earlier(workspace: Storage, earlier: EarlierCycle) -> VectorSet:
    """Open the earlier vectors that a plan refers to. Raises DataError if they have been deleted or changed."""
    vectors = find_vectors(workspace, earlier.cycle)
    if vectors.manifest.digest != earlier.digest:
        raise DataError(
            f"{workspace.uri(vectors.prefix)} has digest {vectors.manifest.digest}",
            expected=f"{earlier.digest}, as when this cycle was planned",
            next_command="embed in a new cycle",
        )
    return vectors


_PART_BITS = 32


def encode_row(part: int, rows: Int64s) -> Int64s:
    """Encode the part and the row as a single integer."""
    return (part << _PART_BITS) + rows


def decode_row(code: Int64s) -> tuple[Int64s, Int64s]:
    """Return (part, row). This is the inverse of `encode_row`."""
    return code >> _PART_BITS, code & ((1 << _PART_BITS) - 1)


def open_row_index(vectors: VectorSet, scratch: Path, stop: StopSignal) -> Path:
    """Return the path of the row index of complete vectors, and build it if this machine does not have it yet.

    Building the index takes 40 bytes of memory per row.
    """
    path, doing = scratch / "embed" / "index" / f"{vectors.manifest.digest}.npy", "reading the earlier vectors' ids"
    with os_errors("writing", f"file://{path}"), atomic.exclusive(path.with_suffix(".lock"), stop):
        if path.exists():
            return path
        columns = tuple([np.zeros(0, dtype=np.uint64)] for _ in range(3))  # hash of the id, hash of the text, row code
        with progress(doing, vectors.info.rows, "rows") as advance:
            for part in range(len(vectors.info.parts)):
                stop.raise_if_set(doing)
                id_hash, text_hash = vectors.hashes(part)
                codes = encode_row(part, np.arange(len(id_hash), dtype=np.int64)).view(np.uint64)
                for column, values in zip(columns, (id_hash, text_hash, codes), strict=True):
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
    """A memory-mapped row index. Its pages are released after each look-up, so that it does not fill the memory."""

    def __init__(self, path: Path) -> None:
        self._index = np.load(path, mmap_mode="r")

    def look_up(self, id_hash: UInt64s, text_hash: UInt64s | None = None) -> tuple[Int64s, Bools]:
        """Look up rows by the hashes of their ids and, unless `text_hash` is None, of their texts.

        Returns the row codes [N], which are -1 for rows without a match, and a mask [N] of the ids that exist.
        """
        ids, texts, codes = self._index
        positions = np.searchsorted(ids, id_hash)
        exists = positions < len(ids)
        exists[exists] = ids[positions[exists]] == id_hash[exists]
        matches = exists.copy()
        if text_hash is not None:
            matches[exists] = texts[positions[exists]] == text_hash[exists]
        result = np.full(len(positions), -1, dtype=np.int64)
        result[matches] = codes[positions[matches]]
        self._index.base.madvise(mmap.MADV_DONTNEED)
        return result, exists
