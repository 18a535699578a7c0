"""`registry/<model>/production.json`: which checkpoint is in production."""

from pydantic import ValidationError

from pipeline.core.errors import CheckpointError
from pipeline.io.errors import KeyNotFound
from pipeline.io.storage import Storage
from pipeline.registry.records import Pointer, check_model

FOLDER = "registry"


def pointer_key(model: str) -> str:
    """Raises ConfigError for a name that is none."""
    return f"{FOLDER}/{check_model(model)}/production.json"


def read_pointer(workspace: Storage, model: str) -> tuple[Pointer, str] | None:
    """The pointer and its etag; None when nothing is in production. Raises CheckpointError for a damaged one.

    The etag is at most older than the content: a conditional write with it fails rather than overwrite.
    """
    key = pointer_key(model)
    stat = workspace.stat(key)
    if stat is None:
        return None
    try:
        pointer = Pointer.model_validate_json(workspace.read_bytes(key))
        if pointer.model != model:
            raise ValueError(f"it is of model {pointer.model}")
    except KeyNotFound:  # removed by hand just now
        return None
    except ValueError as error:
        reason = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise CheckpointError(
            f"{workspace.uri(key)} is no pointer to a checkpoint: {reason}",
            expected="the last change of production, as trnpipe wrote it",
            next_command=f"put back the last line of {FOLDER}/{model}/history.jsonl that is no refusal, or delete the "
            "file and promote a checkpoint with trnpipe registry promote CHECKPOINT --force REASON",
        ) from error
    return pointer, stat.etag
