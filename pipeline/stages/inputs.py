"""What stages before this one left: prepared data, mined negatives, and the checkpoint a cycle starts from."""

import json
from dataclasses import dataclass

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.context import StageContext
from pipeline.core.errors import DataError
from pipeline.registry.checkpoints import incumbent_prefix, start_place
from pipeline.settings import Settings

# The checkpoint a cycle starts from, pinned at its first attempt, opened and verified.


def find_parent(settings: Settings, ctx: StageContext) -> Checkpoint | None:
    """The verified parent checkpoint; None for scratch, or when nothing was promoted. Raises CheckpointError."""
    cache_dir = ctx.scratch / "parent"
    if settings.train.start != "incumbent":
        place = start_place(settings.train.start, settings, ctx.workspace)
        return None if place is None else open_checkpoint(*place, cache_dir)
    # The model that was promoted when this cycle first mined negatives or trained: a promotion in between, even of this
    # very cycle, must not change what a later attempt starts from. The first writer wins, so all ranks agree.
    key = f"cycles/{ctx.cycle}/train/parent.json"
    pin = json.dumps({"checkpoint": incumbent_prefix(ctx.workspace, settings.model_name)})
    ctx.workspace.write_if_absent(key, pin.encode())
    pinned = json.loads(ctx.workspace.read_bytes(key))["checkpoint"]
    return None if pinned is None else open_checkpoint(ctx.workspace, str(pinned), cache_dir)


@dataclass(frozen=True)
class Prepared:
    """Committed folders in the workspace."""

    token_sets: tuple[str, ...]
    """In partition order."""
    tokenizer: str


def find_prepared(ctx: StageContext) -> Prepared | None:
    """The prepared data of this cycle, None when there is none yet."""
    result = ctx.earlier("prepare")
    if result is None:
        return None
    names = sorted(name for name in result.outputs if name.startswith("token_set_"))
    return Prepared(tuple(result.outputs[name] for name in names), result.outputs["tokenizer"])


def load_prepared(ctx: StageContext) -> Prepared:
    """The prepared data of this cycle. Raises DataError when there is none yet."""
    prepared = find_prepared(ctx)
    if prepared is None:
        raise DataError(
            f"cycle {ctx.cycle} has no prepared data",
            expected="the result of the prepare stage",
            next_command=f"trnpipe prepare --cycle {ctx.cycle}, with the same settings",
        )
    return prepared


def mined_negatives(ctx: StageContext) -> str | None:
    """Where the negatives lie that were mined in this cycle; None when it has not mined."""
    result = ctx.earlier("mine")
    return None if result is None else result.outputs.get("negatives")
