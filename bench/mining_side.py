"""One mining of bench.mining in a process of its own, which may be killed: made-up vectors instead of a model's.

All of mining but the model and the reading of token shards, with default settings: vectors of items in parts, exact
search, choice of negatives, commit.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from bench.embed_flow_side import MemoryPeak
from pipeline.core.arrays import Float32s
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.mine.config import MineConfig
from pipeline.mine.run import JudgedItems, Pieces, Search, all_negatives, mine_share, open_pieces, vector_search
from pipeline.mine.store import Negatives, NegativesInfo, commit_negatives

WIDTH = 64
JUDGED = 5
"""Items judged for each query; the first is its positive."""
_BLOCK = 8192
_NOISE = 0.15
"""Of each number of a query's vector, beside its positive's: cosines of about 0.64."""


class Passed(BaseModel):
    """What one run took, and what it left."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seconds: float
    anonymous_bytes: int
    """Peak of what belongs to no file: heaps and stacks."""
    resident_bytes: int
    """With code and mapped files."""
    start_bytes: int
    """Anonymous memory before: interpreter and libraries."""
    parts_found: int
    """Parts of the queries that an earlier run had left."""
    negatives: int
    digest: str
    """Names the content of the committed negatives."""


class MadeUpVectors:
    """Random directions; a query is near one of the items."""

    def __init__(self, num_items: int, num_queries: int) -> None:
        self.num_items, self.num_queries = num_items, num_queries
        self.every = num_items // num_queries

    def items(self, start: int, stop: int) -> Float32s:
        """[n, WIDTH]"""
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        vectors = np.concatenate([_unit(_random(1, block)) for block in blocks])
        return vectors[start - blocks.start * _BLOCK : stop - blocks.start * _BLOCK]

    def queries(self, start: int, stop: int) -> Float32s:
        """[n, WIDTH]"""
        positives = self.items(start * self.every, stop * self.every)[:: self.every]
        blocks = range(start // _BLOCK, -(-stop // _BLOCK))
        noise = np.concatenate([_random(2, block) for block in blocks])
        noise = noise[start - blocks.start * _BLOCK : stop - blocks.start * _BLOCK]
        return _unit((positives + np.float32(_NOISE) * noise).astype(np.float32))

    def judged(self) -> JudgedItems:
        """The item that a query is near, its positive, and those after it."""
        first = np.arange(self.num_queries, dtype=np.int64)[:, None] * self.every
        items = (first + np.arange(JUDGED)).reshape(-1)
        positive = np.arange(len(items)) % JUDGED == 0
        return JudgedItems(np.arange(self.num_queries + 1, dtype=np.int64) * JUDGED, items, positive)


def _random(kind: int, block: int) -> Float32s:
    return np.random.default_rng([7, kind, block]).standard_normal((_BLOCK, WIDTH), dtype=np.float32)


def _unit(vectors: Float32s) -> Float32s:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / lengths, dtype=np.float32)


def parts_at(place: Path, num_items: int, num_queries: int, config: MineConfig) -> list[Pieces]:
    """Open the parts of a mining below a folder: vectors, negatives."""
    storage, size = open_storage(str(place / "workspace")), (num_items, num_queries)
    return open_pieces(storage, "cycles/bench/mine/made-up", place / "cache", size, config.queries_per_part)


def mine(place: Path, num_items: int, num_queries: int) -> Passed:
    """Mine below a folder, from where an earlier run has come to."""
    config, stop = MineConfig(), StopSignal()
    vectors = MadeUpVectors(num_items, num_queries)
    with MemoryPeak() as memory:
        start_bytes, started = memory.anonymous_bytes, time.monotonic()
        of_vectors, parts = parts_at(place, num_items, num_queries, config)
        found = len(parts.parts.done())
        judged = vectors.judged()

        def open_search() -> Search:
            return vector_search(of_vectors, vectors.items, vectors.queries, config.depth, stop)

        mine_share(parts, open_search, judged, lambda items: items, config, worker=0, workers=1, stop=stop)
        product, counts = all_negatives(parts, config.negatives_per_query)
        info = NegativesInfo(
            dataset="made-up", token_sets=(), rows=(num_items,), source="made-up", settings={}, figures=dict(counts)
        )
        ids = np.arange(num_queries, dtype=np.int64)
        storage, negatives = parts.parts.storage, Negatives(ids, product)
        made = commit_negatives(storage, "negatives/made-up/x", negatives, info, place / "scratch")
        seconds = time.monotonic() - started
    return Passed(
        seconds=seconds,
        anonymous_bytes=memory.anonymous_bytes,
        resident_bytes=memory.resident_bytes,
        start_bytes=start_bytes,
        parts_found=found,
        negatives=counts["negatives"],
        digest=made.digest,
    )


def recall(place: Path, num_items: int, num_queries: int, sample: int) -> float:
    """Share of the best items of the first `sample` queries, by a sort of all their scores in float64, that are found.

    The vectors are those that a finished mining has left; numbers are rounded as retrieval/exact does, so that scores
    are exact and ties go by number.
    """
    config = MineConfig()
    vectors = MadeUpVectors(num_items, num_queries)
    of_vectors, _ = parts_at(place, num_items, num_queries, config)
    search = vector_search(of_vectors, vectors.items, vectors.queries, config.depth, StopSignal())
    found = search(0, sample, vectors.judged().part(0, sample)).items
    scale = 2.0**26
    queries = np.rint(vectors.queries(0, sample).astype(np.float64) * scale)
    scores = np.empty((sample, num_items))
    for start in range(0, num_items, _BLOCK):
        items = np.rint(vectors.items(start, min(num_items, start + _BLOCK)).astype(np.float64) * scale)
        scores[:, start : start + len(items)] = queries @ items.T
    hits = 0
    for row in range(sample):
        best = np.argsort(-scores[row], kind="stable")[: config.depth]
        hits += len(np.intersect1d(best, found[row]))
    return hits / (sample * config.depth)


def main() -> None:
    """Print one JSON object, or the recall."""
    parser = argparse.ArgumentParser(prog="python -m bench.mining_side", description=__doc__)
    parser.add_argument("place", type=Path, help="folder for workspace and scratch")
    parser.add_argument("items", type=int)
    parser.add_argument("queries", type=int)
    parser.add_argument("--recall", type=int, default=0, metavar="QUERIES", help="measure the recall of these instead")
    arguments = parser.parse_args()
    if arguments.recall:
        print(recall(arguments.place, arguments.items, arguments.queries, arguments.recall), flush=True)
    else:
        print(mine(arguments.place, arguments.items, arguments.queries).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
