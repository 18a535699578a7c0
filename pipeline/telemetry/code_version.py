"""Which code is running, for the records kept beside every artefact."""

import os
import subprocess
from functools import cache
from pathlib import Path

import pipeline

REVISION_VARIABLE = "TRN_REVISION"  # set by our images, which hold no .git


@cache
def code_version() -> str:
    """The package version with `git describe` of the checkout it lies in (`-dirty` when edited), or with the revision
    that an image was built from."""
    root = Path(pipeline.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        revision = os.environ.get(REVISION_VARIABLE, "")
        return f"{pipeline.__version__}+{revision}" if revision else pipeline.__version__
    command = ["git", "-C", str(root), "describe", "--always", "--tags", "--dirty"]
    try:
        described = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):  # no git in the image: the package version is the answer
        return pipeline.__version__
    text = described.stdout.strip()
    return f"{pipeline.__version__}+{text}" if described.returncode == 0 and text else pipeline.__version__
