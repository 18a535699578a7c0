"""The checkpoint a cycle starts from, pinned at its first attempt, opened and verified."""

import json

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.context import StageContext
from pipeline.settings import Settings
from pipeline.stages.incumbent import incumbent_prefix, parent_place


def find_parent(settings: Settings, ctx: StageContext) -> Checkpoint | None:
    """The verified parent checkpoint; None for scratch, or when nothing was promoted. Raises CheckpointError."""
    cache_dir = ctx.scratch / "parent"
    if settings.train.start != "incumbent":
        place = parent_place(settings, ctx.workspace)
        return None if place is None else open_checkpoint(*place, cache_dir)
    prefix = _pinned_incumbent(settings, ctx)
    return None if prefix is None else open_checkpoint(ctx.workspace, prefix, cache_dir)


def _pinned_incumbent(settings: Settings, ctx: StageContext) -> str | None:
    """The model that was promoted when this cycle first mined negatives or trained.

    A promotion in between, even of this very cycle, must not change what a later attempt starts from. The first writer
    wins, so all ranks agree.
    """
    key = f"cycles/{ctx.cycle}/train/parent.json"
    pin = json.dumps({"checkpoint": incumbent_prefix(ctx.workspace, settings.model_name)})
    ctx.workspace.write_if_absent(key, pin.encode())
    pinned = json.loads(ctx.workspace.read_bytes(key))["checkpoint"]
    return None if pinned is None else str(pinned)
