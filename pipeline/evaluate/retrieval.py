"""Search with a model's embeddings, every query against every item, exactly; what it found is kept in the cycle."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.compile.watch import GraphWatch
from pipeline.context import StageContext
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import NumericError
from pipeline.core.fingerprint import Json, fingerprint
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, Tokens, pieces
from pipeline.data.tokens import SPLITS, TokenSet, open_rows, spec_of
from pipeline.embed.config import EmbedConfig
from pipeline.embed.engine import Embedder, counted, open_embedder
from pipeline.embed.vectors import check_dimensions, shorten_vectors
from pipeline.evaluate.bm25 import Ranked
from pipeline.evaluate.config import RETRIEVAL
from pipeline.evaluate.exact import ExactTopK
from pipeline.evaluate.holdout import Holdout
from pipeline.evaluate.metrics.measure import MetricReport
from pipeline.evaluate.metrics.scored import PerQuery
from pipeline.evaluate.retrieval_sources import (
    CatalogueFile,
    RetrievalTask,
    from_catalogue,
    from_products,
    open_catalogue,
)
from pipeline.evaluate.scores import VectorSample, load_arrays, save_arrays
from pipeline.io.commit import read_manifest
from pipeline.parallel.gang import Gang
from pipeline.settings import Settings

_WINDOW = 512


Embed = Callable[[Iterable[Tokens]], Iterator[Float32s]]
"""Windows of texts to their unit vectors [n, D], in order."""


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
    world, tokens = gang.world, task.tokens
    bounds = np.linspace(0, len(tokens.lengths), world.world_size + 1).astype(int)
    own = tokens.part(int(bounds[world.rank]), int(bounds[world.rank + 1]))  # every rank embeds its part
    windows = pieces(own, _WINDOW) if len(own.lengths) else ()
    embedded = list(counted(embed(windows), "embedding queries", len(own.lengths))) if windows else []
    whole = np.concatenate([vectors for part in gang.gather(embedded) for vectors in part])
    queries = [_cut(whole, width) for width in widths]
    firsts: deque[int] = deque()  # the embedder reads ahead, so the numbers wait for their vectors

    def items() -> Iterator[Tokens]:
        for first, window in task.items(lambda number: number % world.world_size == world.rank):
            firsts.append(first)
            yield window

    failure, best = "", []
    try:
        best = [ExactTopK(one, k) for one in queries]
        for vectors in embed(items()):
            stop.raise_if_set("searching the catalogue")
            first = firsts.popleft()
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
        scores, numbers = merged.found()
        ranked.append(Ranked(numbers, scores))
    return ranked


def _cut(vectors: Float32s, width: int) -> Float32s:
    return shorten_vectors(vectors, width or vectors.shape[1])


@dataclass
class Vectors:
    """Windows of texts to unit vectors [n, D], with the encoder of a checkpoint: opened when the first text comes."""

    checkpoint: Checkpoint
    backend: Backend
    config: EmbedConfig
    watch: GraphWatch
    stop: StopSignal

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self.checkpoint, self.backend, self.config, self.watch, stop=self.stop)

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


KIND = "retrieval"


@dataclass(frozen=True)
class Found:
    """Retrieval with one model; `per_query` and `ranked` are None when there is no answer, and `report` says why."""

    per_query: PerQuery | None
    report: MetricReport
    ranked: Ranked | None
    by_width: dict[int, MetricReport] = field(default_factory=dict)
    """With vectors cut to other widths than those that are judged."""


@dataclass
class ModelSearch:
    """Searches with one model after the other, for the same queries in the same items.

    What is judged are the vectors as they are embedded: cut to embed.output.dimensions.
    """

    settings: Settings
    ctx: StageContext
    backend: Backend
    gang: Gang
    sets: list[TokenSet]
    holdout: Holdout
    valid: Holdout | str
    """Whose queries may be asked to choose the weight of hybrid search; or why there are none."""
    tokenizer: bytes
    warn: Callable[[str], None]

    def run(self, role: str, checkpoint: Checkpoint, vectors: Vectors) -> Found | None:
        """On all ranks; None when retrieval is not to be evaluated. Raises DataError, Preempted."""
        config, ctx = self.settings.evaluate, self.ctx
        if not config.retrieval.enabled:
            return None
        task = self.task
        if isinstance(task, str):
            return self._without(task)
        widths = self._widths(checkpoint)
        key = self._key(checkpoint)
        if self.gang.gather(ctx.world.is_main and read_manifest(ctx.workspace, key) is not None)[0]:
            return self.load(task, key, widths[1:])
        with ctx.console.progress(f"{role}, search", task.num_items, "items") as advance:
            found = search(task, vectors, self.depth, self.gang, ctx.stop, advance, widths)
        if isinstance(found, str):
            return self._without(found)
        return self.save(task, key, found[0], dict(zip(widths[1:], found[1:], strict=True)))

    def _widths(self, checkpoint: Checkpoint) -> list[int]:
        """Of the vectors: as they are embedded, then those that are only looked at. Raises ConfigError."""
        width, config = checkpoint.state.model.encoder.hidden_size, self.settings.evaluate.retrieval
        check_dimensions("embed.output.dimensions", self.settings.embed.output.dimensions, width)
        for one in config.dimensions:
            check_dimensions("evaluate.retrieval.dimensions", one, width)
        return [self.settings.embed.output.dimensions, *config.dimensions]

    def save(
        self, task: RetrievalTask, key: str, ranked: Ranked, by_width: Mapping[int, Ranked] | None = None
    ) -> Found:
        """What lists are worth; rank 0 commits them, with the figures of each query for whoever compares models."""
        found = self._found(task, ranked, {width: one.items for width, one in (by_width or {}).items()})
        if self.ctx.world.is_main and found.per_query is not None:
            lists = {"items": ranked.items, "scores": ranked.scores}
            lists |= {f"items_of_{width}": one.items for width, one in (by_width or {}).items()}
            figures = {"query_id": found.per_query.query_id, **found.per_query.values}
            save_arrays(self.ctx.workspace, key, KIND, {**lists, **figures}, self.ctx.scratch)
        return found

    def _found(self, task: RetrievalTask, ranked: Ranked, by_width: Mapping[int, Int64s]) -> Found:
        metrics = self.settings.evaluate.metrics
        per_query, report = task.report(ranked.items, metrics)
        return Found(
            per_query, report, ranked, {width: task.report(one, metrics)[1] for width, one in by_width.items()}
        )

    def load(self, task: RetrievalTask, key: str, widths: Sequence[int] = ()) -> Found:
        arrays, _ = load_arrays(self.ctx.workspace, key, KIND, self.ctx.scratch / KIND)
        by_width = {width: arrays[f"items_of_{width}"] for width in widths}
        return self._found(task, Ranked(arrays["items"], arrays["scores"]), by_width)

    @property
    def depth(self) -> int:
        """Items of each list."""
        return max(self.settings.evaluate.metrics.retrieval_at)

    @cached_property
    def task(self) -> RetrievalTask | str:
        """Queries, items and judgements, or why there are none."""
        config, ctx = self.settings.evaluate, self.ctx
        max_valid = config.baselines.valid_queries
        if self._catalogue is not None:
            spec = spec_of(self.sets[0].info)
            tokenizer, chunks = TextTokenizer(self.tokenizer), self.settings.embed.chunks
            return from_catalogue(self._catalogue, self.holdout, tokenizer, spec, max_valid, chunks=chunks)
        sources = [open_rows(ctx.workspace, self.sets, split, ctx.scratch / "tokens") for split in SPLITS]
        return from_products(
            self.holdout, self.valid, sources, self.tokenizer, config.retrieval, max_valid, ctx.stop, self.warn
        )

    @cached_property
    def decides(self) -> dict[str, Json]:
        """All that decides queries, items, lists and figures."""
        config = self.settings.evaluate
        return {
            "data": [token_set.info.fingerprint for token_set in self.sets],
            "holdout": self.holdout.name,
            "valid": self.valid if isinstance(self.valid, str) else self.valid.name,
            "valid_queries": config.baselines.valid_queries,
            "catalogue": self._catalogue.content if self._catalogue else "",
            "retrieval": config.retrieval.model_dump(mode="json", exclude={"window_rows", "catalogue", "dimensions"}),
            "metrics": config.metrics.model_dump(mode="json", include={"retrieval_at", "relevant_gain"}),
            **(self._chunks if self._catalogue else {}),
        }

    @property
    def _chunks(self) -> dict[str, Json]:
        """Nothing without chunks, as before there were any."""
        chunks = self.settings.embed.chunks
        return {"chunks": chunks} if chunks > 1 else {}

    @cached_property
    def _catalogue(self) -> CatalogueFile | None:
        config = self.settings.evaluate.retrieval
        return open_catalogue(config, config.catalogue, self.ctx.stop) if config.catalogue else None

    def _without(self, reason: str) -> Found:
        ranks = self.settings.evaluate.metrics.retrieval_at
        names = [f"{RETRIEVAL}{word}@{k}" for k in ranks for word in ("recall", "ndcg", "success")]
        missing = dict.fromkeys([*names, f"{RETRIEVAL}mrr"], reason)
        return Found(None, MetricReport(values={}, missing=missing, num_rows=0, num_queries=0), None)

    def _key(self, checkpoint: Checkpoint) -> str:
        embed = self.settings.embed.model_dump(mode="json", include={"precision"}) | self._chunks
        widths: list[Json] = [*self._widths(checkpoint)]
        decides = fingerprint({**self.decides, "embed": embed, "widths": widths, "device": self.backend.device_name()})
        return f"cycles/{self.ctx.cycle}/evaluate/retrieval/{checkpoint.digest[:16]}-{decides[:8]}"
