"""Checkpoints that retention must leave alone."""

from pipeline.io.storage import Storage
from pipeline.registry.history import list_models, read_history
from pipeline.registry.records import changes_of


def in_use(workspace: Storage) -> frozenset[str]:
    """Prefixes of the checkpoints that are in production of any model, or were and may be rolled back to.

    Raises DataError and CheckpointError for a damaged registry: then nothing may be deleted.
    """
    return frozenset(
        entry.checkpoint for model in list_models(workspace) for entry in changes_of(read_history(workspace, model))
    )
