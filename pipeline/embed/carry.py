"""Vectors of an earlier cycle: which cycle, where its rows are, and taking them over."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import JsonValue

from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.stop import StopSignal
from pipeline.embed.index import IndexRows, build_index, part_and_row
from pipeline.embed.output import Stored, VectorLayout
from pipeline.embed.plan import EarlierCycle
from pipeline.embed.vector_set import KIND, VectorSet, open_vectors
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage

MAX_CYCLES = 20
"""Finished cycles that are looked at, the last by name: cycles are named by their time."""


@dataclass(frozen=True)
class Earlier:
    """What was finished before this cycle."""

    previous: EarlierCycle | None = None
    carry_from: EarlierCycle | None = None
    generation: int = 0


def find_earlier(
    workspace: Storage, cycle: str, wanted: str, made_by: Mapping[str, JsonValue], layout: VectorLayout
) -> Earlier:
    """Look for finished vectors of other cycles. `wanted` is output.carry_over.

    Raises ConfigError when a cycle was named whose vectors were made in another way, DataError when it has none.
    """
    names = [name for name in workspace.list_dirs("embeddings") if name != cycle]
    sets = sorted(_finished(workspace, names[-MAX_CYCLES:]), key=lambda one: (one.info.generation, one.info.cycle))
    if wanted == "auto":
        chosen = next((one for one in reversed(sets) if not _difference(one, made_by, layout)), None)
    else:
        chosen = None if wanted == "none" else _named(workspace, wanted, made_by, layout)
    return Earlier(
        _name(sets[-1]) if sets else None,
        _name(chosen) if chosen else None,
        sets[-1].info.generation if sets else 0,
    )


def _named(workspace: Storage, cycle: str, made_by: Mapping[str, JsonValue], layout: VectorLayout) -> VectorSet:
    named = open_vectors(workspace, cycle)
    if difference := _difference(named, made_by, layout):
        raise ConfigError(
            f"the vectors of cycle {cycle} cannot be taken over: {difference}",
            expected="a cycle embedded with the same model and settings",
            next_command="--embed.output.carry-over auto, or none",
        )
    return named


def _finished(workspace: Storage, names: list[str]) -> Iterator[VectorSet]:
    for name in names:
        try:
            manifest = read_manifest(workspace, f"embeddings/{name}")
            if manifest is not None and manifest.kind == KIND:
                yield VectorSet(workspace, f"embeddings/{name}", manifest)
        except DataError:  # damaged, or of another version: nothing to carry over from
            continue


def _name(one: VectorSet) -> EarlierCycle:
    return EarlierCycle(cycle=one.info.cycle, digest=one.manifest.digest)


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
    found = open_vectors(workspace, earlier.cycle)
    if found.manifest.digest != earlier.digest:
        raise DataError(
            f"{workspace.uri(found.prefix)} has digest {found.manifest.digest}",
            expected=f"{earlier.digest}, as when this cycle was planned",
            next_command="embed in a new cycle",
        )
    return found


def index_of(vectors: VectorSet, scratch: Path, stop: StopSignal) -> Path:
    """The row index of finished vectors, made below `scratch` when it is not there."""

    def rows() -> Iterator[IndexRows]:
        for part in range(len(vectors.info.parts)):
            yield IndexRows(part, *vectors.hashes(part))

    folder = scratch / "embed" / "index" / vectors.manifest.digest
    return build_index(folder, rows(), vectors.info.rows, stop)


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
