"""The two models of an evaluation: the candidate, and what it is held against. Opened and verified."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.context import StageContext
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.data.tokens import TokenSet, spec_of
from pipeline.io.storage import Storage
from pipeline.registry.checkpoints import locate
from pipeline.registry.history import read_pointer
from pipeline.registry.records import Pointer
from pipeline.settings import Settings

PRODUCTION, NONE = "production", "none"


@dataclass(frozen=True)
class Models:
    """Who is judged, against whom.

    `in_workspace`: the candidate lies in this workspace, so that it can be promoted. `pointer`: what is in production
    when this attempt started. `compared` is None when there is nothing to compare with.
    """

    candidate: Checkpoint
    in_workspace: bool
    pointer: Pointer | None
    compared: Checkpoint | None
    against_production: bool

    @property
    def is_incumbent(self) -> bool:
        """The candidate is in production already."""
        return self.pointer is not None and self.pointer.digest == self.candidate.digest


def find_models(settings: Settings, ctx: StageContext, sets: Sequence[TokenSet]) -> Models:
    """Raises ConfigError, DataError when there is no candidate, CheckpointError for one that does not verify."""
    config = settings.evaluate
    storage, prefix = _candidate_place(settings, ctx)
    in_workspace = storage is ctx.workspace
    if not in_workspace and config.promote:
        raise ConfigError(
            f"the candidate {storage.uri(prefix)} lies outside the workspace, so it cannot be promoted",
            expected=f"a checkpoint below {ctx.workspace.uri('checkpoints')}",
            next_command="trnpipe import it first, or --no-evaluate.promote",
        )
    candidate = open_checkpoint(storage, prefix, ctx.scratch / "candidate")
    check_data(candidate, sets, "candidate", "prepare the data with its settings, or name another --evaluate.candidate")
    found = read_pointer(ctx.workspace, settings.model_name)
    pointer = found[0] if found else None
    compared = _compared(settings, ctx, pointer)
    if compared is not None:
        hint = "--evaluate.incumbent none, and --evaluate.force-reason to promote on record"
        check_data(compared, sets, "incumbent", hint)
    return Models(candidate, in_workspace, pointer, compared, config.incumbent == PRODUCTION or pointer is None)


def _candidate_place(settings: Settings, ctx: StageContext) -> tuple[Storage, str]:
    """Storage and prefix; the storage is that of the workspace when it lies there."""
    named = settings.evaluate.candidate
    if named:
        return locate(named, settings, ctx.workspace)
    result = ctx.earlier("train")
    if result is None:
        raise DataError(
            f"cycle {ctx.cycle} has no trained model",
            expected="the result of the train stage",
            next_command=f"trnpipe train --cycle {ctx.cycle}, with the same settings; or --evaluate.candidate NAME",
        )
    return ctx.workspace, result.outputs["checkpoint"]


def _compared(settings: Settings, ctx: StageContext, pointer: Pointer | None) -> Checkpoint | None:
    named = settings.evaluate.incumbent
    if named == NONE or (named == PRODUCTION and pointer is None):
        return None
    cache = ctx.scratch / "incumbent"
    if named != PRODUCTION or pointer is None:
        return open_checkpoint(*locate(named, settings, ctx.workspace), cache)
    try:
        return open_checkpoint(ctx.workspace, pointer.checkpoint, cache)
    except CheckpointError as error:
        raise CheckpointError(
            f"what is in production cannot be opened: {error.seen}",
            expected=error.expected,
            next_command="trnpipe registry rollback; or --evaluate.incumbent none with --evaluate.force-reason TEXT",
        ) from error


def check_data(checkpoint: Checkpoint, sets: Sequence[TokenSet], role: str, hint: str) -> None:
    """The data must be what the model reads: tokenizer, classes, features, lengths. Raises ConfigError with the field.

    The gains of the classes may differ: both models are ranked by those of the data.
    """
    state, info = checkpoint.state, sets[0].info
    theirs, ours = state.inputs.model_dump(exclude={"label_gains"}), spec_of(info).model_dump(exclude={"label_gains"})
    theirs["tokenizer"], ours["tokenizer"] = state.tokenizer_fingerprint, info.tokenizer_fingerprint
    for name in ("tokenizer", *theirs):
        if theirs[name] != ours[name]:
            raise ConfigError(
                f"the data has {name} {ours[name]}, the {role} {checkpoint.uri} was trained with {theirs[name]}",
                expected="data that the model can read",
                next_command=hint,
            )
    longest = max(max(int(side) for side in bucket.split("x")) for bucket in info.buckets)
    if longest > state.model.max_positions:
        raise ConfigError(
            f"the longest bucket has {longest} tokens, the {role} reads {state.model.max_positions}",
            expected="buckets that fit its position embeddings",
            next_command=hint,
        )
