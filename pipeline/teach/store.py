"""Find and load what a teacher computed for prepared partitions and for mined negatives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from pipeline.core.arrays import Float32s
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.data.taught import TaughtPartition, TaughtRows
from pipeline.io.commit import fetch_dir, read_manifest
from pipeline.io.storage import Storage

KIND, TEACH, MINED = "taught", "trnpipe teach", "mined"


class TaughtInfo(Record):
    """The manifest fields of a folder with the arrays of a `TaughtPartition`, or the scores of mined negatives."""

    schema_version: int = 1
    teacher: str = Field(description="Digest of the teacher")
    source: str = Field(description="Fingerprint of the prepared partition, or digest of the mined negatives")
    rows: tuple[int, ...] = Field(description="Number of training rows in each bucket")
    width: int = Field(description="Size of the vectors (0: the teacher has none)")


@dataclass(frozen=True)
class Taught:
    """What the teacher computed for a cycle: a folder for each partition by its fingerprint, and one for mined ones."""

    workspace: Storage
    partitions: Mapping[str, str]
    mined: str | None
    width: int

    @property
    def identity(self) -> str:
        return fingerprint([dict(self.partitions), self.mined])

    def open_rows(self, sources: Sequence[tuple[str, tuple[int, ...]]], cache_dir: Path) -> TaughtRows:
        """Memory-map what was computed for partitions, given by fingerprint and number of rows per bucket.

        Raises DataError if it does not have the same number of rows.
        """
        opened = [self._load(self.partitions[name], rows, (sum(rows),), cache_dir) for name, rows in sources]
        partitions = [TaughtPartition(rows, **arrays) for (_, rows), arrays in zip(sources, opened, strict=True)]
        return TaughtRows(partitions, self.width)

    def open_mined(self, rows: tuple[int, ...], shape: tuple[int, ...], cache_dir: Path) -> Float32s | None:
        """Memory-map the scores of mined negatives, if there are any. Raises DataError if they have another shape."""
        return None if self.mined is None else self._load(self.mined, rows, shape, cache_dir)["score"]

    def _load(
        self, prefix: str, rows: tuple[int, ...], shape: tuple[int, ...], cache_dir: Path
    ) -> dict[str, npt.NDArray[Any]]:
        info, folder = find_taught(self.workspace, prefix), fetch_dir(self.workspace, prefix, cache_dir, deep=False)
        try:
            arrays = {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}
        except (OSError, ValueError) as error:
            raise _damaged(self.workspace, prefix, str(error)) from error
        shapes = {name: array.shape for name, array in arrays.items() if name != "vectors"}
        if info is None or info.rows != rows or {*shapes.values()} != {shape}:
            raise _damaged(self.workspace, prefix, f"it has {shapes} instead of {shape}")
        return arrays


def find_taught(workspace: Storage, prefix: str) -> TaughtInfo | None:
    """Look up a committed folder. Returns None if it does not exist, and raises DataError if it cannot be read."""
    manifest = read_manifest(workspace, prefix)
    try:
        return None if manifest is None else TaughtInfo.model_validate(manifest.fields)
    except ValidationError as error:
        raise _damaged(workspace, prefix, f"{error.errors(include_url=False)[0]['loc']}") from error


def gather_taught(workspace: Storage, outputs: Mapping[str, str], token_sets: Sequence[str], negatives: str) -> Taught:
    """Return what the teach stage computed for the given partitions (fingerprints) and negatives (digest or "").

    `outputs` are those of its result. Raises ConfigError if anything is missing.
    """
    infos = {prefix: find_taught(workspace, prefix) for prefix in outputs.values()}
    by_source = {info.source: prefix for prefix, info in infos.items() if info is not None}
    width = max((info.width for info in infos.values() if info is not None), default=0)
    missing = [name for name in token_sets if name not in by_source]
    if missing or (not width and negatives and negatives not in by_source):  # a teacher without vectors scores pairs
        what = f"{len(missing)} of {len(token_sets)} prepared partitions" if missing else "the mined negatives"
        raise ConfigError(
            f"train.teacher requires what the teacher computed, but it is missing for {what}",
            expected="the result of the teach stage for the data of this run",
            next_command=f"{TEACH}, with the settings of this run, or --train.teacher ''",
        )
    return Taught(workspace, {name: by_source[name] for name in token_sets}, by_source.get(negatives), width)


def _damaged(workspace: Storage, prefix: str, reason: str) -> DataError:
    return DataError(
        f"{workspace.uri(prefix)} does not contain valid vectors or scores of a teacher: {reason}",
        expected=f"a folder committed by this version of {TEACH}",
        next_command=f"delete the folder, then run {TEACH}",
    )
