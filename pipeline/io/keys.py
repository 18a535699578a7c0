"""Rules for storage keys: '/'-separated, relative to the root, the same on every storage."""

from pipeline.core.errors import ConfigError

TEMP_PREFIX = ".trnpipe-tmp-"


def is_temp(name: str) -> bool:
    """True for the last part of a name that only a writer may see."""
    return name.startswith(TEMP_PREFIX)


def check_key(key: str) -> str:
    """The key itself. ConfigError when it is empty, absolute, or has an empty, '.', '..' or temporary part."""
    parts = key.split("/")
    if any(part in ("", ".", "..") or is_temp(part) or "\0" in part for part in parts):
        raise ConfigError(
            f"storage key {key!r}",
            expected="parts joined by '/', none of them empty, '.', '..' or temporary",
            next_command="check the names in the settings that make up this key",
        )
    return key


def folder_key(prefix: str) -> str:
    """A prefix without slashes at its ends, checked; '' stands for the root."""
    stripped = prefix.strip("/")
    return check_key(stripped) if stripped else ""


def join_key(prefix: str, name: str) -> str:
    """`prefix/name`, or `name` under the root."""
    return f"{prefix.strip('/')}/{name}" if prefix.strip("/") else name
