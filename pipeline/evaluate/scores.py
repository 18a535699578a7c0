"""Scores of one model on one holdout: an artefact of its own, so that models and devices are compared without them."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from pipeline.core.arrays import Float32s, Int32s, Int64s
from pipeline.core.errors import DataError
from pipeline.core.manifest import Manifest
from pipeline.evaluate.metrics.scored import ScoredRows, SliceColumn
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest, require_manifest
from pipeline.io.storage import Storage, os_errors

# Arrays that an evaluation found, committed under a key that names what decides them, so that they are found again.

ARRAYS_FILE = "arrays.safetensors"

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
    stage_arrays(folder, ARRAYS_FILE, arrays)
    commit_dir(storage, folder, prefix, kind=kind, fields=fields or {})


def load_arrays(
    storage: Storage, prefix: str, kind: str, cache_dir: Path
) -> tuple[dict[str, npt.NDArray[Any]], Mapping[str, JsonValue]]:
    """What was committed, verified: arrays and fields. Raises DataError."""
    try:
        manifest = require_manifest(storage, prefix)
        if manifest.kind != kind:
            raise DataError(f"it is of kind {manifest.kind}")
        return load_file(fetch_dir(storage, prefix, cache_dir) / ARRAYS_FILE), manifest.fields
    except (DataError, SafetensorError, OSError) as error:
        raise DataError(
            f"{storage.uri(prefix)} holds no {kind} figures: {str(error).splitlines()[0]}",
            expected="what trnpipe evaluate wrote",
            next_command="delete that folder and run trnpipe evaluate again",
        ) from error


KIND = "scores"
SCHEMA_VERSION = 1
FILE = "scores.safetensors"
_SLICE = "slice."


class ScoreInfo(BaseModel):
    """Where scores come from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = SCHEMA_VERSION
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
    tensors: dict[str, npt.NDArray[np.generic]] = {name: getattr(scores, name) for name in _TYPES if "." not in name}
    tensors |= {_SLICE + name: column.codes for name, column in scores.slices.items()}
    if scores.vectors is not None:
        tensors |= {
            "vector.sample_id": scores.vectors.sample_id,
            "vector.query": scores.vectors.query,
            "vector.product": scores.vectors.product,
        }
    _check(scores, storage.uri(prefix))
    folder = scratch / "scores" / prefix.replace("/", "-")
    stage_arrays(folder, FILE, tensors)
    return commit_dir(
        storage,
        folder,
        prefix,
        kind=KIND,
        fields={
            "info": scores.info.model_dump(mode="json"),
            "slices": {name: list(column.names) for name, column in scores.slices.items()},
        },
    )


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
        info = ScoreInfo.model_validate(manifest.fields.get("info"))
        names = _Names.model_validate({"slices": manifest.fields.get("slices")}).slices
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "info"
        raise _bad(where, f"describes itself in another way ({place}: {first['msg']})") from error
    if info.schema_version != SCHEMA_VERSION:
        raise _bad(where, f"has schema {info.schema_version}")
    file = fetch_dir(storage, prefix, cache_dir) / FILE
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise _bad(where, f"has no readable {FILE}: {error}") from error
    return _from_tensors(info, names, tensors, where)


def to_rows(scores: ScoreSet) -> ScoredRows:
    """Scores as metrics take them: softmax over the classes in double precision, NaN where a logit is not finite."""
    logits = scores.logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        logits = logits - logits.max(axis=1, keepdims=True)
        probabilities = np.exp(logits)
        probabilities /= probabilities.sum(axis=1, keepdims=True)
    return ScoredRows(
        query_id=scores.query_id,
        label=scores.label.astype(np.int64),
        gain=scores.gain.astype(np.float64),
        probabilities=probabilities,
        labels=scores.info.labels,
        label_gains=scores.info.label_gains,
        slices=dict(scores.slices),
    )


class _Names(BaseModel):
    """Names of the codes of every slice column."""

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


def _from_tensors(
    info: ScoreInfo, names: Mapping[str, tuple[str, ...]], tensors: dict[str, npt.NDArray[np.generic]], where: str
) -> ScoreSet:
    expected = {name for name in _TYPES if "." not in name or info.vector_rows} | {_SLICE + name for name in names}
    if missing := sorted(expected - tensors.keys()):
        raise _bad(where, f"has no tensor {', '.join(missing)}")
    if extra := sorted(tensors.keys() - expected):
        raise _bad(where, f"has a tensor {', '.join(extra)} that its manifest does not name")
    for name, tensor in tensors.items():
        dtype, dimensions = _TYPES.get(name, (np.int64, 1))
        if tensor.dtype != dtype or tensor.ndim != dimensions:
            raise _bad(where, f"has {name} as {tensor.dtype} of {tensor.ndim} dimensions")
    vectors = None
    if info.vector_rows:
        vectors = VectorSample(*(tensors[f"vector.{name}"] for name in ("sample_id", "query", "product")))  # type: ignore[arg-type]
    scores = ScoreSet(
        info=info,
        slices={name: SliceColumn(tensors[_SLICE + name], values) for name, values in names.items()},  # type: ignore[arg-type]
        vectors=vectors,
        **{name: tensors[name] for name in _TYPES if "." not in name},  # type: ignore[arg-type]
    )
    _check(scores, where)
    return scores


def _check(scores: ScoreSet, where: str) -> None:
    """DataError naming the first array that disagrees with the rest."""
    info, rows = scores.info, len(scores.sample_id)
    sizes = {name: len(getattr(scores, name)) for name in ("query_id", "label", "gain", "logits")}
    sizes |= {_SLICE + name: len(column.codes) for name, column in scores.slices.items()}
    for name, size in {"sample_id": rows, **sizes}.items():
        if size != info.rows:
            raise _bad(where, f"has {size} rows of {name}, not {info.rows}")
    if scores.logits.shape[1] != len(info.labels):
        raise _bad(where, f"has logits over {scores.logits.shape[1]} classes, not {len(info.labels)}")
    if not (np.diff(scores.sample_id) > 0).all():
        raise _bad(where, "has sample_id that do not ascend")
    if rows and (scores.label.min() < -1 or scores.label.max() >= len(info.labels)):
        raise _bad(where, f"has labels outside -1 to {len(info.labels) - 1}")
    for name, column in scores.slices.items():
        if rows and (column.codes.min() < -1 or column.codes.max() >= len(column.names)):
            raise _bad(where, f"has codes of slice {name} outside -1 to {len(column.names) - 1}")
    vectors = scores.vectors
    if (0 if vectors is None else len(vectors.sample_id)) != info.vector_rows:
        raise _bad(where, f"does not have {info.vector_rows} rows of vectors")
    if vectors is not None:
        if not (vectors.query.shape == vectors.product.shape and len(vectors.query) == info.vector_rows):
            raise _bad(where, f"has query vectors {vectors.query.shape} and product vectors {vectors.product.shape}")
        if not np.isin(vectors.sample_id, scores.sample_id).all() or not (np.diff(vectors.sample_id) > 0).all():
            raise _bad(where, "has vectors of rows it does not have, or out of order")


def _bad(where: str, what: str) -> DataError:
    return DataError(
        f"{where} {what}",
        expected=f"scores of schema {SCHEMA_VERSION}, as trnpipe evaluate writes them",
        next_command="delete that folder and run trnpipe evaluate again",
    )
