"""Traced graphs as text: what the compile cache holds for devices that keep no compiled ones."""

import gzip
from collections.abc import Mapping

from pipeline.io.storage import Storage

FOLDER = "compile-cache/hlo"


def store_texts(workspace: Storage, texts: Mapping[str, str]) -> None:
    """Keep the HLO text of each graph under its key; what is there already stays."""
    for key, text in texts.items():
        workspace.write_if_absent(_place(key), gzip.compress(text.encode(), mtime=0))


def _place(key: str) -> str:
    return f"{FOLDER}/{key}.txt.gz"
