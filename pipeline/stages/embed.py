"""The embed stage, in which an array of workers embeds the whole catalogue in parts.

The last worker to finish publishes the vectors.
"""

import os
from datetime import UTC, datetime

from pipeline.checkpoint.store import Checkpoint
from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.errors import ConfigError, Preempted
from pipeline.embed.carry_over import open_earlier, open_row_index
from pipeline.embed.catalogue import TextRules, WorkShard
from pipeline.embed.engine import open_device_embedder
from pipeline.embed.flow import EmbedWatch, Flow, embed_shards
from pipeline.embed.parts import delete_superseded, finish, part_store, report_totals, totals
from pipeline.embed.plan import EmbedPlan, catalogue_storage, check_lengths, cycle_plan, open_pinned
from pipeline.embed.vectors import VectorSet, find_vectors, vectors_prefix
from pipeline.io.commit import read_manifest
from pipeline.parallel.process_group import join_ranks
from pipeline.parallel.world import worker_of
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName

NAME = "embed"


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Embed this worker's slice of the catalogue. The last worker also publishes the vectors. Raises TrnpipeError."""
    # All ranks have to join, even if they have no work, because the devices of the other ranks may wait for them.
    with join_ranks(settings.backend, ctx.world, timeout_s=settings.train.collective_timeout_s):
        return _run(settings, ctx)


def _run(settings: Settings, ctx: StageContext) -> StageResult:
    started = datetime.now(UTC)
    worker, workers = worker_of(settings.embed.workers, ctx.world, os.environ, "embed", settings.embed.worker)
    plan, checkpoint = cycle_plan(settings, ctx)

    def result(figures: dict[str, Figure], vectors: VectorSet | None = None) -> StageResult:
        """Build the result. If all parts are complete, `vectors` are the published vectors."""
        return ctx.finish(
            NAME,
            started,
            inputs={"plan": plan.fingerprint, "catalogue": plan.catalogue.digest, "checkpoint": plan.model.digest},
            outputs={"embeddings": vectors.prefix} if vectors is not None else {},
            figures=figures | (totals(vectors) if vectors is not None else {}),
        )

    prefix = vectors_prefix(ctx.cycle)
    if read_manifest(ctx.workspace, prefix) is not None:
        vectors = find_vectors(ctx.workspace, ctx.cycle)
        if vectors.info.plan != plan.fingerprint:
            raise ConfigError(
                f"{ctx.workspace.uri(prefix)} has vectors from a different plan",
                expected="no vectors, or vectors from the plan of this cycle",
                next_command=f"use a different --cycle, or delete {ctx.workspace.uri(prefix)}",
            )
        delete_superseded(vectors)  # an earlier attempt may have been killed before this
        ctx.console.info(f"embed: already done, {vectors.info.rows:,} vectors in {ctx.workspace.uri(prefix)}")
        earlier = ctx.earlier(NAME)
        if earlier is None:  # an earlier attempt was killed after it had published the vectors
            earlier = store_result(ctx.workspace, result({}, vectors))
        return earlier.model_copy(update={"status": "already_done"})
    done = part_store(ctx.workspace, plan).done()
    # Assign neighbouring parts to different workers, because rows that have to be embedded are usually adjacent.
    worker_slice = plan.shards[worker::workers]
    todo = [shard for shard in worker_slice if shard.index not in done]
    carry_from = plan.carry_from.cycle if plan.carry_from else None
    ctx.console.info(
        f"embed: {plan.catalogue.rows:,} rows in {len(plan.shards)} parts, {len(done)} done | "
        f"worker {worker} of {workers}: {len(todo)} to do"
        + (f", unchanged rows from cycle {carry_from}" if carry_from else "")
    )
    ctx.events.emit(
        EventName.EMBED_STARTED,
        plan=plan.fingerprint,
        rows=plan.catalogue.rows,
        parts=len(plan.shards),
        done=len(done),
        todo=len(todo),
        checkpoint=plan.model.place,
        carry_from=carry_from,
    )
    figures: dict[str, Figure] = {}
    if todo:
        checkpoint = checkpoint or open_pinned(plan.model, settings, ctx)
        figures = _embed(settings, ctx, plan, checkpoint, todo, total=sum(shard.rows for shard in worker_slice))
        done = part_store(ctx.workspace, plan).done()
    if missing := len(plan.shards) - len(done):
        Console().info(f"embed: worker {worker} of {workers} is done, {missing} parts of other workers are missing")
        return result(figures | {"parts_missing": missing})
    limit = settings.embed.catalogue.max_bad_fraction
    vectors = finish(ctx.workspace, plan, ctx.scratch, ctx.stop, max_bad_fraction=limit)
    final = result(figures, vectors)
    report_totals(ctx, vectors, final)
    return store_result(ctx.workspace, final)


def _embed(
    settings: Settings, ctx: StageContext, plan: EmbedPlan, checkpoint: Checkpoint, todo: list[WorkShard], *, total: int
) -> dict[str, Figure]:
    """Embed the shards in `todo` and return throughput figures."""
    check_lengths(plan, settings, checkpoint)
    earlier, index = None, ""
    if plan.carry_from:
        earlier = open_earlier(ctx.workspace_after_stop, plan.carry_from)
        index = str(open_row_index(open_earlier(ctx.workspace, plan.carry_from), ctx.scratch, ctx.stop))
    flow = Flow(
        plan=plan,
        catalogue=catalogue_storage(plan, settings, ctx),
        workspace=ctx.workspace_after_stop,
        rules=TextRules(
            tokenizer=checkpoint.tokenizer(),
            max_tokens=plan.max_tokens,
            id_type=plan.layout.id_type,
            filter=tuple(plan.catalogue.columns.filter.items()),
            index=index,
            prefix=checkpoint.state.inputs.product_prefix,
            chunks=settings.embed.chunks,
        ),
        num_workers=settings.data.num_workers,
        earlier=earlier,
        stop=ctx.stop,
    )
    embedder = open_device_embedder(settings, ctx, checkpoint)
    watch = EmbedWatch(
        ctx,
        plan,
        embedder.figures,
        total=total,
        done=total - sum(shard.rows for shard in todo),
        max_bad_fraction=settings.embed.catalogue.max_bad_fraction,
    )
    try:
        embed_shards(flow, todo, embedder.stream, on_window=watch.on_window, on_part=watch.on_part)
    except Preempted as error:
        raise Preempted(
            f"{error.seen}, {watch.parts} of {len(todo)} parts are finished", next_command=error.next_command
        ) from error
    return watch.finish()
