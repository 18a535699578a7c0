import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.fingerprint import Json, canonical_json, fingerprint, hash63

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.unit
@given(st.dictionaries(st.text(), VALUES, min_size=2, max_size=5))
def test_order_of_keys_does_not_matter(value: dict[str, Json]) -> None:
    backwards = dict(reversed(list(value.items())))
    assert fingerprint(value) == fingerprint(backwards)


@pytest.mark.unit
def test_every_part_matters() -> None:
    names = {fingerprint(value) for value in ({"a": 1}, {"a": "1"}, {"a": [1]}, {"b": 1}, {"a": True}, {"a": None})}
    assert len(names) == 6


@pytest.mark.unit
def test_nan_has_no_fingerprint() -> None:
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"x": float("nan")})


@pytest.mark.unit
def test_same_in_another_process() -> None:
    code = "from pipeline.core.fingerprint import *; print(fingerprint({'b': [1, 'ü'], 'a': 0.1}), hash63('straße'))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert seen == [fingerprint({"a": 0.1, "b": [1, "ü"]}), str(hash63("straße".encode()))]


@pytest.mark.unit
@given(st.binary())
def test_hash63_fits_int64(data: bytes) -> None:
    assert 0 <= hash63(data) < 2**63
