"""Paths on this machine as people write them, and the folders that no setting names."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.errors import ConfigError


def user_path(text: str) -> Path:
    """Return the absolute path of a text that may begin with `~` or `~user`.

    Raises ConfigError for a user without a home, and for a relative path where the current folder is gone.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"{text}: no home folder of {text.partition('/')[0]} is known",
            expected="a user with a home folder; for ~ that is HOME in the environment",
            next_command="give the whole path",
        ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"{text}: the current folder does not exist any more",
            expected="a path from the root, or a current folder",
            next_command="cd to a folder that exists, or give the whole path",
        ) from None


def display_path(uri: str) -> str:
    """Return a path or a file:// URI so that it can be pasted: relative to the current folder if it is below it."""
    path = uri.removeprefix("file://")
    return (
        path if "://" in path or not Path(path).is_relative_to(Path.cwd()) else str(Path(path).relative_to(Path.cwd()))
    )


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return the folder for what can be made again: `$XDG_CACHE_HOME/trnpipe`, else ~/.cache/trnpipe.

    Without a home that can be written to, a folder of this user among the temporary files. Raises ConfigError.
    """
    if env.get("XDG_CACHE_HOME"):
        return user_path(env["XDG_CACHE_HOME"]) / "trnpipe"
    try:
        folder = user_path("~/.cache/trnpipe")
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (ConfigError, OSError):
        pass
    folder = temporary_folder() / f"trnpipe-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        is_ours = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    except OSError:
        is_ours = False
    if not is_ours:  # a name that anybody can take
        raise ConfigError(
            f"there is no home folder that can be written to, and {folder} is not a folder of this user",
            expected="a folder for files that can be made again",
            next_command="set XDG_CACHE_HOME to one",
        )
    return folder


def temporary_folder() -> Path:
    """Return the folder for temporary files. Raises ConfigError where none can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.strerror}", expected="a folder for temporary files", next_command="set TMPDIR to one"
        ) from None
