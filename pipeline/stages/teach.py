"""The teach stage, which computes the vectors or scores of the teacher (train.teacher) for the training rows.

The rows are distributed over an array of workers. The last worker to finish commits the result.
"""

import os
from datetime import UTC, datetime

from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.format import format_duration
from pipeline.data.token_sets import read_token_sets
from pipeline.mine.store import find_negatives
from pipeline.parallel.process_group import join_ranks
from pipeline.parallel.world import worker_of
from pipeline.settings import Settings
from pipeline.stages.inputs import load_prepared, mined_negatives
from pipeline.teach.run import plan_tasks, teach_worker_slice, totals
from pipeline.teach.store import MINED, find_taught
from pipeline.teach.teacher import Teacher, find_teacher, open_teacher
from pipeline.telemetry.console import Console

NAME = "teach"


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Apply the teacher to this worker's slice of the rows. The last worker commits the result. Raises TrnpipeError."""
    # All ranks have to join, even if they have no work, because the devices of the other ranks may wait for them.
    with join_ranks(settings.backend, ctx.world, timeout_s=settings.train.collective_timeout_s):
        return _run(settings, ctx)


def _run(settings: Settings, ctx: StageContext) -> StageResult:
    started = datetime.now(UTC)
    worker, workers = worker_of(settings.teach.workers, ctx.world, os.environ, NAME)
    prepared, ref = load_prepared(ctx), find_teacher(settings, ctx)
    if ref is None:
        raise ConfigError(
            "train.teacher is not set", expected="a model to learn from", next_command="--train.teacher MODEL"
        )
    sets, mined = read_token_sets(ctx.workspace, prepared.token_sets), None
    teacher = open_teacher(ref, [Bucket.parse(text) for text in sets[0].info.buckets], settings, ctx)
    if settings.train.mined_per_query and (prefix := mined_negatives(ctx)):
        mined = find_negatives(ctx.workspace, prefix)
    tokenizer = ctx.workspace.read_bytes(f"{prepared.tokenizer}/tokenizer.json")
    tasks = plan_tasks(ctx, teacher, sets, tokenizer, mined)
    todo = [task for task in tasks if find_taught(ctx.workspace, task.prefix) is None]
    figures: dict[str, Figure] = {"partitions": len(tasks), "reused": len(tasks) - len(todo)}
    ctx.console.info(
        f"teach: {len(tasks)} partitions by {teacher.name}, {len(todo)} are new | worker {worker} of {workers}"
    )
    outputs = {
        f"taught_{number:03d}" if task.negatives is None else MINED: task.prefix for number, task in enumerate(tasks)
    }
    if not todo:
        result, earlier = _result(ctx, teacher, started, outputs, figures), ctx.earlier(NAME)
        if earlier is not None and (earlier.inputs, earlier.outputs) == (result.inputs, outputs):
            result = earlier
        else:  # the work of an earlier cycle, or of a killed attempt
            store_result(ctx.workspace, result)
        return result.model_copy(update={"status": "already_done"})
    sums = {"rows": 0, "ms": 0}
    try:
        if missing := teach_worker_slice(todo, worker, workers):
            Console().info(f"teach: worker {worker} of {workers} is done, {missing} parts of other workers are missing")
            return _result(ctx, teacher, started, {}, {"parts_missing": missing})
        sums = totals(todo)
        for task in todo:
            if find_taught(ctx.workspace, task.prefix) is None:
                task.commit()
    except (DataError, TransientError):
        # The worker that finished last has deleted the parts while this one was still reading them.
        if any(find_taught(ctx.workspace, task.prefix) is None for task in todo):
            raise
    seconds = sums["ms"] / 1000
    figures |= {"rows": sums["rows"], "compute_s": seconds, "rows_per_s": sums["rows"] / max(seconds, 1e-3)}
    result = store_result(ctx.workspace, _result(ctx, teacher, started, outputs, figures))
    for task in todo:
        task.parts.store.delete()
    Console().info(  # log on every rank, because the last worker may not be rank 0
        f"teach: {sums['rows']:,} pairs and texts in {format_duration(seconds)} of computation "
        f"({figures['rows_per_s']:,.0f}/s), {figures['reused']} partitions reused"
    )
    return result


def _result(
    ctx: StageContext, teacher: Teacher, started: datetime, outputs: dict[str, str], figures: dict[str, Figure]
) -> StageResult:
    inputs = {"teacher": teacher.digest, "train.teacher": ctx.settings.train.teacher}
    return ctx.finish(NAME, started, inputs=inputs, outputs=outputs, figures=figures)
