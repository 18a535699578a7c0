"""Names and words of the product: one class name means one class."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = sorted(path for package in ("pipeline", "jobs", "trnpipe") for path in (ROOT / package).rglob("*.py"))


def test_a_class_name_means_one_class() -> None:
    files = defaultdict(list)
    for path in PRODUCT:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in files.items() if len(where) > 1} == {}
