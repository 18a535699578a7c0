"""Fingerprints that are equal for equal values, on any machine and in any Python process."""

import json
from collections.abc import Mapping, Sequence

import xxhash

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

_MASK63 = 2**63 - 1


def canonical_json(value: "Json") -> bytes:
    """Return JSON with sorted keys and without spaces, in UTF-8. Raises ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fingerprint(value: "Json") -> str:
    """Return 32 hex digits (xxh3_128, not cryptographic) of the canonical JSON of `value`."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value))


def hash63(data: str | bytes) -> int:
    """Return a non-negative 63-bit hash (xxh3_64 without its top bit), which fits an int64."""
    return xxhash.xxh3_64_intdigest(data.encode() if isinstance(data, str) else data) & _MASK63
