"""Write a usearch index of the vectors of a cycle.

    python examples/vectors_to_usearch.py VECTORS OUT

VECTORS is `<workspace>/embeddings/<cycle>`. Keys are row numbers, and OUT.ids.arrow contains the id of each row.
Needs usearch.
"""

import sys

import numpy as np
import pyarrow as pa
from usearch.index import Index

import trnpipe

ROWS = 8192  # per batch


def main(uri: str, out: str) -> None:
    stored = trnpipe.open_vectors(uri)
    index = Index(
        ndim=stored.vectors.shape[1], metric="ip", dtype="f16" if stored.vectors.dtype == np.float16 else "f32"
    )
    for start in range(0, len(stored), ROWS):
        rows = np.array(stored.vectors[start : start + ROWS])
        index.add(np.arange(start, start + len(rows), dtype=np.uint64), rows)
    index.save(out)
    ids = pa.table({"id": stored.ids})
    with pa.ipc.new_file(f"{out}.ids.arrow", ids.schema) as writer:
        writer.write_table(ids)
    print(f"{len(index):,} vectors of cycle {stored.cycle} in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
