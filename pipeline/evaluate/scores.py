"""Store arrays that an evaluation computed, above all the scores of one model on one holdout."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipeline.core.arrays import Float32s, Float64s
from pipeline.core.errors import DataError, first_line
from pipeline.core.record import Record
from pipeline.data.shards import Arrays
from pipeline.data.token_sets import TokenSetInfo
from pipeline.evaluate.metrics.scored_rows import ScoredRows, SliceColumn
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest, require_manifest
from pipeline.io.storage import Storage, os_errors

ARRAYS_FILE, FILE = "arrays.safetensors", "scores.safetensors"


def save_arrays(
    storage: Storage,
    prefix: str,
    kind: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    scratch: Path,
    fields: Mapping[str, JsonValue] | None = None,
    file: str = ARRAYS_FILE,
) -> None:
    """Commit arrays by name, with `fields`, unless they exist: `prefix` names all that decides them.

    A writer killed at any byte leaves nothing that is read. Raises the errors of a disk.
    """
    if read_manifest(storage, prefix) is not None:
        return
    home = scratch / "arrays"  # the cycles of a machine share it
    with os_errors("writing", f"file://{home}"), atomic.staging_dir(home) as folder:
        try:
            save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, folder / file)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        commit_dir(storage, folder, prefix, kind=kind, fields=fields or {})


def load_arrays(
    storage: Storage, prefix: str, kind: str, cache_dir: Path, file: str = ARRAYS_FILE
) -> tuple[Arrays, Mapping[str, JsonValue]]:
    """Load committed arrays, every byte verified, and their fields. Raises DataError."""
    try:
        manifest = require_manifest(storage, prefix)
        if manifest.kind != kind:
            raise DataError(f"it is of kind {manifest.kind}")
        return load_file(fetch_dir(storage, prefix, cache_dir) / file), manifest.fields
    except (DataError, SafetensorError, OSError) as error:
        raise _bad(storage, prefix, kind, first_line(error)) from error


def _bad(storage: Storage, prefix: str, kind: str, seen: str) -> DataError:
    return DataError(
        f"{storage.uri(prefix)} holds no {kind}: {seen}",
        expected="what this version of trnpipe evaluate writes",
        next_command="delete that folder and run trnpipe evaluate again",
    )


KIND = "scores"
SLICE = "slice."
ARRAYS = ("sample_id", "query_id", "label", "gain", "logits")


class ScoreInfo(Record):
    """Where scores come from."""

    retired: ClassVar[Mapping[str, Any]] = {"vector_rows": ...}

    schema_version: Literal[1] = 1
    role: str = Field(description="candidate, incumbent, or what else the model was scored as")
    checkpoint: str = Field(description="URI of the checkpoint")
    digest: str = Field(description="Digest of its manifest: names its content")
    cycle: str = Field(description="The cycle that trained it")
    step: int = Field(description="Its optimizer step")
    split: str = Field(description="train, valid or test")
    backend: str
    device: str = Field(description="What graphs are compiled for, such as xla:CPU")
    precision: str = Field(description="fp32, autocast or bf16")
    data: tuple[str, ...] = Field(description="Fingerprints of the prepared partitions")
    labels: tuple[str, ...] = Field(description="Relevance classes, from least to most relevant")
    label_gains: tuple[float, ...]
    rows: int = Field(ge=0)
    settings_hash: str
    code_version: str


@dataclass(frozen=True)
class ScoreSet:
    """N rows in ascending order of sample_id.

    `arrays`: sample_id, query_id int64 [N]; label int32 [N], -1 without one; gain float32 [N]; logits float32 [N, K];
    `slice.<column>` int64 [N], codes into the names of `slices`.
    """

    info: ScoreInfo
    arrays: Arrays
    slices: Mapping[str, tuple[str, ...]]

    @property
    def rows(self) -> ScoredRows:
        """What metrics read: the softmax over the classes in double precision."""
        slices = {name: SliceColumn(self.arrays[SLICE + name], names) for name, names in self.slices.items()}
        return scored_rows(self.arrays, to_probabilities(self.arrays["logits"]), self.info, slices)


class _Description(BaseModel):
    """The fields of the manifest."""

    info: ScoreInfo
    slices: dict[str, tuple[str, ...]]


def save_scores(storage: Storage, prefix: str, scores: ScoreSet, scratch: Path) -> None:
    """Commit scores under `prefix`; `scratch` is a local folder for staging."""
    fields = _Description(info=scores.info, slices=dict(scores.slices)).model_dump(mode="json")
    save_arrays(storage, prefix, KIND, scores.arrays, scratch, fields, FILE)


def load_scores(storage: Storage, prefix: str, cache_dir: Path) -> ScoreSet:
    """Load committed scores, every byte verified. Raises DataError if they are missing or do not fit their manifest."""
    stored, fields = load_arrays(storage, prefix, KIND, cache_dir, FILE)
    # Earlier versions also stored the embeddings of some rows.
    arrays = {name: array for name, array in stored.items() if not name.startswith("vector.")}
    try:
        found = _Description.model_validate(fields)
    except ValidationError as error:
        raise _bad(storage, prefix, KIND, str(error.errors(include_url=False)[0]["loc"])) from error
    names, classes = {*ARRAYS, *(SLICE + name for name in found.slices)}, len(found.info.labels)
    shapes = {name: array.shape for name, array in arrays.items()}
    if shapes != {name: (found.info.rows, classes)[: 1 + (name == "logits")] for name in names}:
        raise _bad(storage, prefix, KIND, f"arrays of {shapes} for {found.info.rows} rows and {classes} labels")
    return ScoreSet(found.info, arrays, found.slices)


def scored_rows(
    arrays: Arrays, probabilities: Float64s, info: ScoreInfo | TokenSetInfo, slices: Mapping[str, SliceColumn]
) -> ScoredRows:
    query_id, label = arrays["query_id"].astype(np.int64), arrays["label"].astype(np.int64)
    gain = arrays["gain"].astype(np.float64)
    return ScoredRows(query_id, label, gain, probabilities, info.labels, info.label_gains, slices)


def to_probabilities(logits: Float32s) -> Float64s:
    """Return the softmax of [N, K], NaN in a row with a logit that is not finite."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        raised = np.exp(wide - wide.max(axis=1, keepdims=True))
        probabilities: Float64s = raised / raised.sum(axis=1, keepdims=True)
    return probabilities
