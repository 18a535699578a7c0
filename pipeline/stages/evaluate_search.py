"""Retrieval with the embeddings of a model, kept in the cycle: found there, or searched on all ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.core.fingerprint import fingerprint
from pipeline.core.metrics import MetricReport, retrieval_report
from pipeline.core.metrics.names import RETRIEVAL
from pipeline.core.scored import PerQuery
from pipeline.data.token_set import SPLITS
from pipeline.data.token_store import TokenSet, open_rows
from pipeline.data.tokenizer import TextTokenizer
from pipeline.evaluation.catalogue import CatalogueFile, open_catalogue
from pipeline.evaluation.holdout_rows import Holdout
from pipeline.evaluation.retrieval import RetrievalTask, search
from pipeline.evaluation.retrieval_sources import from_catalogue, from_products
from pipeline.evaluation.saved_retrieval import load_retrieval, save_retrieval
from pipeline.evaluation.vectors import Vectors
from pipeline.io.verify import read_manifest
from pipeline.parallel.gang import Gang
from pipeline.settings import Settings
from pipeline.stages.context import StageContext


@dataclass(frozen=True)
class Found:
    """Retrieval with one model; `per_query` is None when there is no answer, and `report` says why."""

    per_query: PerQuery | None
    report: MetricReport
    num_queries: int
    num_items: int


@dataclass
class ModelSearch:
    """Searches with one model after the other, for the same queries in the same items."""

    settings: Settings
    ctx: StageContext
    backend: Backend
    gang: Gang
    sets: list[TokenSet]
    holdout: Holdout
    tokenizer: bytes
    warn: Callable[[str], None]

    def run(self, role: str, checkpoint: Checkpoint, vectors: Vectors) -> Found | None:
        """On all ranks; None when retrieval is not to be evaluated. Raises DataError, Preempted."""
        config, ctx = self.settings.evaluate, self.ctx
        if not config.retrieval.enabled:
            return None
        task = self._task
        if isinstance(task, str):
            return Found(None, self._without(task), 0, 0)
        key, metrics = self._key(checkpoint), config.metrics
        if self.gang.gather(ctx.world.is_main and read_manifest(ctx.workspace, key) is not None)[0]:
            per_query, report = load_retrieval(ctx.workspace, key, ctx.scratch / "retrieval")
            return Found(per_query, report, len(task.query_id), task.num_items)
        with ctx.console.progress(f"{role}, search", task.num_items, "items") as advance:
            ranked = search(task, vectors, max(metrics.retrieval_at), self.gang, ctx.stop, advance)
        if isinstance(ranked, str):
            return Found(None, self._without(ranked), len(task.query_id), task.num_items)
        per_query, report = retrieval_report(task.query_id, ranked, task.judged, metrics)
        if ctx.world.is_main:
            save_retrieval(ctx.workspace, key, per_query, report, ctx.scratch)
        return Found(per_query, report, len(task.query_id), task.num_items)

    @cached_property
    def _catalogue(self) -> CatalogueFile | None:
        config = self.settings.evaluate.retrieval
        return open_catalogue(config, config.catalogue, self.ctx.stop) if config.catalogue else None

    @cached_property
    def _task(self) -> RetrievalTask | str:
        """Queries, items and judgements, or why there are none."""
        stop = self.ctx.stop
        if self._catalogue is not None:
            return from_catalogue(self._catalogue, self.holdout, TextTokenizer(self.tokenizer), stop)
        cache = self.ctx.scratch / "tokens"
        sources = [open_rows(self.ctx.workspace, self.sets, split, cache) for split in SPLITS]
        return from_products(self.holdout, sources, self.settings.evaluate.retrieval, stop, self.warn)

    def _without(self, reason: str) -> MetricReport:
        ranks = self.settings.evaluate.metrics.retrieval_at
        names = [f"{RETRIEVAL}{word}@{k}" for k in ranks for word in ("recall", "ndcg", "success")]
        missing = dict.fromkeys([*names, f"{RETRIEVAL}mrr"], reason)
        return MetricReport(values={}, missing=missing, num_rows=0, num_queries=0)

    def _key(self, checkpoint: Checkpoint) -> str:
        config = self.settings.evaluate
        decides = fingerprint(
            {
                "data": [token_set.info.fingerprint for token_set in self.sets],
                "holdout": self.holdout.name,
                "catalogue": self._catalogue.content if self._catalogue else "",
                "retrieval": config.retrieval.model_dump(mode="json", exclude={"window_rows", "catalogue"}),
                "metrics": config.metrics.model_dump(mode="json", include={"retrieval_at", "relevant_gain"}),
                "embed": self.settings.embed.model_dump(mode="json", include={"precision"}),
                "device": self.backend.device_name(),
            }
        )
        return f"cycles/{self.ctx.cycle}/evaluate/retrieval/{checkpoint.digest[:16]}-{decides[:8]}"
