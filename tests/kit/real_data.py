"""Public data for the tests that want it: files of the folder that REAL_DATA names. None are kept here."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("REAL_DATA", ""))


def real_file(name: str) -> Path:
    """A file of that folder; without it the test that asks is skipped."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not there: REAL_DATA names no folder that has it")
    return path
