"""The checkpoint a cycle starts from: the incumbent, a named one, or none."""

import json
from pathlib import Path

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.core.errors import CheckpointError
from pipeline.io.errors import KeyNotFound
from pipeline.io.storage import Storage, open_storage
from pipeline.settings import Settings


def find_parent(settings: Settings, workspace: Storage, cache_dir: Path) -> Checkpoint | None:
    """The verified parent checkpoint; None for scratch, or when nothing is promoted yet. Raises CheckpointError."""
    start = settings.train.start
    if start == "scratch":
        return None
    if start == "incumbent":
        prefix = incumbent_prefix(workspace, settings.model_name)
        return None if prefix is None else open_checkpoint(workspace, prefix, cache_dir)
    root, _, name = start.rstrip("/").rpartition("/")
    return open_checkpoint(open_storage(root or ".", retry=settings.storage, stop=workspace.stop), name, cache_dir)


def incumbent_prefix(workspace: Storage, model_name: str) -> str | None:
    """Where the promoted checkpoint lies in the workspace; None when nothing is promoted."""
    key = f"registry/{model_name}/production.json"
    try:
        return str(json.loads(workspace.read_bytes(key))["checkpoint"])
    except KeyNotFound:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{workspace.uri(key)} is no pointer to a checkpoint: {error}",
            expected='{"checkpoint": "checkpoints/<cycle>/step-<n>", ...}',
            next_command="promote a checkpoint again, or --train.start scratch",
        ) from error
