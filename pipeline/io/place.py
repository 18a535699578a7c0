"""A place that was typed: a path or URI, as the storage of the folder above and the name in it."""

import os
from pathlib import Path

from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.io.retry import RetryPolicy
from pipeline.io.storage import Storage, check_key, open_storage


def place_of(text: str, *, retry: RetryPolicy, stop: StopSignal, follow_links: bool = False) -> tuple[Storage, str]:
    """Storage of the parent folder, and the last name. Raises ConfigError where there is none, or for a bad URI.

    `follow_links`: the place that a symbolic link leads to, for writing; a file read by its link keeps its own name.
    """
    path = _local(text, follow_links).rstrip("/")
    root, _, name = path.rpartition("/")
    if not name or path.endswith(":") or root.endswith(":/"):  # a root, a bare scheme, a whole bucket
        raise ConfigError(
            f"{text!r} names no folder or file",
            expected="a path, file:///folder/name or s3://bucket/folder/name",
            next_command="name a folder in it",
        )
    return open_storage(root or "/", retry=retry, stop=stop), check_key(name)


def _local(text: str, follow_links: bool) -> str:
    """An absolute path without dots; another URI as it is."""
    if text.startswith("file:///"):
        text = text.removeprefix("file://")
    if "://" in text or not text:
        return text
    path = Path(text).expanduser()
    return str(path.resolve()) if follow_links else os.path.abspath(path)  # noqa: PTH100 - resolve() follows links
