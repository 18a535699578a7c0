"""The mine stage, which mines hard negatives for the training queries with the parent model or BM25.

The queries are distributed over an array of workers. The last worker to finish commits the negatives.
"""

import os
from datetime import UTC, datetime

from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.errors import DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import format_duration
from pipeline.data.token_sets import open_rows, read_token_sets
from pipeline.embed.engine import open_device_embedder
from pipeline.embed.plan import open_model
from pipeline.mine.config import BM25, MAX_ITEMS, PARENT
from pipeline.mine.run import (
    MiningPlan,
    Search,
    commit_all,
    make_task,
    mine_worker_slice,
    open_parts,
    plan_mining,
    vector_search,
    vectors_of,
    word_search,
)
from pipeline.mine.store import NegativeSet, find_negatives
from pipeline.parallel.process_group import join_ranks
from pipeline.parallel.world import worker_of
from pipeline.retrieval.bm25 import unmatched_warning
from pipeline.retrieval.products import decode_tokens
from pipeline.settings import Settings
from pipeline.stages.inputs import find_parent, load_prepared
from pipeline.telemetry.console import Console

NAME = "mine"


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Mine negatives for this worker's slice of the queries. The last worker also commits them. Raises TrnpipeError."""
    # All ranks have to join, even if they have no work, because the devices of the other ranks may wait for them.
    with join_ranks(settings.backend, ctx.world, timeout_s=settings.train.collective_timeout_s):
        return _run(settings, ctx)


def _run(settings: Settings, ctx: StageContext) -> StageResult:
    started, config = datetime.now(UTC), settings.mine
    worker, workers = worker_of(config.workers, ctx.world, os.environ, NAME)
    prepared, parent = load_prepared(ctx), find_parent(ctx)
    model = None if config.source == BM25 else parent
    if config.source not in (BM25, PARENT):
        model = open_model(config.source.rstrip("/"), settings, ctx)
    mining = plan_mining(settings, read_token_sets(ctx.workspace, prepared.token_sets), model, parent)
    if (mined := find_negatives(ctx.workspace, mining.prefix)) is not None:
        uri = ctx.workspace.uri(mined.prefix)
        ctx.console.info(f"mine: already done, {mined.info.figures['negatives']:,} negatives in {uri}")
        result = ctx.earlier(NAME)
        # The negatives may be from an earlier cycle, or from an attempt that was killed before it stored the result.
        if result is None or result.outputs.get("negatives") != mined.prefix:
            result = store_result(ctx.workspace, _result(ctx, mining, started, dict(mined.info.figures), mined))
        return result.model_copy(update={"status": "already_done"})
    rows = open_rows(ctx.workspace, mining.sets, "train", ctx.scratch / "tokens", ("partition",))
    gain = settings.train.loss.positive_gain
    task = make_task(rows, mining.new, positive_gain=gain, max_items=MAX_ITEMS, stop=ctx.stop)
    work = f"cycles/{ctx.cycle}/mine/{fingerprint(mining.identity)[:16]}"
    size = len(task.products), len(task.query_id)
    vectors, negatives = open_parts(ctx.workspace_after_stop, work, ctx.scratch / "mine", size, config.queries_per_part)
    method = "BM25" if mining.model is None else f"vectors of {mining.model.prefix}"
    ctx.console.info(
        f"mine: {len(task.query_id):,} queries with a positive, {len(task.products):,} products, by {method} | "
        f"{len(negatives.store.done())} of {len(negatives)} parts done | worker {worker} of {workers}"
    )
    if len(task.products) < task.products.num_distinct:
        ctx.console.warn(
            f"mine: only {len(task.products):,} of {task.products.num_distinct:,} products are searched, the maximum"
        )
    if not len(task.query_id):
        names = ", ".join(mining.sets[index].info.partition for index in mining.new) or "no new partition"
        ctx.console.warn(f"mine: no training query in {names} has a positive (see train.loss.positive_gain)")

    def open_search() -> Search:
        if mining.model is not None:
            embedder = open_device_embedder(settings, ctx, mining.model)
            items, queries = (vectors_of(texts, embedder.stream) for texts in (task.products.tokens, task.queries))
            return vector_search(vectors, items, queries, config.depth, ctx.stop, worker, workers)
        tokenizer = ctx.workspace.read_bytes(f"{prepared.tokenizer}/tokenizer.json")
        texts = task.item_texts(tokenizer, ctx.stop)
        return word_search(texts, lambda *part: decode_tokens(task.queries(*part), tokenizer), config.depth, ctx.stop)

    try:
        missing = mine_worker_slice(
            negatives, open_search, task.judged, task.rows_of, config, worker=worker, workers=workers, stop=ctx.stop
        )
        mined = find_negatives(ctx.workspace, mining.prefix)
        if mined is None and missing:
            Console().info(f"mine: worker {worker} of {workers} is done, {missing} parts of other workers are missing")
            return _result(ctx, mining, started, {"parts_missing": missing})
        mined = mined or commit_all(ctx, mining, task, negatives, config.negatives_per_query)
    except (DataError, TransientError):
        mined = find_negatives(ctx.workspace, mining.prefix)
        if mined is None:
            raise
        # The worker that finished last has deleted the parts while this one was still reading them.
    for parts in (vectors, negatives):
        parts.store.delete()
    result = _result(ctx, mining, started, dict(mined.info.figures), mined)
    _log_summary(ctx, mined, result)
    return store_result(ctx.workspace, result)


def _log_summary(ctx: StageContext, mined: NegativeSet, result: StageResult) -> None:
    figures = mined.info.figures
    Console().info(  # log on every rank, because the last worker may not be rank 0
        f"mine: {figures['negatives']:,} negatives, {figures['slots_filled']:.0%} of the slots | skipped: "
        f"{figures['judged_skipped']:,} judged, {figures['above_margin']:,} likely positives | "
        f"{format_duration((result.finished - result.started).total_seconds())} | {ctx.workspace.uri(mined.prefix)}"
    )
    without, queries = int(figures["queries_without"]), int(figures["queries"])
    empty = int(figures.get("nothing_found", 0)) if mined.info.source == BM25 else 0
    if reason := unmatched_warning(empty, queries, "product"):
        ctx.console.warn(f"mine: {reason}, so BM25 finds no negatives for them: use --mine.source CHECKPOINT")
    elif without:
        ctx.console.warn(
            f"mine: {without:,} of {queries:,} queries have no negative: lower mine.relative_margin or raise mine.depth"
        )


def _result(
    ctx: StageContext,
    mining: MiningPlan,
    started: datetime,
    figures: dict[str, Figure],
    mined: NegativeSet | None = None,
) -> StageResult:
    """Build the result. If all parts are complete, `mined` are the committed negatives."""
    return ctx.finish(
        NAME,
        started,
        inputs={"data": fingerprint(mining.identity["token_sets"]), "source": mining.source},
        outputs={"negatives": mined.prefix} if mined is not None else {},
        figures=figures,
    )
