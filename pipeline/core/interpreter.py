"""Build and parse Python command lines."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

OWN_MODULE = (sys.executable, "-u", "-P", "-m")
"""Prefix of a command that runs one of our modules. `-P` ignores a module of the same name in the current folder."""


def strip_interpreter(command: Sequence[str]) -> list[str]:
    """Strip a leading `python` (with any path) and `-u` from a command.

    The launcher always starts ranks with the interpreter that it runs in itself.
    """
    program = command[0] if command else ""
    if program != sys.executable and not re.fullmatch(r"python[\d.]*", Path(program).name):
        return list(command)
    return list(command[2:] if list(command[1:2]) == ["-u"] else command[1:])
