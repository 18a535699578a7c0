"""Nothing that was stored is read as pickle: a file must not be able to run code. Parsed, not executed."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for name in ("pipeline", "jobs", "trnpipe", "bench", "examples") for path in (ROOT / name).rglob("*.py")]
PICKLES = frozenset({"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})
READERS = frozenset({"read_pickle", "memmap_pickle", "unsafe_load", "full_load"})
ALLOWED = {
    ("pipeline/proc/pool.py", "pickle"): "between a parent and the children that it started",
    ("pipeline/parallel/lightning.py", "torch.load"): "True unless the caller of Lightning asks for False",
}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What in a file may unpickle what it reads."""
    names = {"numpy": "np", "torch": "torch"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=imported):
                names |= {one.asname or one.name: {"numpy": "np"}.get(one.name, one.name) for one in imported}
                yield from (one.name for one in imported if one.name.split(".")[0] in PICKLES)
            case ast.ImportFrom(module=str(module), names=imported):
                yield from (module for _ in imported if module.split(".")[0] in PICKLES)
                yield from (f"{module}.load" for one in imported if one.name == "load" and module in ("numpy", "torch"))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        options = {one.arg: ast.unparse(one.value) for one in node.keywords}
        of = names.get(ast.unparse(node.func.value), "")
        if of == "np" and options.get("allow_pickle", "False") != "False":
            yield f"np.{node.func.attr}"
        if of == "np" and node.func.attr == "load" and (len(node.args) > 2 or None in options):
            yield "np.load"  # the third argument by its place, or whatever a mapping holds
        if of == "torch" and node.func.attr == "load" and options.get("weights_only") != "True":
            yield "torch.load"
        if node.func.attr in READERS or (of == "yaml" and node.func.attr == "load"):
            yield node.func.attr
        if node.func.attr in ("read_array", "load_array") and options.get("allow_pickle", "False") != "False":
            yield node.func.attr


def test_no_file_reads_pickles() -> None:
    found = {(str(path.relative_to(ROOT)), what) for path in FILES for what in unsafe(ast.parse(path.read_text()))}
    assert len(FILES) > 200 and found == set(ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np\nnp.load(file, allow_pickle=True)",
        "import numpy\nnumpy.load(file, 'r', True)",
        "import numpy as np\nnp.load(file, allow_pickle=flag)",
        "import numpy as np\nnp.load(file, **options)",
        "import torch\ntorch.load(file)",
        "import torch\ntorch.load(file, weights_only=False)",
        "from torch import load",
        "import torch as t\nt.load(file, weights_only=flag)",
        "import pandas as pd\npd.read_pickle(file)",
        "from pickle import loads",
        "import joblib",
        "import yaml\nyaml.load(file, Loader=yaml.Loader)",
    ],
)
def test_ways_to_read_one_are_seen(text: str) -> None:
    assert list(unsafe(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "import numpy as np\nnp.load(file, mmap_mode='r')",
        "import numpy as np\nnp.load(file, allow_pickle=False)",
        "import torch\ntorch.load(file, map_location='cpu', weights_only=True)",
        "import json\njson.load(file)",
    ],
)
def test_others_are_not(text: str) -> None:
    assert not list(unsafe(ast.parse(text)))
