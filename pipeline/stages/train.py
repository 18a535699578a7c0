"""The train stage, which trains a checkpoint on prepared partitions, starting from the parent model."""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from pipeline.backends import Backend
from pipeline.checkpoint.store import PublishedWeights
from pipeline.compile.identity import graph_plan, open_guard
from pipeline.compile.manifest import GraphWatch
from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.batch_order import Bucket, RankSlice
from pipeline.core.format import format_duration
from pipeline.registry.checkpoints import key_in
from pipeline.settings import Settings
from pipeline.stages.inputs import find_parent, load_prepared, mined_negatives, taught_outputs
from pipeline.train.build import open_run
from pipeline.train.inputs import RunInputs, check_identity, gather_inputs
from pipeline.train.loop import Outcome, train

NAME = "train"
_WITHOUT_SCORES = {"rows", "retrieval_ndcg"}  # figures that do not depend on the relevance head


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Train the model of this cycle, unless this has already been done. Raises TrnpipeError."""
    started = datetime.now(UTC)
    prepared = load_prepared(ctx)
    parent = find_parent(ctx)
    inputs = gather_inputs(
        ctx.workspace,
        prepared.token_sets,
        parent,
        settings.train,
        settings.model,
        mined_negatives(ctx),
        taught_outputs(ctx),
    )
    earlier = ctx.earlier(NAME)
    if earlier is not None:
        check_identity(earlier.inputs, inputs.identity, where=f"cycle {ctx.cycle}")
        ctx.console.info(f"train: already done, checkpoint {ctx.workspace.uri(earlier.outputs['checkpoint'])}")
        return earlier.model_copy(update={"status": "already_done"})
    if parent is not None and not inputs.selection.new and (key := key_in(ctx.workspace, parent.uri)):
        # If there is no new partition to train on, the parent becomes the candidate.
        figures: dict[str, Figure] = {"step": parent.state.step, "steps_done": 0, "late": False}
        result = _commit(ctx, inputs, key, figures | _start(parent.state.published), started)
        ctx.console.info(f"train: no new partitions, using the parent as the candidate: {parent.uri}")
        return result
    tokenizer = ctx.workspace.read_bytes(f"{prepared.tokenizer}/tokenizer.json")

    def open_watch(buckets: Sequence[Bucket], share: RankSlice, backend: Backend) -> GraphWatch:
        """Open the guard that verifies that graphs are in the manifest, if the device compiles graphs."""
        if not (backend.is_lazy or backend.compiles_steps):
            return GraphWatch()
        width = inputs.taught.width if inputs.taught else None
        graphs = graph_plan(settings, inputs.spec, buckets, share, backend.device_name(), width)
        return open_guard(ctx.workspace, graphs, backend, settings.compile, ctx.console)

    with open_run(settings, ctx, inputs, tokenizer, open_watch) as opened:
        outcome = train(opened)
    figures = _figures(outcome) | _start(opened.saver.base.published)
    result = _commit(ctx, inputs, outcome.prefix, figures, started)
    _log_summary(ctx, outcome, (result.finished - started).total_seconds())
    return result


def _commit(
    ctx: StageContext, inputs: RunInputs, checkpoint: str, figures: dict[str, Figure], started: datetime
) -> StageResult:
    """Build the result of this training run, and store it on rank 0."""
    result = ctx.finish(NAME, started, inputs=inputs.identity, outputs={"checkpoint": checkpoint}, figures=figures)
    return store_result(ctx.workspace, result) if ctx.world.is_main else result


def _start(published: PublishedWeights | None) -> dict[str, Figure]:
    """Return a figure with the published weights that the lineage of the model started from, if known."""
    return {} if published is None else {"began_from": published.text}


def _figures(outcome: Outcome) -> dict[str, Figure]:
    """Return the figures of the result. If the relevance head is untrained, its metrics are left out."""
    figures: dict[str, Figure] = {
        "step": outcome.step,
        "steps_done": outcome.steps_done,
        "late": outcome.late,
        "groups_new": outcome.groups_new,
        "groups_replayed": outcome.groups_replayed,
    }
    for split, values in outcome.holdouts.items():
        figures |= {
            f"{split}_{name}": value
            for name, value in asdict(values).items()
            if name != "temperature"
            and value is not None
            and value == value
            and (outcome.has_scores or name in _WITHOUT_SCORES)
        }
    return figures


def _log_summary(ctx: StageContext, outcome: Outcome, seconds: float) -> None:
    for split, values in outcome.holdouts.items():
        if not outcome.has_scores:
            ctx.console.info(f"{split}: {values.rows} rows | no scores, because train.loss.graded_weight is 0")
            continue
        ctx.console.info(
            f"{split}: {values.rows} rows | accuracy {values.accuracy:.4f} | macro F1 {values.macro_f1:.4f} | "
            f"positive F1 {values.positive_f1:.4f} | nDCG@10 {values.ndcg:.4f} | loss {values.loss:.4f}"
        )
    uri = ctx.workspace.uri(outcome.prefix)
    ctx.console.info(f"train: done in {format_duration(seconds)}, step {outcome.step}, checkpoint {uri}")
