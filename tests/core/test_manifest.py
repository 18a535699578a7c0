"""Manifest: what is written is read, and any change is noticed."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue, ValidationError

from pipeline.core.errors import DataError
from pipeline.core.manifest import FileRecord, Manifest

RECORD = FileRecord(size_bytes=3, xxh3_128="0" * 32)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def manifest(**fields: JsonValue) -> Manifest:
    return Manifest(kind="tokens", created_by="trnpipe 0", fields=fields, files={"a/b.bin": RECORD})


@given(fields=st.dictionaries(st.text(), JSON, max_size=4))
def test_round_trip(fields: dict[str, JsonValue]) -> None:
    made = Manifest(kind="k", created_by="c", fields=fields, files={"a": RECORD})
    read = Manifest.from_json(made.to_json())
    assert read == made
    assert read.digest == made.digest
    assert read.to_json() == made.to_json()


def test_the_digest_does_not_depend_on_order() -> None:
    left = Manifest(kind="k", created_by="c", fields={"a": 1, "b": 2}, files={"x": RECORD, "y": RECORD})
    right = Manifest(kind="k", created_by="c", fields={"b": 2, "a": 1}, files={"y": RECORD, "x": RECORD})
    assert left.digest == right.digest
    assert left.size_bytes == 6


@given(data=st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    good = manifest(rows=12, name="x")
    stored = bytearray(good.to_json())
    position = data.draw(st.integers(0, len(stored) - 1))
    stored[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = Manifest.from_json(bytes(stored))
    except DataError:
        return
    # White space between tokens is the only thing that may change unnoticed.
    assert read == good


@pytest.mark.parametrize("text", [b"[]", b"{}", b"null", b'{"digest": null}', b"\xff\xfe", b'{"kind": NaN}'])
def test_other_json_is_a_data_error(text: bytes) -> None:
    with pytest.raises(DataError):
        Manifest.from_json(text)


@pytest.mark.parametrize("digest", [None, "", "0" * 64])
def test_a_manifest_needs_its_own_digest(digest: str | None) -> None:
    body = json.loads(manifest().to_json())
    without = {name: value for name, value in body.items() if name != "digest"}
    for altered in (without, {**body, "digest": digest}):
        with pytest.raises(DataError):
            Manifest.from_json(json.dumps(altered).encode())


def test_a_later_schema_is_told_apart_from_damage() -> None:
    body = {**json.loads(manifest().to_json()), "schema_version": 2}
    with pytest.raises(DataError, match="schema 2"):
        Manifest.from_json(json.dumps(body).encode())


@pytest.mark.parametrize("name", ["../up", "/abs", "a//b", "", ".", "a/./b", "MANIFEST.json", "a\\b", "a\0"])
def test_names_cannot_lead_out_of_the_folder(name: str) -> None:
    with pytest.raises(ValidationError):
        Manifest(kind="k", created_by="c", fields={}, files={name: RECORD})


def test_a_non_finite_field_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        manifest(loss=math.nan).to_json()
