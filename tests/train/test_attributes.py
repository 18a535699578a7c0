"""What an object of these packages has is decided where it is made: no method adds an attribute later."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PIPELINE = Path(__file__).parents[2] / "pipeline"
FILES = [
    path for package in ("embed", "evaluate", "mine", "train") for path in sorted((PIPELINE / package).rglob("*.py"))
]


def late_attributes(code: str) -> list[str]:
    """`Class.name` of each attribute of self that is set, and neither declared nor set on construction."""
    return [
        f"{node.name}.{name}"
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ClassDef)
        for name in sorted(set(_set_in(node, "later")) - set(_set_in(node, "first")))
    ]


def _set_in(node: ast.ClassDef, when: str) -> Iterator[str]:
    if when == "first":
        yield from (s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name))
    for method in node.body:
        if not isinstance(method, ast.FunctionDef):
            continue
        is_first = method.name in ("__init__", "__post_init__")
        for part in ast.walk(method) if is_first == (when == "first") else ():
            is_set = isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
            if is_set and ast.unparse(part).startswith("self.") and ast.unparse(part).count(".") == 1:
                yield ast.unparse(part).removeprefix("self.")


@pytest.mark.parametrize("path", FILES, ids=lambda path: "-".join(path.relative_to(PIPELINE).parts))
def test_no_attribute_is_added_after_construction(path: Path) -> None:
    assert late_attributes(path.read_text(encoding="utf-8")) == []


def test_one_that_is_added_later_is_found() -> None:
    first = "class A:\n    b: int\n    def __init__(self):\n        self.c = 1\n"
    assert late_attributes(first + "    def run(self):\n        self.b = self.c = 2\n") == []
    assert late_attributes(first + "    def run(self):\n        self.c, (self.d, e) = 2, (3, 4)\n") == ["A.d"]
