"""Detection and masking of secrets. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_WORDS = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "KEY", "APIKEY"})
HIDDEN = "***"
_USER_OF_URI = re.compile(r"(?<=://)[^/@\s\"']+@")


def is_secret(name: str) -> bool:
    """Return whether a word of a name denotes a secret: in `HF_TOKEN`, but not in `MAX_TOKENS`."""
    return not SECRET_WORDS.isdisjoint(re.split(r"[^A-Z0-9]+", name.upper()))


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of secret environment variables, to mask them in the output of commands."""
    return tuple(value for name, value in env.items() if is_secret(name) and len(value) >= 8)


def without_secret(name: str, value: Any) -> Any:
    """Return the value of a setting, given its dotted name, with secrets masked."""
    last = name.rpartition(".")[2]
    return without_secrets({last: value}, ())[last]


def without_secrets(value: Any, secrets: Sequence[str]) -> Any:
    """Mask these secrets, passwords in URIs, and values under the name of a secret."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(str(key)) else without_secrets(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(item, secrets) for item in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return _USER_OF_URI.sub(f"{HIDDEN}@", value)
    return value
