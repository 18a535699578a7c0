"""Search with a model's embeddings, and with words: every query against every item, exactly."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.compile.watch import GraphWatch
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import NumericError
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens, pieces
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import Embedder, counted, open_embedder
from pipeline.embed.output import shorten_vectors
from pipeline.evaluate.bm25 import Bm25
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.exact import ExactTopK
from pipeline.evaluate.fusion import Ranked, best_weight, by_rank, by_weight
from pipeline.evaluate.holdout_rows import Holdout
from pipeline.evaluate.metrics.measure import MetricReport, retrieval_report
from pipeline.evaluate.metrics.names import RETRIEVAL
from pipeline.evaluate.metrics.retrieval import Judgements
from pipeline.evaluate.products import join_tokens
from pipeline.evaluate.report import HybridReport
from pipeline.evaluate.scored import PerQuery
from pipeline.evaluate.scores import VectorSample
from pipeline.parallel.gang import Gang

_WINDOW = 512


Embed = Callable[[Iterable[Tokens]], Iterator[Float32s]]
"""Windows of texts to their unit vectors [n, D], in order."""


class Windows(Protocol):
    """The items in order, some at a time: (number of the first, tokens); only windows whose number is `mine`."""

    def __call__(self, mine: Callable[[int], bool]) -> Iterator[tuple[int, Tokens]]: ...


class Texts(Protocol):
    """The texts of all items in order, some at a time."""

    def __call__(self) -> Iterator[list[str]]: ...


@dataclass(frozen=True)
class Queries:
    """Q queries: ids [Q] ascending, tokens and texts [Q], and what is relevant to them."""

    ids: Int64s
    tokens: Tokens
    texts: list[str]
    judged: Judgements


@dataclass(frozen=True)
class RetrievalTask:
    """What is searched for, and where."""

    queries: Queries
    tuning: Queries | str
    """Queries of the valid split, from which the weight of hybrid search is chosen; or why there are none."""
    num_items: int
    items: Windows
    texts: Texts

    @property
    def num_queries(self) -> int:
        """Those that are judged."""
        return len(self.queries.ids)

    @property
    def tokens(self) -> Tokens:
        """Of all queries, those for tuning last."""
        more = [] if isinstance(self.tuning, str) else [self.tuning.tokens]
        return join_tokens([self.queries.tokens, *more])

    @property
    def query_texts(self) -> list[str]:
        """In the order of `tokens`."""
        return self.queries.texts if isinstance(self.tuning, str) else [*self.queries.texts, *self.tuning.texts]

    def report(self, items: Int64s, metrics: MetricsConfig) -> tuple[PerQuery, MetricReport]:
        """Figures of items [Q or more, k] found for the judged queries, which come first."""
        return retrieval_report(self.queries.ids, items[: self.num_queries], self.queries.judged, metrics)


def search(
    task: RetrievalTask,
    embed: Embed,
    k: int,
    gang: Gang,
    stop: StopSignal,
    advance: Callable[[int], None] = lambda count: None,
    widths: Sequence[int] = (0,),
) -> list[Ranked] | str:
    """The `k` best items of every query of the task, with their cosines times 2^52; or why there is no answer.

    One list for each of `widths`: leading dimensions of the vectors that are held against each other, 0: all. Ranks
    share queries and items; all get the answer. Memory: the queries' vectors in every width and one window of items.
    Raises Preempted.
    """
    whole = _query_vectors(task.tokens, embed, gang)
    queries = [_cut(whole, width) for width in widths]
    world = gang.world
    failure, best = "", []
    try:
        best = [ExactTopK(one, k) for one in queries]
        for first, vectors in _vectors_of(task, embed, lambda number: number % world.world_size == world.rank):
            stop.raise_if_set("searching the catalogue")
            for nearest, width in zip(best, widths, strict=True):
                nearest.add(first, _cut(vectors, width))
            advance(len(vectors) * world.world_size)
    except NumericError as error:
        failure = error.seen
    found = gang.gather((failure, [nearest.found() for nearest in best]))
    for reason, _ in found:
        if reason:
            return str(reason)
    ranked = []
    for place, one in enumerate(queries):
        merged = ExactTopK(one, k)
        for _, pairs in found:
            merged.merge(*pairs[place])
        scores, items = merged.found()
        ranked.append(Ranked(items, scores))
    return ranked


def _cut(vectors: Float32s, width: int) -> Float32s:
    return shorten_vectors(vectors, width or vectors.shape[1])


def lexical_search(task: RetrievalTask, k: int, stop: StopSignal) -> Ranked:
    """The same with BM25, in this process alone: scores are those of BM25. Raises Preempted."""

    def texts() -> Iterator[str]:
        for part in task.texts():
            stop.raise_if_set("indexing words of the catalogue")
            advance(len(part))
            yield from part

    with progress("indexing words of the catalogue", task.num_items, "items") as advance:
        index = Bm25(texts())
    queries = task.query_texts
    parts = [Ranked(np.zeros((0, k), dtype=np.int64), np.zeros((0, k)))]
    with progress("searching words of the catalogue", len(queries), "queries") as advance:
        for start in range(0, len(queries), _WINDOW):
            stop.raise_if_set("searching words of the catalogue")
            scores, items = index.search(queries[start : start + _WINDOW], k)
            parts.append(Ranked(items, scores))
            advance(len(items))
    return Ranked(np.concatenate([part.items for part in parts]), np.concatenate([part.scores for part in parts]))


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


# Vectors of texts with the encoder of a checkpoint, opened when the first text comes.


class Vectors:
    """Windows of texts to unit vectors [n, D]."""

    def __init__(
        self, checkpoint: Checkpoint, backend: Backend, config: EmbedConfig, watch: GraphWatch, stop: StopSignal
    ) -> None:
        self._checkpoint, self._backend, self._config = checkpoint, backend, config
        self._watch, self._stop = watch, stop

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self._checkpoint, self._backend, self._config, self._watch, stop=self._stop)

    def __call__(self, windows: Iterable[Tokens]) -> Iterator[npt.NDArray[np.float32]]:
        return self._embedder.stream(windows)

    def sample(self, holdout: Holdout, count: int) -> VectorSample | None:
        """Both embeddings of at most `count` rows of a holdout."""
        if not count:
            return None
        sample_id, query, product = holdout.sample(count)
        windows = [*pieces(query, _WINDOW), *pieces(product, _WINDOW)]
        found = list(counted(self(windows), "embedding a sample", 2 * len(sample_id)))
        half = len(found) // 2
        return VectorSample(sample_id, np.concatenate(found[:half]), np.concatenate(found[half:]))


# What search with a model is worth when it is fused with BM25.


def hybrid_reports(
    task: RetrievalTask, vectors: Ranked, words: Ranked, metrics: MetricsConfig
) -> tuple[HybridReport, ...]:
    """By ranks, and by weight. The weight is chosen by nDCG on the queries for tuning alone, which are not judged.

    `vectors` and `words`: lists of all queries of the task.
    """
    judged = task.num_queries
    ours, theirs = vectors.part(0, judged), words.part(0, judged)
    ranked = HybridReport(name="rrf", retrieval=task.report(by_rank(ours, theirs), metrics)[1])
    tuning = task.tuning
    if isinstance(tuning, str):
        return ranked, HybridReport(name="weighted", missing=f"no weight was chosen: {tuning}")
    at = max((k for k in metrics.retrieval_at if k <= 10), default=min(metrics.retrieval_at))

    def quality(items: Int64s) -> float:
        per_query, _ = retrieval_report(tuning.ids, items, tuning.judged, metrics)
        return float(np.nanmean(per_query.values[f"{RETRIEVAL}ndcg@{at}"]))

    end = judged + len(tuning.ids)
    weight = best_weight(vectors.part(judged, end), words.part(judged, end), quality)
    weighted = HybridReport(
        name="weighted",
        weight=weight,
        valid_queries=len(tuning.ids),
        retrieval=task.report(by_weight(ours, theirs, weight), metrics)[1],
    )
    return ranked, weighted
