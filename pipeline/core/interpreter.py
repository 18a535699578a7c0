"""Commands of Python: how a module of ours is started, and what of a user's command a launcher of ranks runs."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

OWN_MODULE = (sys.executable, "-u", "-P", "-m")
"""Starts a module of ours, also where the current folder has one by the same name."""


def strip_interpreter(words: Sequence[str]) -> list[str]:
    """What stands behind `python`, at any path, and its `-u`: ranks run under an interpreter of their own."""
    first = words[0] if words else ""
    if first != sys.executable and not re.fullmatch(r"python[\d.]*", Path(first).name):
        return list(words)
    return list(words[2:] if list(words[1:2]) == ["-u"] else words[1:])
