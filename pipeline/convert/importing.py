"""A foreign model as a checkpoint of the workspace, as if a run had saved it at step 0."""

import re
from pathlib import Path

from torch import Tensor

from pipeline.checkpoint.save import Snapshot, commit_snapshot
from pipeline.checkpoint.state import TrainState
from pipeline.checkpoint.store import Checkpoint, open_checkpoint, prefix_of
from pipeline.convert.reading import ForeignModel
from pipeline.core.errors import CheckpointError
from pipeline.core.fingerprint import fingerprint
from pipeline.io.storage import Storage
from pipeline.model.hf import hf_config, to_hf

STEP = 0
_NO_NAME = re.compile(r"[^A-Za-z0-9_-]+")


def import_name(model: ForeignModel) -> str:
    """The name that stands for a cycle: of the folder or file, and of the content, so that no two imports meet."""
    last = _NO_NAME.sub("-", model.origin.uri.rstrip("/").rpartition("/")[2]).strip("-")
    return f"import-{last[:40] or 'model'}-{fingerprint(_identity(model))[:8]}"


def store_import(
    workspace: Storage, model: ForeignModel, *, settings_hash: str, code_version: str, scratch: Path
) -> tuple[Checkpoint, bool]:
    """The verified checkpoint, and whether it was there already. `scratch`: an empty folder of one's own."""
    name = import_name(model)
    prefix = prefix_of(name, STEP)
    try:
        return open_checkpoint(workspace, prefix, scratch / "verified"), True
    except CheckpointError:  # not there, or damaged: it is written (again)
        record = model.record
    state = TrainState(
        cycle=name,
        step=STEP,
        max_steps=STEP,
        identity=fingerprint(_identity(model)),
        identity_parts=_identity(model),
        model=model.config,
        inputs=model.spec,
        tokenizer_fingerprint=model.tokenizer.fingerprint,
        watermark=record.watermark if record else "",
        partitions=record.partitions if record else {},
        parent=model.parent,
        best=None,
        origin=model.origin,
        max_tokens=model.max_tokens,
        settings_hash=settings_hash,
        code_version=code_version,
    )
    no_moments: dict[str, Tensor] = {}
    snapshot = Snapshot(
        state, to_hf(model.weights), no_moments, hf_config(model.config, model.spec), model.tokenizer.data
    )
    commit_snapshot(workspace, snapshot, scratch / "saving")
    return open_checkpoint(workspace, prefix, scratch / "verified"), False


def _identity(model: ForeignModel) -> dict[str, str]:
    """What decides the checkpoint, by name."""
    parts = {
        "origin": model.origin.fingerprint,
        "tokenizer": model.tokenizer.fingerprint,
        "model": model.config.model_dump(mode="json"),
        "inputs": model.spec.model_dump(mode="json"),
        "max_tokens": model.max_tokens,
        "new_head": model.new_head,
    }
    return {part: fingerprint(value) for part, value in parts.items()}
