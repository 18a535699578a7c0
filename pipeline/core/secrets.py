"""Detect and mask secrets."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_WORDS = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "KEY", "APIKEY"})
HIDDEN = "***"
_USER_OF_URI = re.compile(r"(?<=://)[^/@\s\"']+@")


def is_secret(name: str) -> bool:
    """Return whether a name looks like the name of a secret, such as `HF_TOKEN` (but not `MAX_TOKENS`)."""
    return not SECRET_WORDS.isdisjoint(re.split(r"[^A-Z0-9]+", name.upper()))


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of all environment variables that look like secrets. Values under 8 characters are skipped."""
    return tuple(value for name, value in env.items() if is_secret(name) and len(value) >= 8)


def without_secret(name: str, value: Any) -> Any:
    """Mask secrets in the value of a setting, given the dotted name of the setting."""
    last = name.rpartition(".")[2]
    return without_secrets({last: value}, ())[last]


def without_secrets(value: Any, secrets: Sequence[str]) -> Any:
    """Mask secrets in a nested value.

    This covers the given secrets, user names and passwords in URIs, everything under a key that looks like the name of
    a secret, and the values of flags such as `--api-key` in the arguments of commands.
    """
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(str(key)) else without_secrets(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        value = _without_secret_flags(value)
        return [without_secrets(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return _USER_OF_URI.sub(f"{HIDDEN}@", value)
    return value


def _without_secret_flags(items: Sequence[Any]) -> list[Any]:
    """Hide the values of flags such as `--api-key` if the items are the arguments of a command."""
    shown, is_hidden = list[Any](), False
    for item in items:
        name, equals, _ = item.partition("=") if isinstance(item, str) else ("", "", "")
        shown.append(HIDDEN if is_hidden else f"{name}={HIDDEN}" if equals and is_secret(name) else item)
        is_hidden = name.startswith("-") and not equals and is_secret(name)
    return shown
