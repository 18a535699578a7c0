"""Words that begin with `python`: what of them a launcher of ranks runs."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path


def without_interpreter(words: Sequence[str]) -> list[str]:
    """What stands behind `python`, at any path, and its `-u`: ranks run under an interpreter of their own."""
    first = words[0] if words else ""
    if first != sys.executable and not re.fullmatch(r"python[\d.]*", Path(first).name):
        return list(words)
    return list(words[2:] if list(words[1:2]) == ["-u"] else words[1:])
