"""Whether an approximate index over the stored vectors still finds what exact search finds."""

import importlib.util

import numpy as np

from pipeline.core.arrays import Float32s
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.embed.vector_set import VectorSet
from pipeline.embed.verify_report import Check, judge, skipped

NEIGHBOURS = 10
_BATCH = 1000


def check_ann(vectors: VectorSet, *, rows: int, queries: int, min_recall: float, stop: StopSignal) -> Check:
    """Recall@10 of a usearch (HNSW) index with its default settings, over a sample spread by the ids' hashes."""
    if not queries:
        return skipped("ann", "embed.verify.ann_queries is 0")
    if importlib.util.find_spec("usearch") is None:
        return skipped("ann", "usearch is not installed: pip install 'trnpipe[ann]'")
    from usearch.index import Index

    values = _sample(vectors, rows, stop)
    if len(values) <= NEIGHBOURS:
        return skipped("ann", f"{len(values)} vectors, more than {NEIGHBOURS} are needed")
    index = Index(ndim=values.shape[1], metric="ip", dtype="f32")
    with progress("building an ANN index", len(values), "vectors") as advance:
        for start in range(0, len(values), _BATCH):
            stop.raise_if_set("building an ANN index")
            part = values[start : start + _BATCH]
            index.add(np.arange(start, start + len(part)), part)
            advance(len(part))
    asked = values[:: max(1, len(values) // queries)][:queries]
    exact = np.argpartition(-(asked @ values.T), NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
    found = np.asarray(index.search(asked, NEIGHBOURS).keys).reshape(len(asked), -1)
    hits = sum(len(set(a) & set(b)) for a, b in zip(exact.tolist(), found.tolist(), strict=True))
    recall = hits / exact.size
    seen = f"recall@{NEIGHBOURS} {recall:.3f} of {len(asked)} vectors among {len(values):,}"
    return judge(
        "ann", [f"{seen}; expected at least {min_recall}"] if recall < min_recall else [], seen, {"recall": recall}
    )


def _sample(vectors: VectorSet, rows: int, stop: StopSignal) -> Float32s:
    step = np.uint64(max(1, vectors.info.rows // rows))
    held = [np.zeros((0, vectors.layout.dim), dtype=np.float32)]
    with progress("sampling vectors", vectors.info.rows, "rows") as advance:
        for part in range(len(vectors.info.parts)):
            for batch, values in vectors.blocks(part):
                stop.raise_if_set("sampling vectors")
                held.append(values[batch["id_hash"].to_numpy() % step == 0])
                advance(len(batch))
    return np.concatenate(held)
