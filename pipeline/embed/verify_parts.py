"""Checks that need the vectors alone: files, schema, numbers, ids."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.core.arrays import Float32s
from pipeline.core.format import format_bytes
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.embed.duplicates import find_duplicates
from pipeline.embed.output import metadata_of
from pipeline.embed.parts import id_range
from pipeline.embed.texts import id_hashes
from pipeline.embed.vector_set import VectorSet, ids_at
from pipeline.embed.verify_report import Check, judge
from pipeline.io.commit import verify_dir

_MAX_DUPLICATES = 1000


def check_files(vectors: VectorSet) -> Check:
    """Sizes and checksums of every file, by reading all bytes."""
    manifest = verify_dir(vectors.storage, vectors.prefix, deep=True)
    return judge(
        "files", [], f"{len(manifest.files)} files, {format_bytes(manifest.size_bytes)}, every byte as written"
    )


def check_numbers(vectors: VectorSet, norm_tolerance: float, stop: StopSignal) -> Check:
    """Schema and metadata, rows, ids with their hashes and ranges; finite vectors of length one."""
    problems: list[str] = []
    worst = 0.0
    with progress("verifying vectors", vectors.info.rows, "rows") as advance:
        for part, info in enumerate(vectors.info.parts):
            name = info.files[-1]
            problems += [f"{name}: {problem}" for problem in _schema_problems(vectors, part)]
            ids: list[pa.Array] = []
            for batch, values in vectors.blocks(part):
                stop.raise_if_set("verifying vectors")
                distance, found = _block_problems(batch, values, norm_tolerance)
                worst = max(worst, distance)
                problems += [f"{name}: {problem}" for problem in found]
                ids.append(batch["id"])
                advance(len(batch))
            rows = sum(map(len, ids))
            if rows != info.rows:
                problems.append(f"{name}: {rows:,} rows, its manifest says {info.rows:,}")
            elif rows and id_range(pa.concat_arrays(ids)) != (info.id_min, info.id_max):
                problems.append(f"{name}: its ids are not from {info.id_min!r} to {info.id_max!r}")
    seen = f"{vectors.info.rows:,} vectors finite, length at most {worst:.1e} from 1"
    return judge("numbers", problems, seen, {"max_norm_distance": worst})


def _schema_problems(vectors: VectorSet, part: int) -> list[str]:
    schema = vectors.schema(part)
    expected = vectors.layout.columns(with_vectors=vectors.layout.format == "parquet")
    problems = []
    if [(f.name, f.type) for f in schema] != [(f.name, f.type) for f in expected]:
        problems.append(f"columns {schema.names}, expected {expected.names}")
    metadata = metadata_of(schema)
    for name, value in {"plan": vectors.info.plan, "checkpoint_digest": vectors.info.model.digest}.items():
        if metadata.get(name) != value:
            problems.append(f"its {name} is {metadata.get(name)}, that of the manifest {value}")
    return problems


def _block_problems(batch: pa.RecordBatch, values: Float32s, norm_tolerance: float) -> tuple[float, list[str]]:
    """Largest distance of a length from one, and what is wrong."""
    ids, problems = batch["id"].to_pylist(), []
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        problems.append(f"the vector of {ids[bad[0]]!r} and {len(bad) - 1} others are not finite")
    with np.errstate(invalid="ignore"):
        distance = np.nan_to_num(np.abs(np.linalg.norm(values.astype(np.float64), axis=1) - 1.0))
    far = np.flatnonzero(distance > norm_tolerance)
    if len(far):
        problems.append(f"the vector of {ids[far[0]]!r} and {len(far) - 1} others are not of length one")
    wrong = np.flatnonzero(id_hashes(ids) != batch["id_hash"].to_numpy())
    if len(wrong):
        problems.append(f"the hash of id {ids[wrong[0]]!r} is wrong")
    return float(distance.max(initial=0.0)), problems


def check_unique(vectors: VectorSet, scratch: Path, stop: StopSignal) -> Check:
    """No id is in two rows, of one part or of several."""
    problems: list[str] = []
    parts = range(len(vectors.info.parts))
    for part in parts:
        hashes = vectors.hashes(part)[0]
        if len(np.unique(hashes)) != len(hashes):
            problems.append(f"{vectors.info.parts[part].files[-1]} has an id twice")
    found = find_duplicates(
        (vectors.hashes(part)[0] for part in parts),
        lambda part, rows: ids_at(vectors, part, rows),
        folder=scratch / "embed" / f"verify-{vectors.info.plan[:16]}",
        expected=vectors.info.rows,
        limit=_MAX_DUPLICATES,
        stop=stop,
    )
    for part, rows in found.items():
        name = ids_at(vectors, part, rows[:1])[0]
        problems.append(f"{len(rows)} ids of {vectors.info.parts[part].files[-1]} are there before, such as {name!r}")
    return judge("unique", problems, f"{vectors.info.rows:,} ids, each once")
