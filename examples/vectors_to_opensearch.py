"""Write the vectors of a cycle as bulk requests.

    python examples/vectors_to_opensearch.py VECTORS OUT [INDEX]

VECTORS is `<workspace>/embeddings/<cycle>`, OUT is a folder, INDEX the name of the index (default: products). Send each
file with `curl -H "Content-Type: application/x-ndjson" --data-binary @FILE URL/_bulk`. The id of a product is the id
of its document, so sending a file twice is harmless.
"""

import json
import sys
from pathlib import Path

import numpy as np

import trnpipe

MAX_BYTES = 9_000_000  # per request: Amazon OpenSearch accepts 10 MiB on its smaller instances


def main(uri: str, out: str, index: str = "products") -> None:
    stored, folder = trnpipe.open_vectors(uri), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    number, size = 0, MAX_BYTES + 1
    file = None
    for name, row in zip(stored.ids, stored.vectors, strict=True):
        action = json.dumps({"index": {"_index": index, "_id": str(name)}}, ensure_ascii=False)
        document = json.dumps({"id": name.as_py(), "vector": np.asarray(row, np.float32).tolist()}, ensure_ascii=False)
        lines = f"{action}\n{document}\n".encode()
        if file is None or size + len(lines) > MAX_BYTES:
            if file is not None:
                file.close()
            file, size, number = (folder / f"bulk-{number:05d}.ndjson").open("wb"), 0, number + 1
        size += file.write(lines)
    if file is not None:
        file.close()
    print(f"{len(stored):,} vectors of cycle {stored.cycle} in {number} files in {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
