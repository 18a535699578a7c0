"""How vectors have moved since an earlier cycle."""

from pathlib import Path

import numpy as np

from pipeline.core.arrays import Float32s
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.embed.carry import index_of, take_over
from pipeline.embed.index import RowIndex
from pipeline.embed.output import from_stored
from pipeline.embed.vector_set import VectorSet
from pipeline.embed.verify_report import Check, judge, skipped

SAMPLE_ROWS = 100_000
"""Common rows whose vectors are compared; which ids are common is looked up for all."""
_SAME = 0.9999


def check_drift(
    vectors: VectorSet, previous: VectorSet, scratch: Path, min_cosine: float | None, stop: StopSignal
) -> Check:
    """Ids in common with an earlier cycle, the mean cosine of their vectors, and the share of those that moved."""
    name = previous.info.cycle
    if previous.layout.dim != vectors.layout.dim:
        return skipped("drift", f"cycle {name} has {previous.layout.dim} dimensions, this one {vectors.layout.dim}")
    index = RowIndex(index_of(previous, scratch, stop))
    step = np.uint64(max(1, vectors.info.rows // SAMPLE_ROWS))
    common = 0
    cosines: list[Float32s] = []
    with progress("comparing with the previous cycle", vectors.info.rows, "rows") as advance:
        for part in range(len(vectors.info.parts)):
            stop.raise_if_set("comparing with the previous cycle")
            hashes = vectors.hashes(part)[0]
            place = index.find(hashes)
            common += int((place >= 0).sum())
            rows = np.flatnonzero((place >= 0) & (hashes % step == 0))
            ours, theirs = from_stored(*vectors.stored(part, rows)), from_stored(*take_over(previous, place[rows]))
            cosines.append(cosine(ours, theirs))
            advance(len(hashes))
    found = np.concatenate(cosines)
    added, gone = vectors.info.rows - common, previous.info.rows - common
    ids = f"{common:,} ids in common with cycle {name}, {added:,} new, {gone:,} gone"
    if not len(found):
        return judge("drift", [], ids)
    mean, moved = float(found.mean()), float((found < _SAME).mean())
    seen = f"{ids}; mean cosine {mean:.4f}, {moved:.1%} of the vectors moved"
    too_far = [f"{seen}; expected at least {min_cosine}"] if min_cosine is not None and mean < min_cosine else []
    return judge("drift", too_far, seen, {"mean_cosine": mean, "moved_share": moved, "common_ids": common})


def cosine(left: Float32s, right: Float32s) -> Float32s:
    """Of two vectors in each row [N, D]."""
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    found: Float32s = ((left * right).sum(axis=1) / np.maximum(lengths, 1e-12)).astype(np.float32)
    return found.clip(-1.0, 1.0)
