"""Which code is running, for the records kept beside every artefact."""

import subprocess
from functools import cache
from pathlib import Path

import pipeline


@cache
def code_version() -> str:
    """`git describe` of the checkout the package lies in (`-dirty` when edited), else the package version."""
    root = Path(pipeline.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return pipeline.__version__
    command = ["git", "-C", str(root), "describe", "--always", "--tags", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):  # no git in the image: the package version is the answer
        return pipeline.__version__
    text = described.stdout.strip()
    return f"{pipeline.__version__}+{text}" if described.returncode == 0 and text else pipeline.__version__
