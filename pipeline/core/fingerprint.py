"""Fingerprints: the same content and settings give the same name, on any machine and in any Python process."""

import json
from collections.abc import Mapping, Sequence

import xxhash

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]

_MASK63 = 2**63 - 1


def canonical_json(value: "Json") -> bytes:
    """One byte string per value: sorted keys, no spaces, UTF-8. Raises ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def fingerprint(value: "Json") -> str:
    """32 hex digits (xxh3_128) of the canonical JSON of `value`. Not a defence against a forger."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value))


def hash63(data: str | bytes) -> int:
    """A non-negative 63-bit hash (xxh3_64 without its top bit), so that it fits an int64."""
    return xxhash.xxh3_64_intdigest(data.encode() if isinstance(data, str) else data) & _MASK63
