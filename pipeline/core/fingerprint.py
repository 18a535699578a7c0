"""Fingerprints of JSON values that are reproducible across machines and Python processes."""

import json
from collections.abc import Mapping, Sequence

import xxhash

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

_MASK63 = 2**63 - 1


def canonical_json(value: "Json") -> bytes:
    """Encode a value as UTF-8 JSON with sorted keys and no whitespace. Raises ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fingerprint(value: "Json") -> str:
    """Hash the canonical JSON of a value to 32 hex digits. The hash (xxh3_128) is not cryptographic."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value))


def hash63(data: str | bytes) -> int:
    """Hash data to a non-negative integer that fits into an int64 (xxh3_64 without the top bit)."""
    return xxhash.xxh3_64_intdigest(data.encode() if isinstance(data, str) else data) & _MASK63
