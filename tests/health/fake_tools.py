"""Programs that stand for the tools of a machine."""

import os
from pathlib import Path


def fake_tool(folder: Path, name: str, script: str) -> None:
    """Make a shell script called `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def says(folder: Path, name: str, text: str, *, exit_code: int = 0) -> None:
    """Make a program that prints `text` and ends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.txt").write_text(text)
    fake_tool(folder, name, f"cat {folder / name}.txt; exit {exit_code}")


def environment(folder: Path) -> dict[str, str]:
    """Only the fakes and the plain tools of a shell: no tool of this machine is run."""
    return {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}
