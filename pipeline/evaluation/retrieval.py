"""Search with a model's embeddings: every query against every item, exactly."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import NumericError
from pipeline.core.metrics import Judgements
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens, pieces
from pipeline.embedding.embedder import counted
from pipeline.evaluation.exact import ExactTopK
from pipeline.parallel.gang import Gang

_WINDOW = 512

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

Embed = Callable[[Iterable[Tokens]], Iterator[Float32s]]
"""Windows of texts to their unit vectors [n, D], in order."""


class Windows(Protocol):
    """The items in order, some at a time: (number of the first, tokens); only windows whose number is `mine`."""

    def __call__(self, mine: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]: ...


@dataclass(frozen=True)
class RetrievalTask:
    """What is searched for, and where."""

    query_id: Int64s
    """[Q]"""
    queries: Tokens
    num_items: int
    items: Windows
    judged: Judgements


def search(
    task: RetrievalTask,
    embed: Embed,
    k: int,
    gang: Gang,
    stop: StopSignal,
    advance: Callable[[int], None] = lambda count: None,
) -> Int64s | str:
    """The `k` best items [Q, k] of each query, best first, -1 where there are fewer; or why there is no answer.

    Ranks share queries and items; all get the answer. Memory: the queries' vectors and one window of items.
    Raises Preempted.
    """
    queries = _query_vectors(task.queries, embed, gang)
    world = gang.world
    failure, best = "", None
    try:
        best = ExactTopK(queries, k)
        for first, vectors in _vectors_of(task, embed, lambda number: number % world.world_size == world.rank):
            stop.raise_if_set("searching the catalogue")
            best.add(first, vectors)
            advance(len(vectors) * world.world_size)
    except NumericError as error:
        failure = error.seen
    found = gang.gather((failure, best.found() if best else None))
    for reason, _ in found:
        if reason:
            return str(reason)
    merged = ExactTopK(queries, k)
    for _, pair in found:
        merged.merge(*pair)
    return merged.found()[1]


def _query_vectors(queries: Tokens, embed: Embed, gang: Gang) -> Float32s:
    """[Q, D]: every rank embeds its part."""
    bounds = np.linspace(0, len(queries.lengths), gang.world.world_size + 1).astype(int)
    mine = queries.part(int(bounds[gang.world.rank]), int(bounds[gang.world.rank + 1]))
    windows = pieces(mine, _WINDOW) if len(mine.lengths) else ()
    vectors = list(counted(embed(windows), "embedding queries", len(mine.lengths))) if windows else []
    parts = [part for part in gang.gather(vectors) if part]
    return np.concatenate([vectors for part in parts for vectors in part])


def _vectors_of(task: RetrievalTask, embed: Embed, mine: Callable[[int], bool]) -> Iterator[tuple[int, Float32s]]:
    """Windows of item vectors; the embedder reads ahead, so the numbers wait for their vectors."""
    firsts: deque[int] = deque()

    def tokens() -> Iterator[Tokens]:
        for first, window in task.items(mine):
            firsts.append(first)
            yield window

    for vectors in embed(tokens()):
        yield firsts.popleft(), vectors
