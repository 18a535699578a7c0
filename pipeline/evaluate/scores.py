"""Scores of one model on one holdout: an artefact of its own, so that models and devices are compared without them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipeline.core.arrays import Float32s, Float64s, Int32s, Int64s
from pipeline.core.errors import DataError, first_line
from pipeline.core.manifest import Manifest
from pipeline.core.record import Record
from pipeline.data.shards import Arrays
from pipeline.evaluate.metrics.scored_rows import ScoredRows, SliceColumn
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest, require_manifest
from pipeline.io.storage import Storage, os_errors

# Arrays that an evaluation found, committed under a key that names what decides them, so that they are found again.

ARRAYS_FILE = "arrays.safetensors"


def commit_arrays(
    storage: Storage,
    prefix: str,
    file: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    scratch: Path,
    *,
    kind: str,
    fields: Mapping[str, JsonValue],
) -> Manifest:
    """Commit one file of arrays by name. Raises the errors of a disk.

    By way of a folder of its own in `scratch`, which the cycles of a machine share.
    """
    home = scratch / "arrays"
    with os_errors("writing", f"file://{home}"), atomic.staging_dir(home) as folder:
        try:
            save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, folder / file)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        return commit_dir(storage, folder, prefix, kind=kind, fields=fields)


def save_arrays(
    storage: Storage,
    prefix: str,
    kind: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    scratch: Path,
    fields: Mapping[str, JsonValue] | None = None,
) -> None:
    """Commit arrays by name, and `fields` beside them, unless they are there already.

    `prefix` names what decides the arrays, so another cycle's are the same. They stay: it may be reading them. A writer
    killed at any byte leaves nothing that is read.
    """
    if read_manifest(storage, prefix) is not None:
        return
    commit_arrays(storage, prefix, ARRAYS_FILE, arrays, scratch, kind=kind, fields=fields or {})


def load_arrays(storage: Storage, prefix: str, kind: str, cache_dir: Path) -> tuple[Arrays, Mapping[str, JsonValue]]:
    """What was committed, verified: arrays and fields. Raises DataError."""
    try:
        manifest = require_manifest(storage, prefix)
        if manifest.kind != kind:
            raise DataError(f"it is of kind {manifest.kind}")
        return load_file(fetch_dir(storage, prefix, cache_dir) / ARRAYS_FILE), manifest.fields
    except (DataError, SafetensorError, OSError) as error:
        raise DataError(
            f"{storage.uri(prefix)} holds no {kind} figures: {first_line(error)}",
            expected="what trnpipe evaluate wrote",
            next_command="delete that folder and run trnpipe evaluate again",
        ) from error


KIND = "scores"
FILE = "scores.safetensors"
_SLICE = "slice."


class ScoreInfo(Record):
    """Where scores come from."""

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
    vector_rows: int = Field(0, ge=0, description="Rows of which both embeddings are kept")
    settings_hash: str
    code_version: str


@dataclass(frozen=True)
class VectorSample:
    """Embeddings of M rows, of length one: sample_id int64 [M] ascending, query and product float32 [M, D]."""

    sample_id: Int64s
    query: Float32s
    product: Float32s


@dataclass(frozen=True)
class ScoreSet:
    """N rows in ascending order of sample_id.

    sample_id, query_id int64 [N]; label int32 [N], -1 without one; gain float32 [N]; logits float32 [N, K].
    """

    info: ScoreInfo
    sample_id: Int64s
    query_id: Int64s
    label: Int32s
    gain: Float32s
    logits: Float32s
    slices: Mapping[str, SliceColumn] = field(default_factory=dict)
    vectors: VectorSample | None = None


def save_scores(storage: Storage, prefix: str, scores: ScoreSet, scratch: Path) -> Manifest:
    """Commit scores under `prefix`; `scratch` is a local folder for staging. Raises DataError when arrays disagree."""
    tensors: Arrays = {name: getattr(scores, name) for name in _TYPES if "." not in name}
    tensors |= {_SLICE + name: column.codes for name, column in scores.slices.items()}
    if scores.vectors is not None:
        tensors |= {name: getattr(scores.vectors, name.partition(".")[2]) for name in _TYPES if "." in name}
    description = _Description(info=scores.info, slices={name: column.names for name, column in scores.slices.items()})
    _check(description, tensors, storage.uri(prefix))
    fields = description.model_dump(mode="json")
    return commit_arrays(storage, prefix, FILE, tensors, scratch, kind=KIND, fields=fields)


def load_scores(storage: Storage, prefix: str, cache_dir: Path) -> ScoreSet:
    """Committed scores, every byte verified. Raises DataError naming what is missing or does not fit."""
    where = storage.uri(prefix)
    manifest = read_manifest(storage, prefix)
    if manifest is None or manifest.kind != KIND:
        raise DataError(
            f"{where} holds no scores",
            expected=f"a folder with a MANIFEST.json of kind {KIND}",
            next_command="trnpipe evaluate",
        )
    try:
        description = _Description.model_validate(manifest.fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "info"
        raise _bad(where, f"describes itself in another way ({place}: {first['msg']})") from error
    file = fetch_dir(storage, prefix, cache_dir) / FILE
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise _bad(where, f"has no readable {FILE}: {error}") from error
    _check(description, tensors, where)
    vectors = [tensors[name] for name in _TYPES if "." in name] if description.info.vector_rows else []
    return ScoreSet(
        info=description.info,
        slices={name: SliceColumn(tensors[_SLICE + name], values) for name, values in description.slices.items()},
        vectors=VectorSample(*vectors) if vectors else None,
        **{name: tensors[name] for name in _TYPES if "." not in name},
    )


def to_probabilities(logits: Float32s) -> Float64s:
    """Softmax of [N, K]; NaN in a row with a logit that is not finite."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        raised = np.exp(wide - wide.max(axis=1, keepdims=True))
        probabilities: Float64s = raised / raised.sum(axis=1, keepdims=True)
    return probabilities


def to_rows(scores: ScoreSet) -> ScoredRows:
    """Scores as metrics take them: softmax over the classes in double precision, NaN where a logit is not finite."""
    return ScoredRows(
        query_id=scores.query_id,
        label=scores.label.astype(np.int64),
        gain=scores.gain.astype(np.float64),
        probabilities=to_probabilities(scores.logits),
        labels=scores.info.labels,
        label_gains=scores.info.label_gains,
        slices=dict(scores.slices),
    )


class _Description(BaseModel):
    """The fields of the manifest; `slices`: names of the codes of each slice column."""

    info: ScoreInfo
    slices: dict[str, tuple[str, ...]]


_TYPES: dict[str, tuple[type[np.generic], int]] = {
    "sample_id": (np.int64, 1),
    "query_id": (np.int64, 1),
    "label": (np.int32, 1),
    "gain": (np.float32, 1),
    "logits": (np.float32, 2),
    "vector.sample_id": (np.int64, 1),
    "vector.query": (np.float32, 2),
    "vector.product": (np.float32, 2),
}
"""Element type and number of dimensions of each tensor."""


def _check(description: _Description, tensors: Arrays, where: str) -> None:
    """DataError naming the first tensor that disagrees with the manifest or the rest."""
    info = description.info
    expected = {name for name in _TYPES if "." not in name or info.vector_rows} | {
        _SLICE + name for name in description.slices
    }
    if missing := sorted(expected - tensors.keys()):
        raise _bad(where, f"has no tensor {', '.join(missing)}")
    if extra := sorted(tensors.keys() - expected):
        raise _bad(where, f"has a tensor {', '.join(extra)} that its manifest does not name")
    for name, tensor in tensors.items():
        dtype, dimensions = _TYPES.get(name, (np.int64, 1))
        if tensor.dtype != dtype or tensor.ndim != dimensions:
            raise _bad(where, f"has {name} as {tensor.dtype} of {tensor.ndim} dimensions")
        rows = info.vector_rows if name.startswith("vector.") else info.rows
        if len(tensor) != rows:
            raise _bad(where, f"has {len(tensor)} rows of {name}, not {rows}")
        if name.endswith("sample_id") and not (np.diff(tensor) > 0).all():
            raise _bad(where, f"has {name} that do not ascend")
    if tensors["logits"].shape[1] != len(info.labels):
        raise _bad(where, f"has logits over {tensors['logits'].shape[1]} classes, not {len(info.labels)}")
    for name, size in {
        "label": len(info.labels),
        **{_SLICE + k: len(v) for k, v in description.slices.items()},
    }.items():
        if tensors[name].min(initial=0) < -1 or tensors[name].max(initial=-1) >= size:
            raise _bad(where, f"has {name} outside -1 to {size - 1}")
    if info.vector_rows:
        query, product = tensors["vector.query"].shape, tensors["vector.product"].shape
        if query != product or not np.isin(tensors["vector.sample_id"], tensors["sample_id"]).all():
            raise _bad(where, f"has query vectors {query} and product vectors {product}, or of rows it does not have")


def _bad(where: str, what: str) -> DataError:
    return DataError(
        f"{where} {what}",
        expected="scores of schema 1, as trnpipe evaluate writes them",
        next_command="delete that folder and run trnpipe evaluate again",
    )
