"""Commit what a teacher computed for a partition, or for mined negatives, to the workspace and load it again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from pipeline.core.errors import ConfigError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.data.taught import TaughtPartition, TaughtRows
from pipeline.io.commit import fetch_dir, read_manifest
from pipeline.io.storage import Storage

KIND, TEACH, MINED = "taught", "trnpipe teach", "mined"
ARRAYS = ("score", "query", "product", "vectors")


class TaughtInfo(Record):
    """The manifest fields of a folder with the arrays of a `TaughtPartition`, or the scores of mined negatives."""

    schema_version: int = 1
    teacher: str = Field(description="Digest of the teacher")
    source: str = Field(description="Fingerprint of the prepared partition, or digest of the mined negatives")
    rows: tuple[int, ...] = Field(description="Number of rows in each bucket, or of queries with mined negatives")
    width: int = Field(description="Size of the vectors (0: the teacher has none)")


@dataclass(frozen=True)
class Taught:
    """What the teacher computed for a cycle: a folder for each partition by its fingerprint, and one for mined ones."""

    partitions: Mapping[str, str]
    mined: str | None
    width: int

    @property
    def identity(self) -> str:
        return fingerprint([dict(self.partitions), self.mined])


def find_taught(workspace: Storage, prefix: str) -> TaughtInfo | None:
    """Look up a committed folder. Returns None if it does not exist, and raises DataError if it cannot be read."""
    manifest = read_manifest(workspace, prefix)
    if manifest is None:
        return None
    try:
        return TaughtInfo.model_validate(manifest.fields)
    except ValidationError as error:
        raise _damaged(workspace, prefix, f"{error.errors(include_url=False)[0]['loc']}") from error


def gather_taught(
    workspace: Storage, outputs: Mapping[str, str] | None, token_sets: Sequence[str], negatives: str
) -> Taught:
    """Return what the teach stage computed for the given partitions (fingerprints) and negatives (digest or "").

    `outputs` are those of its result. Raises ConfigError if anything is missing.
    """
    infos = {prefix: find_taught(workspace, prefix) for prefix in (outputs or {}).values()}
    by_source = {info.source: prefix for prefix, info in infos.items() if info is not None}
    missing = [name for name in token_sets if name not in by_source]
    if missing or (MINED in (outputs or {}) and negatives and negatives not in by_source):
        what = f"{len(missing)} of {len(token_sets)} prepared partitions" if missing else "the mined negatives"
        raise ConfigError(
            f"train.teacher requires what the teacher computed, but it is missing for {what}",
            expected="the result of the teach stage for the data of this run",
            next_command=f"{TEACH}, with the settings of this run, or --train.teacher ''",
        )
    partitions = {name: by_source[name] for name in token_sets}
    width = max(info.width for info in infos.values() if info is not None)
    return Taught(partitions, by_source.get(negatives), width)


def open_taught(
    workspace: Storage, taught: Taught, token_sets: Sequence[tuple[str, tuple[int, ...]]], cache_dir: Path
) -> TaughtRows:
    """Memory-map what was computed for partitions, given by their fingerprint and their number of rows per bucket.

    Raises DataError if it does not match the number of rows.
    """
    partitions = []
    for name, rows in token_sets:
        arrays, info = _load(workspace, taught.partitions[name], cache_dir)
        sizes = {array: len(values) for array, values in arrays.items() if array != "vectors"}
        if info.rows != rows or set(sizes.values()) - {sum(rows)}:
            raise _damaged(workspace, taught.partitions[name], f"{sizes} rows instead of {sum(rows)}")
        partitions.append(TaughtPartition(rows, **arrays))
    return TaughtRows(partitions, taught.width)


def open_mined_scores(workspace: Storage, taught: Taught, shape: tuple[int, ...], cache_dir: Path) -> Any:
    """Memory-map the scores of mined negatives. Returns None if they have none. Raises DataError if they do not fit."""
    if taught.mined is None:
        return None
    score = _load(workspace, taught.mined, cache_dir)[0]["score"]
    if score.shape != shape:
        raise _damaged(workspace, taught.mined, f"scores {score.shape} instead of {shape}")
    return score


def _load(workspace: Storage, prefix: str, cache_dir: Path) -> tuple[dict[str, npt.NDArray[Any]], TaughtInfo]:
    info = find_taught(workspace, prefix)
    folder = fetch_dir(workspace, prefix, cache_dir, deep=True)
    names = [name for name in ARRAYS if (folder / f"{name}.npy").exists()]
    try:
        arrays: dict[str, npt.NDArray[Any]] = {n: np.load(folder / f"{n}.npy", mmap_mode="r") for n in names}
    except (OSError, ValueError) as error:
        raise _damaged(workspace, prefix, str(error)) from error
    if info is None or not arrays:
        raise _damaged(workspace, prefix, "it has no arrays")
    return arrays, info


def _damaged(workspace: Storage, prefix: str, reason: str) -> DataError:
    return DataError(
        f"{workspace.uri(prefix)} does not contain valid scores and vectors of a teacher: {reason}",
        expected=f"a folder committed by this version of {TEACH}",
        next_command=f"delete the folder, then run {TEACH}",
    )
