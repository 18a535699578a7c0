"""Write the vectors of a cycle as a Lance dataset of id and vector: python examples/vectors_to_lance.py VECTORS OUT

VECTORS is `<workspace>/embeddings/<cycle>`. A dataset that is there is replaced. Needs pylance.
"""

import sys
from collections.abc import Iterator

import lance
import numpy as np
import pyarrow as pa

import trnpipe

ROWS = 8192  # read and written at a time


def main(uri: str, out: str) -> None:
    found = trnpipe.open_vectors(uri)
    kind = pa.list_(pa.float32(), found.vectors.shape[1])
    schema = pa.schema([("id", found.ids.type), ("vector", kind)])

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(found), ROWS):
            flat = pa.array(np.asarray(found.vectors[start : start + ROWS], dtype=np.float32).reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(flat, type=kind)
            yield pa.record_batch([found.ids.slice(start, ROWS).combine_chunks(), vectors], schema=schema)

    made = lance.write_dataset(batches(), out, schema=schema, mode="overwrite")
    print(f"{made.count_rows():,} vectors of cycle {found.cycle} in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
