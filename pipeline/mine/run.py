"""What ranks the products of a query: vectors of a model, or BM25."""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import DataError
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens, pieces
from pipeline.evaluate.bm25 import Bm25, best_of
from pipeline.evaluate.exact import UNIT, ExactTopK, exact_scores
from pipeline.mine.config import MineConfig
from pipeline.mine.parts import MiningParts
from pipeline.mine.select import NONE, Candidates, Counts, Judged, choose_negatives
from pipeline.mine.task import MiningTask

_CHUNK_ITEMS = 16_384
"""Products that queries are held against at a time: their vectors are in memory once, read from the map."""


class Searcher(Protocol):
    """Finds the best products of queries."""

    def prepare(self, worker: int, workers: int) -> None:
        """What is needed before the first search; shared by all workers."""

    def search(self, start: int, stop: int, judged: Judged) -> Candidates:
        """Of queries `start` to `stop`, whose judgements `judged` are."""


class TextVectors(Protocol):
    """Unit vectors [n, D] of the items, or queries, `start` to `stop`: the same each time."""

    def items(self, start: int, stop: int) -> Float32s: ...
    def queries(self, start: int, stop: int) -> Float32s: ...


class VectorSearch:
    """Every query against every item, exactly.

    Memory: vectors of a piece of queries, their `depth` best, and one chunk of items; the items' vectors are mapped.
    """

    def __init__(self, parts: MiningParts, vectors: TextVectors, depth: int, stop: StopSignal) -> None:
        self._parts, self._vectors, self._stop = parts, vectors, stop
        self._depth = min(depth, parts.num_items)
        self._maps: dict[int, Float32s] = {}

    def prepare(self, worker: int, workers: int) -> None:
        """Vectors of all items: this worker's share of the pieces, then whatever is missing.

        So no worker waits for another that may be dead; the price is that some pieces are made twice at the end.
        """
        count = self._parts.num_vector_parts
        first = worker * count // workers
        done = self._parts.done("vectors")
        with progress("vectors of products", self._parts.num_items, "products") as advance:
            for index in [*range(first, count), *range(first)]:
                start, stop = self._parts.items(index)
                is_own = first <= index < (worker + 1) * count // workers
                if index not in done and (is_own or index not in self._parts.done("vectors")):
                    self._stop.raise_if_set("embedding products; finished parts are kept")
                    self._parts.commit_vectors(index, self._vectors.items(start, stop))
                advance(stop - start)

    def search(self, start: int, stop: int, judged: Judged) -> Candidates:
        queries = self._vectors.queries(start, stop)
        top, query_of = ExactTopK(queries, self._depth), judged.query
        best = np.full(len(queries), -np.inf)
        of_positive = np.flatnonzero(judged.positive)
        of_positive = of_positive[np.argsort(judged.items[of_positive], kind="stable")]
        positives = judged.items[of_positive]
        for first, vectors in self._chunks():
            self._stop.raise_if_set("searching for negatives; finished parts are kept")
            top.add(first, vectors)
            low, high = np.searchsorted(positives, (first, first + len(vectors)))
            here = query_of[of_positive[low:high]]
            np.maximum.at(best, here, exact_scores(queries[here], vectors[positives[low:high] - first]))
        scores, items = top.found()
        return Candidates(scores / UNIT, items, best / UNIT)

    def _chunks(self) -> Iterator[tuple[int, Float32s]]:
        """(number of the first item, vectors) over all items."""
        for index in range(self._parts.num_vector_parts):
            start, stop = self._parts.items(index)
            if index not in self._maps:
                self._maps[index] = self._parts.vectors(index)
            vectors = self._maps[index]
            if len(vectors) != stop - start:
                raise DataError(
                    f"{len(vectors)} vectors of products {start} to {stop}",
                    expected="one for each",
                    next_command=f"delete {self._parts.workspace.uri(self._parts.prefix)} and mine again",
                )
            for first in range(0, len(vectors), _CHUNK_ITEMS):
                yield start + first, np.array(vectors[first : first + _CHUNK_ITEMS])


class Bm25Search:
    """By the words that query and product share. Each worker has an index of all items."""

    def __init__(
        self,
        items: Callable[[], Iterator[str]],
        queries: Callable[[int, int], list[str]],
        depth: int,
        stop: StopSignal,
    ) -> None:
        self._items, self._queries, self._depth, self._stop = items, queries, depth, stop

    def prepare(self, worker: int, workers: int) -> None:
        """The index."""
        self._index = Bm25(self._items())

    def search(self, start: int, stop: int, judged: Judged) -> Candidates:
        texts = self._queries(start, stop)
        scores = np.zeros((len(texts), self._depth))
        items = np.full((len(texts), self._depth), NONE, dtype=np.int64)
        best = np.zeros(len(texts))
        for row, text in enumerate(texts):
            self._stop.raise_if_set("searching for negatives; finished parts are kept")
            every = self._index.scores(text)
            found = best_of(every, self._depth)
            scores[row, : len(found)], items[row, : len(found)] = every[found], found
            mine = slice(judged.offsets[row], judged.offsets[row + 1])
            best[row] = every[judged.items[mine][judged.positive[mine]]].max(initial=0.0)
        return Candidates(scores, items, best)


# Vectors of the queries and products of a mining task, with the encoder of a checkpoint.

_WINDOW = 512


class ModelVectors:
    """`embed`: windows of texts to their unit vectors [n, D], in order; those of a window depend on it alone."""

    def __init__(self, task: MiningTask, embed: Callable[[Iterable[Tokens]], Iterator[Float32s]]) -> None:
        self._task, self._embed = task, embed

    def items(self, start: int, stop: int) -> Float32s:
        """[n, D]"""
        return self._vectors(self._task.items(start, stop))

    def queries(self, start: int, stop: int) -> Float32s:
        """[n, D]"""
        return self._vectors(self._task.queries(start, stop))

    def _vectors(self, tokens: Tokens) -> Float32s:
        return np.concatenate(list(self._embed(pieces(tokens, _WINDOW))))


# One worker's share of the queries, piece by piece; who finds all pieces there commits the negatives.


def mine_share(
    parts: MiningParts,
    searcher: Searcher,
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
    count = parts.num_query_parts
    share = range(worker * count // workers, (worker + 1) * count // workers)
    done = parts.done("negatives")
    todo = [index for index in share if index not in done]
    if todo:
        searcher.prepare(worker, workers)
        total = sum(stop - start for start, stop in map(parts.queries, todo))
        with progress("searching for negatives", total, "queries") as advance:
            for index in todo:
                stop.raise_if_set("searching for negatives; finished parts are kept")
                first, last = parts.queries(index)
                mine = judged.part(first, last)
                items, counts = choose_negatives(searcher.search(first, last, mine), mine, config)
                parts.commit_negatives(index, rows_of(items), counts)
                advance(last - first)
        done = parts.done("negatives")
    return count - len(done)


def all_negatives(parts: MiningParts, most: int) -> tuple[Int64s, Counts]:
    """The negatives [Q, most] of all queries, and what became of their best products. All pieces must be there."""
    found = [parts.negatives(index) for index in range(parts.num_query_parts)]
    products = [np.zeros((0, most), dtype=np.int64), *(product for product, _ in found)]
    return np.concatenate(products), sum((counts for _, counts in found), Counts())
