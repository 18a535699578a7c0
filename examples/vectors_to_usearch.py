"""Write a usearch index of the vectors of a cycle: python examples/vectors_to_usearch.py VECTORS OUT

VECTORS is `<workspace>/embeddings/<cycle>`. Keys are the numbers of the rows, and OUT.ids.arrow has the id of each.
Needs usearch.
"""

import sys

import numpy as np
import pyarrow as pa
from usearch.index import Index

import trnpipe

ROWS = 8192  # read and added at a time


def main(uri: str, out: str) -> None:
    found = trnpipe.open_vectors(uri)
    index = Index(ndim=found.vectors.shape[1], metric="ip", dtype="f16" if found.vectors.dtype == np.float16 else "f32")
    for start in range(0, len(found), ROWS):
        rows = np.array(found.vectors[start : start + ROWS])
        index.add(np.arange(start, start + len(rows), dtype=np.uint64), rows)
    index.save(out)
    ids = pa.table({"id": found.ids})
    with pa.ipc.new_file(f"{out}.ids.arrow", ids.schema) as writer:
        writer.write_table(ids)
    print(f"{len(index):,} vectors of cycle {found.cycle} in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
