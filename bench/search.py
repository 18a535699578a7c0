"""A search among 1 million products from a cold start, and again: `python -m bench --only search`."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from bench.mining import MemoryPeak
from bench.results import ROOT, Target, figure, finish
from pipeline.embed.vectors import MATRIX, MappedVectors
from pipeline.inference.index import ProductIndex
from pipeline.retrieval.bm25 import Bm25

NAME = "search"
TITLE = "Time of a search among 1 million products, exactly: by vectors, words and both"
METHOD = """
Made-up unit vectors of 384 numbers in fp16, and titles of six of 20,000 words, written as the cache of `trnpipe search`
holds them. A new process opens them and answers 20 queries, whose vectors are made up too; the first one waits for the
disk. The bench fails unless each list is that of a sort of all cosines in float64. Memory is anonymous: heaps and
stacks, without code and mapped files.
"""
TARGET, WIDTH, TOP, QUERIES, BLOCK = Target(figure="answer", comparison="<", value=2.0), 384, 10, 20, 16_384


def write(folder: Path, items: int) -> None:
    """Write vectors and words."""
    random = np.random.default_rng(7)
    matrix = np.lib.format.open_memmap(folder / MATRIX, mode="w+", dtype="<f2", shape=(items, WIDTH))
    for first in range(0, items, BLOCK):
        block = random.standard_normal((min(BLOCK, items - first), WIDTH), dtype=np.float32)
        matrix[first : first + len(block)] = block / np.linalg.norm(block, axis=1, keepdims=True)
    matrix.flush()
    words = random.integers(0, 20_000, (items, 6))
    Bm25(" ".join(f"word{word}" for word in row) for row in words.tolist()).save(folder)


def answer(folder: Path, items: int) -> dict[str, object]:
    """Open what was written and search. Return seconds of each part and the peak of memory."""
    vectors = np.random.default_rng(8).standard_normal((QUERIES, WIDTH), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with MemoryPeak() as memory:
        seconds, found, began = list[float](), [], time.monotonic()
        names = pa.chunked_array([pa.array(np.arange(items))])
        mapped = MappedVectors(names, np.load(folder / MATRIX, mmap_mode="r"), "", "", "")
        index = ProductIndex(mapped, names, Bm25(saved=folder))
        for number, vector in enumerate(vectors):
            found.append(index.search(f"word{number} word{number + 1}", vector, TOP))
            seconds.append(time.monotonic() - began)
            began = time.monotonic()
    cosines = [mapped.vectors[at : at + BLOCK].astype(np.float64) @ vectors.T for at in range(0, items, BLOCK)]
    best = np.argsort(-np.concatenate(cosines), axis=0, kind="stable")[:TOP].T
    is_exact = all(np.array_equal(one.vectors.items[0, :TOP], row) for one, row in zip(found, best, strict=True))
    return {"seconds": seconds, "anonymous_bytes": memory.anonymous_bytes, "is_exact": is_exact}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--answer", nargs=2, metavar=("FOLDER", "ITEMS"))
    arguments = parser.parse_args()
    if arguments.answer:
        print(json.dumps(answer(Path(arguments.answer[0]), int(arguments.answer[1]))))
        return 0
    items = 20_000 if arguments.quick else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), items)
        command = [sys.executable, "-m", f"bench.{NAME}", "--answer", folder, str(items)]
        found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    if not found["is_exact"]:
        raise RuntimeError("search did not find the best items")
    first, *others = found["seconds"]
    figures = [
        figure("answer", others, "s", "a query, opened already"),
        figure("first", first, "s", "opening, and the first query"),
        figure("memory", found["anonymous_bytes"] / 2**20, "MiB", "peak"),
    ]
    finish(NAME, TITLE, METHOD, figures, quick=arguments.quick, target=TARGET, settings={"items": items, "top": TOP})
    return 0


if __name__ == "__main__":
    sys.exit(main())
