"""Scored rows on their way to a score set: committed part by part, so that a killed evaluation goes on.

A part holds the rows from place `start` to place `stop` of the holdout's order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file

from pipeline.core.errors import DataError
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.evaluate.saved_arrays import stage_arrays
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest
from pipeline.io.storage import Storage

KIND = "score part"
FILE = "part.safetensors"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class PartStore:
    """The parts of one model on one holdout, below `prefix`."""

    storage: Storage
    prefix: str
    scratch: Path
    warn: Callable[[str], None]

    def load(self) -> tuple[int, list[Arrays]]:
        """The place to go on from, and the arrays of all rows before it. A damaged part and those after it are lost."""
        place, found = 0, list[Arrays]()
        for name in self.storage.list_dirs(f"{self.prefix}/"):
            prefix = f"{self.prefix}/{name}"
            try:
                manifest = read_manifest(self.storage, prefix)
                if manifest is None or manifest.kind != KIND or manifest.fields.get("start") != place:
                    break
                stop = manifest.fields.get("stop")
                arrays = load_file(fetch_dir(self.storage, prefix, self.scratch / "parts") / FILE)
                if not isinstance(stop, int) or {len(values) for values in arrays.values()} != {stop - place}:
                    raise DataError(f"{self.storage.uri(prefix)} does not hold the rows it says it does")
            except (DataError, SafetensorError, OSError) as error:
                self.warn(f"scores from row {place:,} on are computed again: {error}")
                break
            found.append(arrays)
            place = stop
        return place, found

    def commit(self, start: int, arrays: Arrays) -> None:
        """Publish the rows from `start` on."""
        stop = start + len(next(iter(arrays.values())))
        folder = self.scratch / "part"
        stage_arrays(folder, FILE, arrays)
        prefix = f"{self.prefix}/{start:012d}"
        commit_dir(self.storage, folder, prefix, kind=KIND, fields={"start": start, "stop": stop})

    def clear(self) -> None:
        """Remove all parts, markers first: they are in a score set now."""
        keys = [f"{self.prefix}/{name}/{MANIFEST_NAME}" for name in self.storage.list_dirs(f"{self.prefix}/")]
        self.storage.delete(keys)
        self.storage.delete_prefix(f"{self.prefix}/")
