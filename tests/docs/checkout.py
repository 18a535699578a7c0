"""A copy of the checkout to type commands in, as a newcomer has it, but with the virtual environment that is there."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT

VENV = ROOT / ".venv"
_LEFT_OUT = (
    ".git",
    ".venv",
    ".venv-native",
    ".venv-scan",
    ".*_cache",
    ".terraform",
    "__pycache__",
    "*.egg-info",
    "build",
    "workspace",
    ".hypothesis",
)


def copy_of_checkout(folder: Path) -> Path:
    """All files of the working tree below `folder`, committed or not."""
    _needs_venv()
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    return _with_venv(folder)


def clone_of_checkout(folder: Path) -> Path:
    """What is committed, by git clone."""
    _needs_venv()
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    return _with_venv(folder)


def _needs_venv() -> None:
    if not (VENV / ".installed").exists():
        pytest.skip("make setup has not made .venv here: make would install it anew")


def _with_venv(folder: Path) -> Path:
    """make installs when these files are newer than its stamp; a copy's are, and nothing is to be installed here."""
    (folder / ".venv").symlink_to(VENV)
    for name in ("pyproject.toml", "requirements.lock"):
        os.utime(folder / name, (0, 0))
    return folder
