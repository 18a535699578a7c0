"""Write the vectors of a cycle for PostgreSQL with pgvector.

    python examples/vectors_to_pgvector.py VECTORS OUT

VECTORS is `<workspace>/embeddings/<cycle>`. Load the file with `psql -c "\\\\copy products (id, vector) FROM 'OUT'"`.
"""

import sys
from pathlib import Path

import numpy as np

import trnpipe

ESCAPED = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})  # PostgreSQL's text format of COPY


def main(uri: str, out: str) -> None:
    stored = trnpipe.open_vectors(uri)
    with Path(out).open("w", encoding="utf-8", newline="") as file:
        for name, row in zip(stored.ids, stored.vectors, strict=True):
            numbers = ",".join(map(repr, np.asarray(row, np.float32).tolist()))
            file.write(f"{str(name).translate(ESCAPED)}\t[{numbers}]\n")
    print(f"{len(stored):,} vectors of cycle {stored.cycle} in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
