"""Vectors of an earlier cycle: which cycle, where its rows lie by the hashes of id and text, and taking them over."""

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue

from pipeline.core.arrays import Bools, Float32s, Int64s, UInt64s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.format import natural_key
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.progress import progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.embed.vectors import KIND, Stored, VectorLayout, VectorSet, find_vectors
from pipeline.io import atomic
from pipeline.io.commit import read_manifest
from pipeline.io.requests import run_parallel
from pipeline.io.storage import Storage, os_errors

MAX_CYCLES = 20
"""Finished cycles on S3 whose manifest is read: so many of the last by name, and of those that were finished last."""


NUM_STAT_THREADS = 16


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
    """Look for finished vectors of other cycles. `wanted` is output.carry_over.

    Raises ConfigError when a cycle was named whose vectors were made in another way, DataError when it has none.
    """
    sets: list[VectorSet] = []
    others = sorted((name for name in workspace.list_dirs("embeddings") if name != cycle), key=natural_key)
    for name in _latest(workspace, others):
        try:
            manifest = read_manifest(workspace, f"embeddings/{name}")
            if manifest is not None and manifest.kind == KIND:
                sets.append(VectorSet(workspace, f"embeddings/{name}", manifest))
        except DataError:  # damaged, or of another version: nothing to carry over from
            continue
    sets.sort(key=lambda one: (one.info.generation, natural_key(one.info.cycle)))
    chosen = None
    if wanted == "auto":
        chosen = next((one for one in reversed(sets) if not _difference(one, made_by, layout)), None)
    elif wanted != "none":
        chosen = find_vectors(workspace, wanted)
        if difference := _difference(chosen, made_by, layout):
            raise ConfigError(
                f"the vectors of cycle {wanted} cannot be taken over: {difference}",
                expected="a cycle embedded with the same model and settings",
                next_command="--embed.output.carry-over auto, or none",
            )
    previous, carry_from = (
        EarlierCycle(cycle=one.info.cycle, digest=one.manifest.digest) if one else None
        for one in (sets[-1] if sets else None, chosen)
    )
    return Earlier(previous, carry_from, sets[-1].info.generation if sets else 0)


def _latest(workspace: Storage, cycles: Sequence[str]) -> Iterable[str]:
    """Return the cycles that may hold the newest vectors, whatever they are called; on a disk all of them."""
    if len(cycles) <= MAX_CYCLES or workspace.local_path("") is not None:
        return cycles
    stats = run_parallel(
        lambda name: workspace.stat(f"embeddings/{name}/{MANIFEST_NAME}"),
        cycles,
        num_threads=NUM_STAT_THREADS,
        stop=workspace.stop,
        doing="looking for earlier vectors",
    )
    ages = [(stat.age_s, name) for stat, name in zip(stats, cycles, strict=True) if stat and stat.age_s is not None]
    return {*cycles[-MAX_CYCLES:], *(name for _, name in sorted(ages)[:MAX_CYCLES])}


def _difference(one: VectorSet, made_by: Mapping[str, JsonValue], layout: VectorLayout) -> str:
    """The first thing in which vectors differ from ours, in words; empty when they fit."""
    ours = {**made_by, **layout.model_dump(exclude={"format"})}
    theirs = {**one.info.made_by, **one.layout.model_dump(exclude={"format"})}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            return f"{name} was {theirs.get(name)}, and is {ours.get(name)} now"
    return ""


def open_earlier(workspace: Storage, earlier: EarlierCycle) -> VectorSet:
    """The vectors that the plan names. Raises DataError when they are gone or have changed."""
    found = find_vectors(workspace, earlier.cycle)
    if found.manifest.digest != earlier.digest:
        raise DataError(
            f"{workspace.uri(found.prefix)} has digest {found.manifest.digest}",
            expected=f"{earlier.digest}, as when this cycle was planned",
            next_command="embed in a new cycle",
        )
    return found


# Sorting more hashes than memory should hold: records go to files by their leading bits, each is sorted alone.

RECORDS_PER_FILE = 1_000_000
"""What is sorted at a time on average: some tens of MB."""
MAX_FILES = 256
Records = npt.NDArray[Any]


class HashSpill:
    """Structured records with a uint64 field `hash`, added in any order and given back sorted by it.

    Args:
        folder: where a folder of its own is made, and removed on leaving the context.
        expected: about how many records will come.
    Records of one hash come back in the order of the field `place`.
    """

    def __init__(self, folder: Path, dtype: npt.DTypeLike, expected: int) -> None:
        self._folder, self._dtype = folder, np.dtype(dtype)
        files = min(MAX_FILES, max(1, expected // RECORDS_PER_FILE))
        self._bits = (files - 1).bit_length()
        self._files: list[BinaryIO] = []
        self._open = ExitStack()

    def __enter__(self) -> "HashSpill":
        with os_errors("writing", f"file://{self._folder}"), ExitStack() as opening:
            own = opening.enter_context(atomic.staging_dir(self._folder))
            for number in range(1 << self._bits):
                self._files.append(opening.enter_context((own / f"{number:04d}").open("wb+")))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def add(self, records: Records) -> None:
        with os_errors("writing", f"file://{self._folder}"):
            if not self._bits:
                self._files[0].write(records.tobytes())
                return
            target = (records["hash"] >> np.uint64(64 - self._bits)).astype(np.int64)
            order = np.argsort(target, kind="stable")
            ends = np.searchsorted(target[order], np.arange(len(self._files)), side="right")
            start = 0
            for number, end in enumerate(ends.tolist()):
                if end > start:
                    self._files[number].write(records[order[start:end]].tobytes())
                start = end

    def sorted(self) -> Iterator[Records]:
        """All records, a file at a time, in one rising order."""
        for file in self._files:
            with os_errors("reading", f"file://{self._folder}"):
                file.seek(0)
                records = np.frombuffer(file.read(), dtype=self._dtype)
            yield records[np.lexsort((records["place"], records["hash"]))]


RECORD = np.dtype([("hash", "<u8"), ("text", "<u8"), ("place", "<i8")])
_PART_BITS = 32


def place_of(part: int, rows: Int64s) -> Int64s:
    """Part and row of a part in one number."""
    return (part << _PART_BITS) + rows


def part_and_row(place: Int64s) -> tuple[Int64s, Int64s]:
    """The inverse of `place_of`: (part, row)."""
    return place >> _PART_BITS, place & ((1 << _PART_BITS) - 1)


def index_of(vectors: VectorSet, scratch: Path, stop: StopSignal) -> Path:
    """The row index of finished vectors, made below `scratch` when it is not there."""
    folder = scratch / "embed" / "index" / vectors.manifest.digest
    return build_index(folder, map(vectors.hashes, range(len(vectors.info.parts))), vectors.info.rows, stop)


def build_index(folder: Path, parts: Iterable[tuple[UInt64s, UInt64s]], expected: int, stop: StopSignal) -> Path:
    """Make the index unless it is there, of the hashes of ids and texts of each part.

    Processes of one machine make it once; the folder's name names its content.
    """
    with os_errors("writing", f"file://{folder}"), atomic.exclusive(folder.with_suffix(".lock"), stop):
        if not folder.is_dir():
            making = folder.with_suffix(".making")
            with (
                HashSpill(folder.parent, RECORD, expected) as spill,
                progress("reading the earlier vectors' ids", expected, "rows") as advance,
            ):
                for part, (id_hash, text_hash) in enumerate(parts):
                    stop.raise_if_set("reading the earlier vectors' ids")
                    records = np.empty(len(id_hash), dtype=RECORD)
                    records["hash"], records["text"] = id_hash, text_hash
                    records["place"] = place_of(part, np.arange(len(id_hash), dtype=np.int64))
                    spill.add(records)
                    advance(len(id_hash))
                making.mkdir(exist_ok=True)
                with ExitStack() as stack:
                    files = {
                        name: stack.enter_context((making / name).open("wb")) for name in ("hash", "text", "place")
                    }
                    for records in spill.sorted():
                        stop.raise_if_set("sorting the earlier vectors' ids")
                        for name, file in files.items():
                            file.write(np.ascontiguousarray(records[name]).tobytes())
            making.rename(folder)
    return folder


class RowIndex:
    """Look-ups in a finished index. Pages that were looked at are handed back, so that memory stays flat."""

    def __init__(self, folder: Path) -> None:
        self._maps: list[mmap.mmap] = []
        self._hash, self._text = self._open(folder / "hash"), self._open(folder / "text")
        self._place = self._open(folder / "place").view(np.int64)

    def __len__(self) -> int:
        return len(self._hash)

    def look_up(self, id_hash: UInt64s, text_hash: UInt64s | None = None) -> tuple[Int64s, Bools]:
        """Places [N] of rows with this id and this text (None: any), -1 where there is none; and which ids were found
        at all [N].

        Both hashes of 64 bits must agree: rows are not compared any further.
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
    """Stored vectors [N, dim] and scales [N] of rows by their place in the earlier cycle."""
    parts, rows = part_and_row(place)
    values = np.empty((len(place), vectors.layout.dim), dtype=vectors.layout.numpy_dtype)
    scale = np.empty(len(place), dtype=np.float32) if vectors.layout.has_scale else None
    for part in np.unique(parts).tolist():
        chosen = np.flatnonzero(parts == part)
        values[chosen], found = vectors.stored(part, rows[chosen])
        if scale is not None and found is not None:
            scale[chosen] = found
    return values, scale
