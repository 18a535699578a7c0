"""Hard negatives of many queries: memory, a kill half way, and what the search finds: `python -m bench.mining`.

All of mining but the model and the reading of token shards, with default settings: vectors of items in parts, exact
search, choice of negatives, commit. Each mining is a process of its own, which may be killed.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from bench.results import ROOT, Figure, Result, Target, figure, finish
from pipeline.core.arrays import Float32s
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.mine.config import MineConfig
from pipeline.mine.run import (
    ArrayParts,
    JudgedItems,
    Search,
    mine_worker_slice,
    open_parts,
    read_negatives,
    vector_search,
)
from pipeline.mine.store import Negatives, NegativesInfo, commit_negatives

WIDTH = 64
JUDGED = 5
"""Items judged for each query; the first is its positive."""
_BLOCK = 8192
_NOISE = 0.15
"""Of each number of a query's vector, beside its positive's: cosines of about 0.64."""


NAME = "mining"
TITLE = "Memory of mining hard negatives: 100,000 queries against 1 million items"
METHOD = f"""
Made-up unit vectors of {WIDTH} numbers instead of a model's; each query lies near one item, its positive, and has
{JUDGED} judged items. Default settings: the 100 best of all items, exactly, without the judged and those within the
margin of the positive, the first 8 kept. One run to its end, and one that is killed (SIGKILL) when half of its parts
are committed and started again; the bench fails where their negatives differ in a byte. Memory is that of the process
every 50 ms, anonymous: heaps and stacks, without code and mapped files. recall: of the best items of some queries, by a
sort of all their scores, the share that the search in chunks found.
"""
TARGET = Target(figure="memory", comparison="<", value=4.0)
_LOOK_S = 0.05
_PAGE_BYTES = resource.getpagesize()


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


class MemoryPeak:
    """Largest memory of this process, looked at every 50 ms. Use as a context manager."""

    def __init__(self) -> None:
        self.resident_bytes = self.anonymous_bytes = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._work, name="memory", daemon=True)

    def __enter__(self) -> "MemoryPeak":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._left.wait(_LOOK_S):
            self._look()

    def _look(self) -> None:
        """Read the resident pages and, of them, those that belong to a file."""
        resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
        self.resident_bytes = max(self.resident_bytes, _PAGE_BYTES * resident)
        self.anonymous_bytes = max(self.anonymous_bytes, _PAGE_BYTES * (resident - shared))


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


def parts_at(place: Path, num_items: int, num_queries: int, config: MineConfig) -> list[ArrayParts]:
    """Open the parts of a mining below a folder: vectors, negatives."""
    storage, size = open_storage(str(place / "workspace")), (num_items, num_queries)
    return open_parts(storage, "cycles/bench/mine/made-up", place / "cache", size, config.queries_per_part)


def mine_here(place: Path, num_items: int, num_queries: int) -> Passed:
    """Mine below a folder, from where an earlier run has come to."""
    config, stop = MineConfig(), StopSignal()
    vectors = MadeUpVectors(num_items, num_queries)
    with MemoryPeak() as memory:
        start_bytes, started = memory.anonymous_bytes, time.monotonic()
        of_vectors, parts = parts_at(place, num_items, num_queries, config)
        found = len(parts.store.done())
        judged = vectors.judged()

        def open_search() -> Search:
            return vector_search(of_vectors, vectors.items, vectors.queries, config.depth, stop)

        mine_worker_slice(parts, open_search, judged, lambda items: items, config, worker=0, workers=1, stop=stop)
        product, counts = read_negatives(parts, config.negatives_per_query)
        info = NegativesInfo(
            dataset="made-up", token_sets=(), rows=(num_items,), source="made-up", settings={}, figures=dict(counts)
        )
        ids = np.arange(num_queries, dtype=np.int64)
        storage, negatives = parts.store.storage, Negatives(ids, product)
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


def start(place: Path, items: int, queries: int) -> "subprocess.Popen[str]":
    """A mining in a process of its own."""
    command = [sys.executable, "-m", f"bench.{NAME}", "--place", str(place), str(items), str(queries)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def mine(place: Path, items: int, queries: int) -> Passed:
    """To the end. Raises RuntimeError when it fails."""
    process = start(place, items, queries)
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a mining ended with {process.returncode}")
    return Passed.model_validate_json(said)


def kill_half_way(place: Path, items: int, queries: int) -> float:
    """Start, and kill when half of the parts are there; seconds until then. Raises RuntimeError when it had ended."""
    _, parts = parts_at(place, items, queries, MineConfig())
    began, process = time.monotonic(), start(place, items, queries)
    while len(parts.store.done()) < len(parts) // 2:
        if process.poll() is not None:
            raise RuntimeError(f"a mining ended with {process.returncode} before it was half way")
        time.sleep(_LOOK_S)
    process.kill()
    process.communicate()
    return time.monotonic() - began


def figures_of(whole: Passed, killed_s: float, resumed: Passed, found: float, sample: int) -> list[Figure]:
    """Raises RuntimeError when the two runs left other negatives."""
    if resumed.digest != whole.digest:
        raise RuntimeError(f"negatives {whole.digest} of a whole run, {resumed.digest} of one that was killed")
    if not resumed.parts_found:
        raise RuntimeError("the second try found nothing of the first")
    peak = max(whole.anonymous_bytes, resumed.anonymous_bytes)
    return [
        figure("memory", peak / 2**30, "GiB", "peak of anonymous memory"),
        figure("resident", max(whole.resident_bytes, resumed.resident_bytes) / 2**30, "GiB", "with code and files"),
        figure("start", whole.start_bytes / 2**30, "GiB", "anonymous memory before: interpreter and libraries"),
        figure("recall", found, "", f"best items found, {sample} queries against a sort of all scores"),
        figure("seconds", whole.seconds, "s", "a whole run"),
        figure("killed", killed_s, "s", "the run that was killed, until then"),
        figure("resumed", resumed.seconds, "s", "the same run started again, to its end: equal negatives"),
        figure("parts_found", resumed.parts_found, "parts", "of queries, that were not mined again"),
        figure("negatives", whole.negatives, "", "negatives found"),
    ]


def run(*, quick: bool) -> Result:
    """A whole run, one that is killed, and the recall of the search."""
    items, queries, sample = (50_000, 5_000, 50) if quick else (1_000_000, 100_000, 200)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = mine(folder / "whole", items, queries)
        killed_s = kill_half_way(folder / "killed", items, queries)
        resumed = mine(folder / "killed", items, queries)
        found = recall(folder / "whole", items, queries, sample)
    return finish(
        NAME,
        TITLE,
        METHOD,
        figures_of(whole, killed_s, resumed, found, sample),
        quick=quick,
        target=TARGET,
        settings={"items": items, "queries": queries, "width": WIDTH},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few items and queries: proves that the script works")
    parser.add_argument("--place", nargs=3, metavar=("FOLDER", "ITEMS", "QUERIES"), help="one mining there, in JSON")
    given = parser.parse_args()
    if given.place:
        place, num_items, num_queries = given.place
        print(mine_here(Path(place), int(num_items), int(num_queries)).model_dump_json(), flush=True)
    else:
        run(quick=given.quick)
