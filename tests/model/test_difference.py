"""How data differs from what a model reads."""

import pytest

from pipeline.model.config import difference_of


@pytest.mark.unit
@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (("a", "b"), ("a", "b", "price"), "missing: price"),
        (("a", "x"), ("a",), "new: x"),
        (("x", "y"), ("a", "b"), "missing: a, b; new: x, y"),
        ((), ("a",), "missing: a"),
        (("b", "a"), ("a", "b"), "b, a, there a, b"),
        ((8, 16), (8,), "8, 16, there 8"),
        ((), (8,), "none, there 8"),
        ("query: ", "", "'query: ', there ''"),
        (300, 400, "300, there 400"),
    ],
)
def test_names_are_told_as_missing_or_new(ours: object, theirs: object, expected: str) -> None:
    assert difference_of(ours, theirs) == expected
