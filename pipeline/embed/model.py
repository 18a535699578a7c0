"""The checkpoint that embeds: the promoted one, or the one named in the settings; pinned by the plan of the cycle."""

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.compile.plan import embed_plan, open_part_guard
from pipeline.compile.watch import GraphWatch, NoWatch
from pipeline.context import StageContext
from pipeline.core.errors import CheckpointError
from pipeline.embed.engine import Embedder, open_embedder
from pipeline.embed.plan import EmbedPlan, ModelRef
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.gang import open_device
from pipeline.registry.checkpoints import incumbent_prefix, locate
from pipeline.settings import Settings


def model_place(settings: Settings, ctx: StageContext) -> str:
    """Prefix in the workspace, or URI, of the checkpoint the settings ask for. Raises CheckpointError without one."""
    if settings.embed.checkpoint:
        return settings.embed.checkpoint.rstrip("/")
    promoted = incumbent_prefix(ctx.workspace, settings.model_name)
    if promoted is not None:
        return promoted
    trained = ctx.earlier("train")
    candidate = trained.outputs.get("checkpoint") if trained else None
    raise CheckpointError(
        f"no checkpoint of model {settings.model_name} is promoted in {ctx.workspace.root}",
        expected="a promoted checkpoint, or one that is named",
        next_command=f"trnpipe evaluate, or --embed.checkpoint {candidate or 'checkpoints/<cycle>/step-<n>'}",
    )


def open_model(place: str, settings: Settings, ctx: StageContext) -> Checkpoint:
    """The checkpoint, every byte verified. Raises CheckpointError."""
    storage, prefix = locate(place, settings, ctx.workspace)
    return open_checkpoint(storage, prefix, ctx.scratch / "embed" / "model")


def open_pinned(model: ModelRef, settings: Settings, ctx: StageContext) -> Checkpoint:
    """The checkpoint of the plan. Raises CheckpointError when it is gone or not the same any more."""
    checkpoint = open_model(model.place, settings, ctx)
    if checkpoint.digest != model.digest:
        raise CheckpointError(
            f"{checkpoint.uri} has digest {checkpoint.digest}",
            expected=f"{model.digest}, with which cycle {ctx.cycle} was begun",
            next_command="embed in a new cycle",
        )
    return checkpoint


def catalogue_storage(plan: EmbedPlan, settings: Settings, ctx: StageContext) -> Storage:
    """Where the files of the catalogue lie."""
    root = plan.catalogue.root
    return open_storage(root, retry=settings.storage, stop=ctx.stop) if root else ctx.workspace


def longest_text(settings: Settings, checkpoint: Checkpoint) -> int:
    """Tokens of a text that the model reads."""
    state = checkpoint.state
    return settings.embed.text_limit(state.max_tokens, state.model.max_positions)


def open_device_embedder(settings: Settings, ctx: StageContext, checkpoint: Checkpoint) -> tuple[Backend, Embedder]:
    """The device of this rank with the model on it."""
    backend = open_device(settings.backend, ctx.world)
    watch = _watch(settings, ctx, checkpoint, backend)
    return backend, open_embedder(checkpoint, backend, settings.embed, watch, stop=ctx.stop)


def _watch(settings: Settings, ctx: StageContext, checkpoint: Checkpoint, backend: Backend) -> GraphWatch:
    """What holds graphs against the manifests of this workspace."""
    if not backend.is_lazy:
        return NoWatch()
    state = checkpoint.state
    device, world_size = backend.device_name(), ctx.world.world_size
    plan = embed_plan(state.model, settings.embed, settings.compile, state.inputs, device, world_size)
    return open_part_guard(ctx.workspace, plan, backend, settings.compile, ctx.console)
