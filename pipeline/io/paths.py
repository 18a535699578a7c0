"""Local paths as users type them, and the default cache and temporary folders."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.errors import ConfigError


def user_path(text: str) -> Path:
    """Expand `~` and `~user` and return an absolute path. Raises ConfigError without a home or current folder."""
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"{text}: {text.partition('/')[0]} has no home folder",
            expected="a user with a home folder (for ~: HOME in the environment)",
            next_command="use an absolute path",
        ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"{text}: the current folder no longer exists",
            expected="an absolute path, or a path relative to an existing folder",
            next_command="cd to an existing folder, or use an absolute path",
        ) from None


def display_path(uri: str) -> str:
    """Return a path or a file:// URI as a path to paste, relative to the current folder if inside it."""
    path = uri.removeprefix("file://")
    return (
        path if "://" in path or not Path(path).is_relative_to(Path.cwd()) else str(Path(path).relative_to(Path.cwd()))
    )


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return the cache folder: `$XDG_CACHE_HOME/trnpipe`, else ~/.cache/trnpipe, else a temporary folder of this user.

    Raises ConfigError if that temporary folder cannot be created or belongs to another user.
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
    if not is_own:  # any user can create this name
        raise ConfigError(
            f"there is no writable home folder, and {folder} is not a folder of this user",
            expected="a writable folder for the cache",
            next_command="set XDG_CACHE_HOME to one",
        )
    return folder


def temporary_folder() -> Path:
    """Return the folder for temporary files. Raises ConfigError if none is writable."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.strerror}", expected="a folder for temporary files", next_command="set TMPDIR to one"
        ) from None
