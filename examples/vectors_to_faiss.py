"""Write a faiss index of the vectors of a cycle.

    python examples/vectors_to_faiss.py VECTORS OUT [FACTORY]

VECTORS is `<workspace>/embeddings/<cycle>`; FACTORY is a factory string such as Flat (default) or HNSW32. faiss numbers
the vectors, and OUT.ids.arrow contains the id of each number. Needs faiss-cpu.
"""

import sys

import faiss
import numpy as np
import pyarrow as pa

import trnpipe

ROWS = 8192  # per batch


def main(uri: str, out: str, factory: str = "Flat") -> None:
    stored = trnpipe.open_vectors(uri)
    index = faiss.index_factory(stored.vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    if not index.is_trained:  # IVF and PQ are trained on a sample
        index.train(np.asarray(stored.vectors[:: max(1, len(stored) // 200_000)], dtype=np.float32))
    for start in range(0, len(stored), ROWS):
        index.add(np.asarray(stored.vectors[start : start + ROWS], dtype=np.float32))
    faiss.write_index(index, out)
    ids = pa.table({"id": stored.ids})
    with pa.ipc.new_file(f"{out}.ids.arrow", ids.schema) as writer:
        writer.write_table(ids)
    print(f"{index.ntotal:,} vectors of cycle {stored.cycle} in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
