"""The settings of the cycle: from the workspace to the command line of the pipeline."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.io.errors import KeyNotFound
from pipeline.io.storage import Storage


def settings_key(cycle: str) -> str:
    return f"cycles/{cycle}/jobs/settings.json"


def read_settings(storage: Storage, cycle: str) -> bytes | None:
    """What the jobs of the cycle were submitted with; None when nothing was. Raises every error of storage."""
    try:
        return storage.read_bytes(settings_key(cycle))
    except KeyNotFound:
        return None


def with_settings(words: Sequence[str], file: Path) -> list[str]:
    """The command with the file of settings, where it is one of ours; other commands stay as they are."""
    return [*words, "--config", str(file)] if is_ours(words) else list(words)


def is_ours(words: Sequence[str]) -> bool:
    """`trnpipe ...` or `trnjobs ...`, at any path, or `python -m pipeline ...` or `python -m jobs ...`."""
    modules = (["-m", "pipeline"], ["-m", "jobs"])
    return Path(words[0]).name in ("trnpipe", "trnjobs") or list(words[1:3]) in modules
