"""Python command lines: start a module of this project, and strip the interpreter from a user's command."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

OWN_MODULE = (sys.executable, "-u", "-P", "-m")
"""Starts a module of this project, even if the current folder contains a module with the same name."""


def strip_interpreter(command: Sequence[str]) -> list[str]:
    """Return a command without `python`, at any path, and `-u`. The launcher starts ranks with its own interpreter."""
    program = command[0] if command else ""
    if program != sys.executable and not re.fullmatch(r"python[\d.]*", Path(program).name):
        return list(command)
    return list(command[2:] if list(command[1:2]) == ["-u"] else command[1:])
