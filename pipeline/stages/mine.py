"""The mine stage: hard negatives of the training queries, by the vectors of the parent model or by BM25.

An array of workers shares the queries; the last one commits the negatives.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from pydantic import JsonValue

from pipeline.checkpoint.store import Checkpoint
from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import format_duration
from pipeline.data.tokens import TokenSet, open_rows, read_token_sets, select_partitions
from pipeline.embed.model import longest_text, open_device_embedder, open_model
from pipeline.evaluate.bm25 import K1, B
from pipeline.evaluate.products import decoded
from pipeline.mine.config import DECIDES
from pipeline.mine.negatives import Negatives, NegativeSet, NegativesInfo, commit_negatives, find_negatives
from pipeline.mine.parts import MiningParts, empty_folder
from pipeline.mine.run import Bm25Search, ModelVectors, Searcher, VectorSearch, all_negatives, mine_share
from pipeline.mine.task import MiningTask, make_task
from pipeline.parallel.gang import join_ranks
from pipeline.parallel.world import worker_of
from pipeline.settings import Settings
from pipeline.stages.inputs import find_parent, load_prepared
from pipeline.telemetry.console import Console

NAME = "mine"
BM25, PARENT = "bm25", "parent"
_TEXTS = 65_536
"""Made words again at a time."""


@dataclass(frozen=True)
class _Mining:
    """What is mined, decided before anything is read."""

    sets: list[TokenSet]
    new: tuple[int, ...]
    """Places in `sets` of the partitions whose queries are asked."""
    model: Checkpoint | None
    tokenizer: str
    decides: dict[str, JsonValue]

    @property
    def prefix(self) -> str:
        return f"negatives/{self.sets[0].info.dataset}/{fingerprint(self.decides)}"

    @property
    def source(self) -> str:
        return BM25 if self.model is None else self.model.digest


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Do this worker's share, and commit the negatives when it was the last. Raises TrnpipeError."""
    # Every rank joins, also one without work: the others' devices may wait for it.
    with join_ranks(settings.backend, ctx.world, timeout_s=settings.train.collective_timeout_s):
        return _run(settings, ctx)


def _run(settings: Settings, ctx: StageContext) -> StageResult:
    started = datetime.now(UTC)
    worker, workers = worker_of(settings.mine, ctx.world, os.environ, NAME)
    mining = _decide(settings, ctx)
    if (found := find_negatives(ctx.workspace, mining.prefix)) is not None:
        return _already(ctx, mining, found, started)
    config = settings.mine
    rows = open_rows(ctx.workspace, mining.sets, "train", ctx.scratch / "tokens", ("partition",))
    task = make_task(
        rows,
        mining.new,
        positive_gain=settings.train.loss.positive_gain,
        max_items=config.max_items,
        stop=ctx.stop,
    )
    parts = _parts(settings, ctx, mining, task, worker)
    _tell_start(ctx, mining, task, parts, f"worker {worker} of {workers}")
    searcher = _searcher(settings, ctx, mining, task, parts)
    try:
        missing = mine_share(
            parts, searcher, task.judged, task.rows_of, config, worker=worker, workers=workers, stop=ctx.stop
        )
        made = find_negatives(ctx.workspace, mining.prefix)
        if made is None and missing:
            Console().info(f"mine: worker {worker} of {workers} is done, the others have {missing} parts to do")
            return _result(ctx, mining, started, {"parts_missing": missing})
        made = made or _commit(ctx, mining, task, parts, config.negatives_per_query)
    except DataError:
        made = find_negatives(ctx.workspace, mining.prefix)
        if made is None:
            raise
        # Another worker was last, and deleted the parts that this one was reading.
    parts.delete()
    result = _result(ctx, mining, started, dict(made.info.figures), made)
    _tell_end(ctx, made, result)
    return store_result(ctx.workspace, result)


def _decide(settings: Settings, ctx: StageContext) -> _Mining:
    """Raises ConfigError when the model cannot read the prepared tokens."""
    prepared, parent = load_prepared(ctx), find_parent(settings, ctx)
    sets = read_token_sets(ctx.workspace, prepared.token_sets)
    config = settings.mine
    model = parent
    if config.source != PARENT:
        model = None if config.source == BM25 else open_model(config.source.rstrip("/"), settings, ctx)
    if model is not None and model.state.tokenizer_fingerprint != sets[0].info.tokenizer_fingerprint:
        raise ConfigError(
            f"the data was tokenised with {sets[0].info.tokenizer_fingerprint}, {model.uri} reads"
            f" {model.state.tokenizer_fingerprint}",
            expected="a model that reads the prepared tokens",
            next_command=f"--mine.source {BM25}, or prepare the data with the model's tokenizer",
        )
    selection = select_partitions(
        [one.partition for one in sets],
        parent_watermark=parent.state.watermark if parent else None,
        parent_partitions=parent.state.partitions if parent else {},
    )
    new = [place for place, one in enumerate(sets) if config.partitions == "all" or one.partition in selection.new]
    ranked_by: dict[str, JsonValue] = {"k1": K1, "b": B}
    if model is not None:
        ranked_by = {"precision": settings.embed.precision, "max_tokens": longest_text(settings, model)}
    decides: dict[str, JsonValue] = {
        "token_sets": [one.info.fingerprint for one in sets],
        "asked": [sets[place].info.partition for place in new],
        "source": BM25 if model is None else model.digest,
        "ranked_by": ranked_by,
        "positive_gain": settings.train.loss.positive_gain,
        "mine": config.model_dump(mode="json", include=set(DECIDES)),
    }
    return _Mining(sets, tuple(new), model, f"{prepared.tokenizer}/tokenizer.json", decides)


def _parts(settings: Settings, ctx: StageContext, mining: _Mining, task: MiningTask, worker: int) -> MiningParts:
    config, name = settings.mine, fingerprint(mining.decides)
    return MiningParts(
        workspace=ctx.workspace_after_stop,
        prefix=f"cycles/{ctx.cycle}/{NAME}/{name[:16]}-{config.items_per_part}-{config.queries_per_part}",
        scratch=ctx.scratch / NAME / f"worker-{worker}",
        cache_dir=ctx.scratch / NAME / "parts",
        num_items=task.num_items,
        num_queries=task.num_queries,
        items_per_part=config.items_per_part,
        queries_per_part=config.queries_per_part,
    )


def _searcher(settings: Settings, ctx: StageContext, mining: _Mining, task: MiningTask, parts: MiningParts) -> Searcher:
    depth = settings.mine.depth
    if mining.model is not None:
        _, embedder = open_device_embedder(settings, ctx, mining.model)
        return VectorSearch(parts, ModelVectors(task, embedder.stream), depth, ctx.stop)
    tokenizer = ctx.workspace.read_bytes(mining.tokenizer)

    def items() -> Iterator[str]:
        for start in range(0, task.num_items, _TEXTS):
            ctx.stop.raise_if_set("reading products")
            yield from decoded(task.items(start, start + _TEXTS), tokenizer)

    return Bm25Search(items, lambda start, stop: decoded(task.queries(start, stop), tokenizer), depth, ctx.stop)


def _commit(ctx: StageContext, mining: _Mining, task: MiningTask, parts: MiningParts, most: int) -> NegativeSet:
    product, counts = all_negatives(parts, most)
    info = NegativesInfo(
        dataset=mining.sets[0].info.dataset,
        token_sets=tuple(one.info.fingerprint for one in mining.sets),
        rows=task.rows.sizes,
        source=mining.source,
        settings=mining.decides,
        figures={
            "queries": counts.queries,
            "items": task.num_items,
            "negatives": counts.negatives,
            "slots_filled": counts.negatives / max(1, product.size),
            "queries_without": int((product[:, 0] < 0).sum()),
            "judged_skipped": counts.judged,
            "above_margin": counts.above_margin,
            "passed_over": counts.passed_over,
        },
    )
    staged = empty_folder(parts.scratch / "set")
    return commit_negatives(ctx.workspace_after_stop, mining.prefix, Negatives(task.query_id, product), info, staged)


def _tell_start(ctx: StageContext, mining: _Mining, task: MiningTask, parts: MiningParts, who: str) -> None:
    by = "BM25" if mining.model is None else f"vectors of {mining.model.prefix}"
    ctx.console.info(
        f"mine: {task.num_queries:,} queries with a positive against {task.num_items:,} products by {by} | "
        f"{len(parts.done('negatives'))} of {parts.num_query_parts} parts done | {who}"
    )
    if task.num_items < task.products.num_distinct:
        ctx.console.warn(f"mine: {task.num_items:,} of {task.products.num_distinct:,} products (mine.max_items)")
    if not task.num_queries:
        names = ", ".join(mining.sets[place].info.partition for place in mining.new) or "no new partition"
        ctx.console.warn(f"mine: no training query of {names} has a positive (train.loss.positive_gain)")


def _tell_end(ctx: StageContext, made: NegativeSet, result: StageResult) -> None:
    figures = made.info.figures
    Console().info(  # also where another rank than the first was last
        f"mine: {figures['negatives']:,} negatives, {figures['slots_filled']:.0%} of the slots | left out: "
        f"{figures['judged_skipped']:,} judged, {figures['above_margin']:,} likely positives | "
        f"{format_duration((result.finished - result.started).total_seconds())} | {ctx.workspace.uri(made.prefix)}"
    )
    if figures["queries_without"]:
        ctx.console.warn(
            f"mine: {figures['queries_without']:,} of {figures['queries']:,} queries have no negative:"
            " lower mine.relative_margin, or raise mine.depth"
        )


def _already(ctx: StageContext, mining: _Mining, found: NegativeSet, started: datetime) -> StageResult:
    ctx.console.info(
        f"mine: done already, {found.info.figures['negatives']:,} negatives in {ctx.workspace.uri(found.prefix)}"
    )
    result = ctx.earlier(NAME)
    if result is None or result.outputs.get("negatives") != found.prefix:  # of an earlier cycle, or killed between
        result = store_result(ctx.workspace, _result(ctx, mining, started, dict(found.info.figures), found))
    return result.model_copy(update={"status": "already_done"})


def _result(
    ctx: StageContext,
    mining: _Mining,
    started: datetime,
    figures: dict[str, Figure],
    made: NegativeSet | None = None,
) -> StageResult:
    """`made`: the negatives, once all parts are there."""
    return ctx.finish(
        NAME,
        started,
        inputs={"data": fingerprint(mining.decides["token_sets"]), "source": mining.source},
        outputs={"negatives": made.prefix} if made is not None else {},
        figures=figures,
    )
