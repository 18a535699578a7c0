"""What looks like a secret, and values without it. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

SECRET_WORDS = frozenset({"TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS", "KEY", "APIKEY"})
HIDDEN = "***"
_USER_OF_URI = re.compile(r"(?<=://)[^/@\s\"']+@")


def is_secret(name: str) -> bool:
    """Return whether a name tells of a secret, word by word: `HF_TOKEN` does, `MAX_TOKENS` does not."""
    return not SECRET_WORDS.isdisjoint(re.split(r"[^A-Z0-9]+", name.upper()))


def secret_values(env: Mapping[str, str]) -> tuple[str, ...]:
    """Return values that must not show up anywhere: commands print more than they should."""
    return tuple(value for name, value in env.items() if is_secret(name) and len(value) >= 8)


def without_secret(name: str, value: Any) -> Any:
    """Return the value of a setting by its dotted name, with what looks like a secret hidden."""
    last = name.rpartition(".")[2]
    return without_secrets({last: value}, ())[last]


def without_secrets(value: Any, secrets: Sequence[str]) -> Any:
    """Return the value without these secrets, passwords in URIs, and values under the name of a secret."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if is_secret(str(name)) else without_secrets(one, secrets) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one, secrets) for one in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return _USER_OF_URI.sub(f"{HIDDEN}@", value)
    return value
