"""Resolve local paths that users type, and determine the default cache and temporary folders."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.errors import ConfigError


def user_path(text: str) -> Path:
    """Expand `~` and `~user`, and return an absolute path.

    Raises ConfigError if the user has no home folder or if the current folder no longer exists.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"{text}: {text.partition('/')[0]} has no home folder",
            expected="a user with a home folder (~ requires HOME in the environment)",
            next_command="use an absolute path",
        ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"{text}: the current folder no longer exists",
            expected="an absolute path, or a path relative to an existing folder",
            next_command="cd to an existing folder, or use an absolute path",
        ) from None


def display_path(uri: str) -> str:
    """Return a short path that users can paste, given a path or a URI.

    The path is relative to the current folder if it is inside it. The URI of a remote file is returned unchanged.
    """
    path = uri.removeprefix("file://")
    return (
        path if "://" in path or not Path(path).is_relative_to(Path.cwd()) else str(Path(path).relative_to(Path.cwd()))
    )


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return the cache folder.

    This is `$XDG_CACHE_HOME/trnpipe` if set, or ~/.cache/trnpipe if it is writable. Otherwise, fall back to a temporary
    folder. Raises ConfigError if the temporary folder can't be created or belongs to a different user.
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
        is_own = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    except OSError:
        is_own = False
    if not is_own:  # any user may have created a folder with this name
        raise ConfigError(
            f"there is no writable home folder, and {folder} is not a folder of this user",
            expected="a writable folder for the cache",
            next_command="set XDG_CACHE_HOME to a writable folder",
        )
    return folder


def temporary_folder() -> Path:
    """Return the folder for temporary files. Raises ConfigError if there is no writable folder."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.strerror}", expected="a folder for temporary files", next_command="set TMPDIR to a writable folder"
        ) from None
