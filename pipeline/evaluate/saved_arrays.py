"""Arrays that an evaluation found, committed under a key that names what decides them, so that they are found again."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import DataError
from pipeline.io.commit import commit_dir, fetch_dir, require_manifest
from pipeline.io.errors import os_errors
from pipeline.io.storage import Storage

FILE = "arrays.safetensors"

Arrays = Mapping[str, npt.NDArray[Any]]


def stage_arrays(folder: Path, file: str, arrays: Arrays) -> None:
    """Make a folder that holds one file of arrays by name, to be committed. Raises the errors of a disk."""
    shutil.rmtree(folder, ignore_errors=True)
    with os_errors("writing", f"file://{folder}"):
        folder.mkdir(parents=True)
        try:
            save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, folder / file)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error


def save_arrays(
    storage: Storage,
    prefix: str,
    kind: str,
    arrays: Arrays,
    scratch: Path,
    fields: Mapping[str, JsonValue] | None = None,
) -> None:
    """Commit arrays by name, and `fields` beside them. A writer killed at any byte leaves nothing that is read."""
    folder = scratch / kind
    stage_arrays(folder, FILE, arrays)
    commit_dir(storage, folder, prefix, kind=kind, fields=fields or {})


def load_arrays(
    storage: Storage, prefix: str, kind: str, cache_dir: Path
) -> tuple[dict[str, npt.NDArray[Any]], Mapping[str, JsonValue]]:
    """What was committed, verified: arrays and fields. Raises DataError."""
    try:
        manifest = require_manifest(storage, prefix)
        if manifest.kind != kind:
            raise DataError(f"it is of kind {manifest.kind}")
        return load_file(fetch_dir(storage, prefix, cache_dir) / FILE), manifest.fields
    except (DataError, SafetensorError, OSError) as error:
        raise DataError(
            f"{storage.uri(prefix)} holds no {kind} figures: {str(error).splitlines()[0]}",
            expected="what trnpipe evaluate wrote",
            next_command="delete that folder and run trnpipe evaluate again",
        ) from error
