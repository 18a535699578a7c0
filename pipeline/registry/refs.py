"""Where the checkpoint lies that a cycle starts from. Free of torch, as the prepare stage needs only its tokenizer."""

import json

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.io.storage import KeyNotFound, Storage, open_storage
from pipeline.registry.history import pointer_key
from pipeline.registry.records import check_prefix
from pipeline.settings import Settings

TOKENIZER_FILE = "tokenizer.json"


def incumbent_prefix(workspace: Storage, model_name: str) -> str | None:
    """Where the promoted checkpoint lies in the workspace; None when nothing is promoted. Raises CheckpointError.

    Only this field is read: a job that runs on an older version must not stumble over the others of a newer one.
    """
    key = pointer_key(model_name)
    try:
        pointer = workspace.read_bytes(key)
    except KeyNotFound:
        return None
    try:
        return check_prefix(json.loads(pointer)["checkpoint"])
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{workspace.uri(key)} is no pointer to a checkpoint: {error}",
            expected='{"checkpoint": "checkpoints/<cycle>/step-<n>", ...}',
            next_command="promote a checkpoint again, or --train.start scratch",
        ) from error


def parent_place(settings: Settings, workspace: Storage) -> tuple[Storage, str] | None:
    """Storage and prefix of the parent checkpoint; None for scratch, or when nothing is promoted yet."""
    start = settings.train.start
    if start == "scratch":
        return None
    if start == "incumbent":
        prefix = incumbent_prefix(workspace, settings.model_name)
        return None if prefix is None else (workspace, prefix)
    root, _, name = start.rstrip("/").rpartition("/")
    return open_storage(root or ".", retry=settings.storage, stop=workspace.stop), name


def parent_tokenizer(settings: Settings, workspace: Storage) -> bytes | None:
    """tokenizer.json of the parent, which new data must use. Training verifies the checkpoint and that both agree."""
    place = parent_place(settings, workspace)
    if place is None:
        return None
    storage, prefix = place
    try:
        return storage.read_bytes(f"{prefix}/{TOKENIZER_FILE}")
    except KeyNotFound as error:
        raise CheckpointError(
            f"the parent {storage.uri(prefix)} has no {TOKENIZER_FILE}",
            expected="a committed checkpoint (train.start)",
            next_command="name another with --train.start, or --train.start scratch",
        ) from error
