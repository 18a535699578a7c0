"""Mining: what ranks the products of a query (vectors of a model, or BM25), and the work of one of several workers.

Work is cut into pieces, each a committed folder: vectors of products, negatives of queries. A piece is the same whoever
makes it, so two that make one at once do no harm, and what is there is not made again.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.context import StageContext
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens, pieces
from pipeline.evaluate.bm25 import Bm25, best_of
from pipeline.evaluate.exact import UNIT, ExactTopK, exact_scores
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest
from pipeline.io.storage import Storage, join_key
from pipeline.mine.config import MineConfig
from pipeline.mine.negatives import empty_folder
from pipeline.mine.task import NONE, Candidates, Counts, Judged, Mining, MiningTask, choose_negatives
from pipeline.settings import Settings

_CHUNK_ITEMS = 16_384
"""Products that queries are held against at a time: their vectors are in memory once, read from the map."""
_WINDOW = 512
_KEPT = "finished parts are kept"


@dataclass(frozen=True)
class Parts:
    """The pieces of one kind, `vectors` of items or `negatives` of queries: `total` rows, `rows_per_part` in each.

    Args:
        prefix: in the workspace; of this very work, with these sizes of pieces, alone.
        scratch: a local folder of this process alone.
        cache_dir: a local folder for what is read, which processes may share.
    """

    workspace: Storage
    prefix: str
    kind: str
    scratch: Path
    cache_dir: Path
    total: int
    rows_per_part: int

    def __len__(self) -> int:
        return -(-self.total // self.rows_per_part)

    def rows(self, index: int) -> tuple[int, int]:
        """The first row of a piece, and the one behind its last."""
        first = index * self.rows_per_part
        return first, min(self.total, first + self.rows_per_part)

    def done(self) -> set[int]:
        root = join_key(self.prefix, self.kind)
        names = (name for name in self.workspace.list_dirs(root) if name.isdecimal())
        return {int(name) for name in names if read_manifest(self.workspace, join_key(root, name)) is not None}

    def commit(self, index: int, array: npt.NDArray[np.generic], fields: Mapping[str, int] | None = None) -> None:
        folder = empty_folder(self.scratch / self.kind)
        np.save(folder / "part.npy", array)
        commit_dir(self.workspace, folder, self._key(index), kind=f"mined-{self.kind}", fields=dict(fields or {}))

    def open(self, index: int) -> npt.NDArray[Any]:
        """The rows of a piece, mapped into memory. Raises DataError."""
        folder = fetch_dir(self.workspace, self._key(index), self.cache_dir)
        array: npt.NDArray[Any] = np.load(folder / "part.npy", mmap_mode="r")
        start, stop = self.rows(index)
        if len(array) != stop - start:
            raise DataError(
                f"{len(array)} {self.kind} of {start} to {stop}",
                expected="one for each",
                next_command=f"delete {self.workspace.uri(self.prefix)} and mine again",
            )
        return array

    def counts(self, index: int) -> Counts:
        """What was committed beside a piece of negatives."""
        manifest = read_manifest(self.workspace, self._key(index))
        return Counts(**manifest.fields) if manifest else Counts()  # type: ignore[arg-type]

    def delete(self) -> None:
        """All of it: what came of the pieces is committed elsewhere."""
        self.workspace.delete_prefix(self.prefix)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _key(self, index: int) -> str:
        return join_key(self.prefix, f"{self.kind}/{index:05d}")


def open_parts(settings: Settings, ctx: StageContext, mining: Mining, task: MiningTask, worker: int) -> list[Parts]:
    """Vectors of products, and negatives of queries."""
    config, name = settings.mine, fingerprint(mining.decides)[:16]
    prefix = f"cycles/{ctx.cycle}/mine/{name}-{config.items_per_part}-{config.queries_per_part}"
    own, shared = (ctx.scratch / "mine" / folder for folder in (f"worker-{worker}", "parts"))
    sizes = {
        "vectors": (task.num_items, config.items_per_part),
        "negatives": (task.num_queries, config.queries_per_part),
    }
    return [Parts(ctx.workspace_after_stop, prefix, kind, own, shared, *size) for kind, size in sizes.items()]


Vectors = Callable[[int, int], Float32s]
"""Unit vectors [n, D] of the items, or queries, from one number up to another: the same each time."""
Search = Callable[[int, int, Judged], Candidates]
"""The best products of the queries from one number up to another, whose judgements are given."""


def vectors_of(texts: Callable[[int, int], Tokens], embed: Callable[[Iterable[Tokens]], Iterator[Float32s]]) -> Vectors:
    """`embed`: windows of texts to their unit vectors [n, D], in order; those of a window depend on it alone."""
    return lambda start, stop: np.concatenate(list(embed(pieces(texts(start, stop), _WINDOW))))


def vector_search(
    parts: Parts, items: Vectors, queries: Vectors, depth: int, stop: StopSignal, worker: int = 0, workers: int = 1
) -> Search:
    """Every query against every item, exactly. `parts`: vectors of the items; those that are missing are made first.

    Memory: vectors of a piece of queries, their `depth` best, and one chunk of items; the items' vectors are mapped.
    Raises Preempted.
    """
    # This worker's share of the pieces, then whatever is missing: no worker waits for another that may be dead, at the
    # price that some pieces are made twice at the end.
    count, done = len(parts), parts.done()
    own = worker * count // workers, (worker + 1) * count // workers
    with progress("vectors of products", parts.total, "products") as advance:
        for index in [*range(own[0], count), *range(own[0])]:
            first_item, end_item = parts.rows(index)
            if index not in done and (own[0] <= index < own[1] or index not in parts.done()):
                stop.raise_if_set(f"embedding products; {_KEPT}")
                parts.commit(index, items(first_item, end_item))
            advance(end_item - first_item)
    maps: dict[int, Float32s] = {}

    def chunks() -> Iterator[tuple[int, Float32s]]:
        for index in range(len(parts)):
            if index not in maps:
                maps[index] = parts.open(index)
            for first in range(0, len(maps[index]), _CHUNK_ITEMS):
                yield parts.rows(index)[0] + first, np.array(maps[index][first : first + _CHUNK_ITEMS])

    def search(start: int, end: int, judged: Judged) -> Candidates:
        asked = queries(start, end)
        top, query_of = ExactTopK(asked, min(depth, parts.total)), judged.query
        best = np.full(len(asked), -np.inf)
        of_positive = np.flatnonzero(judged.positive)
        of_positive = of_positive[np.argsort(judged.items[of_positive], kind="stable")]
        positives = judged.items[of_positive]
        for first, vectors in chunks():
            stop.raise_if_set(f"searching for negatives; {_KEPT}")
            top.add(first, vectors)
            low, high = np.searchsorted(positives, (first, first + len(vectors)))
            here = query_of[of_positive[low:high]]
            np.maximum.at(best, here, exact_scores(asked[here], vectors[positives[low:high] - first]))
        scores, found = top.found()
        return Candidates(scores / UNIT, found, best / UNIT)

    return search


def word_search(items: Iterable[str], queries: Callable[[int, int], list[str]], depth: int, stop: StopSignal) -> Search:
    """By the words that query and product share. Each worker has an index of all items."""
    index = Bm25(items)

    def search(start: int, end: int, judged: Judged) -> Candidates:
        texts = queries(start, end)
        scores = np.zeros((len(texts), depth))
        found = np.full((len(texts), depth), NONE, dtype=np.int64)
        best = np.zeros(len(texts))
        for row, text in enumerate(texts):
            stop.raise_if_set(f"searching for negatives; {_KEPT}")
            every = index.scores(text)
            first = best_of(every, depth)
            scores[row, : len(first)], found[row, : len(first)] = every[first], first
            mine = slice(judged.offsets[row], judged.offsets[row + 1])
            best[row] = every[judged.items[mine][judged.positive[mine]]].max(initial=0.0)
        return Candidates(scores, found, best)

    return search


def mine_share(
    parts: Parts,
    open_search: Callable[[], Search],
    judged: Judged,
    rows_of: Callable[[Int64s], Int64s],
    config: MineConfig,
    *,
    worker: int,
    workers: int,
    stop: StopSignal,
) -> int:
    """Mine for the queries of `worker` of `workers`, a run of pieces; returns how many of all pieces are missing.

    `judged`: of all queries. `rows_of`: items to the numbers they are committed by. What is committed is not done
    again. Raises Preempted, NumericError.
    """
    count = len(parts)
    done = parts.done()
    todo = [index for index in range(worker * count // workers, (worker + 1) * count // workers) if index not in done]
    if todo:
        search = open_search()
        total = sum(stop - start for start, stop in map(parts.rows, todo))
        with progress("searching for negatives", total, "queries") as advance:
            for index in todo:
                stop.raise_if_set(f"searching for negatives; {_KEPT}")
                first, last = parts.rows(index)
                mine = judged.part(first, last)
                items, counts = choose_negatives(search(first, last, mine), mine, config)
                parts.commit(index, rows_of(items), vars(counts))
                advance(last - first)
        done = parts.done()
    return count - len(done)


def all_negatives(parts: Parts, most: int) -> tuple[Int64s, Counts]:
    """The negatives [Q, most] of all queries, and what became of their best products. All pieces must be there."""
    products = [np.zeros((0, most), dtype=np.int64), *(parts.open(index) for index in range(len(parts)))]
    return np.concatenate(products), sum((parts.counts(index) for index in range(len(parts))), Counts())
