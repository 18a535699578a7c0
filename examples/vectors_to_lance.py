"""Write the vectors of a cycle as a Lance dataset of id and vector.

    python examples/vectors_to_lance.py VECTORS OUT

VECTORS is `<workspace>/embeddings/<cycle>`. An existing dataset is replaced. Needs pylance.
"""

import sys
from collections.abc import Iterator

import lance
import numpy as np
import pyarrow as pa

import trnpipe

ROWS = 8192  # per batch


def main(uri: str, out: str) -> None:
    stored = trnpipe.open_vectors(uri)
    kind = pa.list_(pa.float32(), stored.vectors.shape[1])
    schema = pa.schema([("id", stored.ids.type), ("vector", kind)])

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, len(stored), ROWS):
            flat = pa.array(np.asarray(stored.vectors[start : start + ROWS], dtype=np.float32).reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(flat, type=kind)
            yield pa.record_batch([stored.ids.slice(start, ROWS).combine_chunks(), vectors], schema=schema)

    dataset = lance.write_dataset(batches(), out, schema=schema, mode="overwrite")
    print(f"{dataset.count_rows():,} vectors of cycle {stored.cycle} in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
