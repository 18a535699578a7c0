"""The checkpoint a cycle starts from, opened and verified."""

from pathlib import Path

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.io.storage import Storage
from pipeline.settings import Settings
from pipeline.stages.incumbent import parent_place


def find_parent(settings: Settings, workspace: Storage, cache_dir: Path) -> Checkpoint | None:
    """The verified parent checkpoint; None for scratch, or when nothing is promoted yet. Raises CheckpointError."""
    place = parent_place(settings, workspace)
    return None if place is None else open_checkpoint(*place, cache_dir)
