"""The embed stage: the whole catalogue becomes vectors, part by part; each worker does a share, the last one signs."""

import os
from datetime import UTC, datetime

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.errors import ConfigError, Preempted
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.machines import MACHINES, price_usd_per_hour
from pipeline.embed.catalogue import WorkShard, share_of
from pipeline.embed.earlier import index_of, open_earlier
from pipeline.embed.engine import open_device_embedder
from pipeline.embed.finish import finish
from pipeline.embed.flow import EmbedWatch, Flow, embed_shards, worker_processes
from pipeline.embed.parts import finished_parts
from pipeline.embed.plan import (
    EmbedPlan,
    asked_for,
    catalogue_storage,
    check_asked,
    make_plan,
    open_pinned,
    pin_plan,
    pinned_plan,
)
from pipeline.embed.texts import TextRules
from pipeline.embed.vectors import VectorSet, open_vectors, vectors_prefix
from pipeline.io.commit import read_manifest
from pipeline.parallel.gang import join_ranks
from pipeline.parallel.world import worker_of
from pipeline.settings import Settings
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName

NAME = "embed"


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Do this worker's share, and finish the cycle when it was the last. Raises TrnpipeError."""
    # Every rank joins, also one without work: the others' devices may wait for it.
    with join_ranks(settings.backend, ctx.world, timeout_s=settings.train.collective_timeout_s):
        return _run(settings, ctx)


def _run(settings: Settings, ctx: StageContext) -> StageResult:
    started = datetime.now(UTC)
    worker, workers = worker_of(settings.embed, ctx.world, os.environ)
    plan, checkpoint = _plan(settings, ctx)
    if (vectors := _finished_vectors(ctx, plan)) is not None:
        return _already(ctx, plan, vectors, started)
    done = finished_parts(ctx.workspace, plan)
    share = [plan.shards[index] for index in share_of(len(plan.shards), worker, workers)]
    todo = [shard for shard in share if shard.index not in done]
    _tell_start(ctx, plan, len(done), len(todo), f"worker {worker} of {workers}")
    figures: dict[str, Figure] = {}
    if todo:
        checkpoint = checkpoint or open_pinned(plan.model, settings, ctx)
        figures = _embed(settings, ctx, plan, checkpoint, todo, total=sum(shard.rows for shard in share))
        done = finished_parts(ctx.workspace, plan)
    if missing := len(plan.shards) - len(done):
        Console().info(f"embed: worker {worker} of {workers} is done, the others have {missing} parts to do")
        return _result(ctx, plan, started, figures | {"parts_missing": missing})
    limit = settings.embed.catalogue.max_bad_fraction
    vectors = finish(ctx.workspace, plan, ctx.scratch, ctx.stop, max_bad_fraction=limit)
    result = _result(ctx, plan, started, figures | _totals(vectors), vectors)
    _tell_end(ctx, vectors, result)
    return store_result(ctx.workspace, result)


def _plan(settings: Settings, ctx: StageContext) -> tuple[EmbedPlan, Checkpoint | None]:
    """The plan of the cycle, made when there is none; and the checkpoint if it had to be opened for that."""
    plan = pinned_plan(ctx.workspace, ctx.cycle)
    if plan is not None:
        check_asked(plan, asked_for(settings.embed, settings.data), ctx.workspace)
        return plan, None
    made, checkpoint = make_plan(settings, ctx)
    plan = pin_plan(ctx.workspace, made)
    check_asked(plan, made.asked, ctx.workspace)
    return plan, checkpoint if plan.model == made.model else None


def _finished_vectors(ctx: StageContext, plan: EmbedPlan) -> VectorSet | None:
    """What this plan has led to already. Raises ConfigError when the place is taken by vectors of another."""
    prefix = vectors_prefix(ctx.cycle)
    if read_manifest(ctx.workspace, prefix) is None:
        return None
    vectors = open_vectors(ctx.workspace, ctx.cycle)
    if vectors.info.plan == plan.fingerprint:
        return vectors
    raise ConfigError(
        f"{ctx.workspace.uri(prefix)} holds vectors that another plan led to",
        expected="no vectors, or those of this cycle's plan",
        next_command=f"another --cycle, or delete {ctx.workspace.uri(prefix)}",
    )


def _embed(
    settings: Settings, ctx: StageContext, plan: EmbedPlan, checkpoint: Checkpoint, todo: list[WorkShard], *, total: int
) -> dict[str, Figure]:
    """Embed shards; figures of how it went."""
    stop = ctx.stop
    earlier = open_earlier(ctx.workspace_after_stop, plan.carry_from) if plan.carry_from else None
    index = str(index_of(open_earlier(ctx.workspace, plan.carry_from), ctx.scratch, stop)) if plan.carry_from else ""
    rules = TextRules(
        tokenizer=checkpoint.tokenizer(),
        max_tokens=plan.max_tokens,
        id_type=plan.layout.id_type,
        filter=tuple(plan.catalogue.columns.filter.items()),
        index=index,
    )
    flow = Flow(
        plan=plan,
        catalogue=catalogue_storage(plan, settings, ctx),
        workspace=ctx.workspace_after_stop,
        rules=rules,
        windows=worker_processes(settings.embed.tokenise_processes, stop),
        earlier=earlier,
        stop=stop,
    )
    backend, embedder = open_device_embedder(settings, ctx, checkpoint)
    done = total - sum(shard.rows for shard in todo)
    watch = EmbedWatch(
        ctx,
        plan,
        embedder.figures,
        total=total,
        done=done,
        price_usd_per_hour=_price(settings, ctx, backend),
        max_bad_fraction=settings.embed.catalogue.max_bad_fraction,
    )
    try:
        embed_shards(flow, todo, embedder.stream, embedded=watch.embedded, written=watch.written)
    except Preempted as error:
        raise Preempted(
            f"{error.seen}; {watch.parts} of {len(todo)} parts were finished", next_command=error.next_command
        ) from error
    return watch.finish()


def _price(settings: Settings, ctx: StageContext, backend: Backend) -> float | None:
    """Dollars an hour for what this process has of the machine; None where the price of another one would be told."""
    given = settings.estimate.price_usd_per_hour
    instance = MACHINES.get(settings.estimate.instance)
    price = price_usd_per_hour(settings.estimate.instance, given)
    if price is None:
        return None
    if backend.is_neuron and instance is not None:
        return price / instance.num_cores
    return None if given is None else price / ctx.world.local_world_size


def _tell_start(ctx: StageContext, plan: EmbedPlan, done: int, todo: int, who: str) -> None:
    carry = f", unchanged rows from cycle {plan.carry_from.cycle}" if plan.carry_from else ""
    ctx.console.info(
        f"embed: {plan.catalogue.rows:,} rows in {len(plan.shards)} parts, {done} done | {who}: {todo} to do{carry}"
    )
    ctx.events.emit(
        EventName.EMBED_STARTED,
        plan=plan.fingerprint,
        rows=plan.catalogue.rows,
        parts=len(plan.shards),
        done=done,
        todo=todo,
        checkpoint=plan.model.place,
        carry_from=plan.carry_from.cycle if plan.carry_from else None,
    )


def _tell_end(ctx: StageContext, vectors: VectorSet, result: StageResult) -> None:
    info, counts = vectors.info, vectors.info.counts
    if counts.bad:
        ctx.events.emit(EventName.ROWS_QUARANTINED, rows=counts.bad, reasons=info.reasons)
    bad = f" | {counts.bad:,} bad: " + ", ".join(f"{name} {n:,}" for name, n in info.reasons.items())
    deleted = "" if info.deleted is None else f", {info.deleted:,} deleted"
    Console().info(  # also where another rank than the first was last
        f"embed: {info.rows:,} vectors of {info.layout.dim} x {info.layout.dtype} in {len(info.parts)} parts, "
        f"{format_bytes(vectors.manifest.size_bytes)} | {counts.embedded:,} embedded, {counts.carried:,} carried over"
        f"{deleted}{bad if counts.bad else ''} | {counts.truncated:,} texts cut | "
        f"{format_duration((result.finished - result.started).total_seconds())} | "
        f"{ctx.workspace.uri(vectors.prefix)}"
    )


def _totals(vectors: VectorSet) -> dict[str, Figure]:
    info = vectors.info
    counts: dict[str, Figure] = {f"rows_{name}": value for name, value in info.counts if name != "tokens"}
    return {
        "rows": info.rows,
        **counts,
        "rows_deleted": info.deleted,
        "tokens": info.counts.tokens,
        "parts": len(info.parts),
        "size_bytes": vectors.manifest.size_bytes,
    }


def _already(ctx: StageContext, plan: EmbedPlan, vectors: VectorSet, started: datetime) -> StageResult:
    ctx.console.info(f"embed: done already, {vectors.info.rows:,} vectors in {ctx.workspace.uri(vectors.prefix)}")
    result = ctx.earlier(NAME)
    if result is None:  # killed between the two
        result = store_result(ctx.workspace, _result(ctx, plan, started, _totals(vectors), vectors))
    return result.model_copy(update={"status": "already_done"})


def _result(
    ctx: StageContext,
    plan: EmbedPlan,
    started: datetime,
    figures: dict[str, Figure],
    vectors: VectorSet | None = None,
) -> StageResult:
    """`vectors`: those of the whole cycle, once all parts are there."""
    return ctx.finish(
        NAME,
        started,
        inputs={"plan": plan.fingerprint, "catalogue": plan.catalogue.digest, "checkpoint": plan.model.digest},
        outputs={"embeddings": vectors.prefix} if vectors is not None else {},
        figures=figures,
    )
