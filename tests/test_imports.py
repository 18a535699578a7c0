"""Imports run one way. Parsed, not executed, so that lazy imports inside functions count too."""

import ast
import sys
from collections.abc import Iterator, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the bottom up. A unit is a package or a module directly below `pipeline`; the settings of all packages, each in
# its config.py, are one unit. Imports go to a lower line, within the unit, or to the same line when that closes no
# circle.
LAYERS = (
    ("core",),
    ("io", "backends", "telemetry", "proc"),
    ("config",),
    ("data", "model", "parallel", "checkpoint"),
    ("settings",),
    ("context", "registry"),
    ("retrieval",),
    ("compile",),
    ("health",),
    ("embed",),
    ("evaluate",),
    ("mine", "inference"),
    ("convert",),
    ("teach",),
    ("train",),
    ("command_line",),
    ("stages",),
    ("commands",),
    ("cli", "__main__"),
)
JOBS_LAYERS = (
    ("schedule",),
    ("settings",),
    ("plan",),
    ("cycle", "node"),
    ("targets",),
    ("setup",),
    ("commands",),
    ("cli", "api"),
    ("__main__",),
)
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
JOBS_LEVEL = {unit: level for level, units in enumerate(JOBS_LAYERS) for unit in units}
CORE_MAY_IMPORT = {"numpy", "xxhash", "pydantic"}

# A third-party package and the only places (files, or folders ending in /) that may import it.
ONLY_IN = {
    "torch_xla": ("pipeline/backends/xla.py",),
    "lightning": ("pipeline/parallel/lightning.py",),
    "torch_neuronx": ("pipeline/backends/",),
    "mlflow": ("jobs/commands/mirror_mlflow.py",),
    "openlineage": ("jobs/commands/mirror_openlineage.py",),
    "pyiceberg": ("pipeline/data/iceberg.py",),
    "boto3": ("pipeline/io/", "jobs/targets/batch/"),
    "botocore": ("pipeline/io/", "jobs/targets/batch/", "jobs/targets/sagemaker/"),
    "s3transfer": ("pipeline/io/",),
    "torch": (
        "pipeline/backends/",
        "pipeline/checkpoint/",
        "pipeline/data/loader.py",  # turns memory-mapped rows into tensors; nothing else of data/ knows torch
        "pipeline/embed/",
        "pipeline/evaluate/",
        "pipeline/convert/",
        "pipeline/health/device.py",
        "pipeline/inference/",
        "pipeline/model/",
        "pipeline/parallel/",
        "pipeline/commands/doctor.py",
        "pipeline/commands/parity.py",
        "pipeline/retrieval/search.py",
        "pipeline/stages/",
        "pipeline/teach/",
        "pipeline/telemetry/console.py",
        "pipeline/train/",
    ),
}
TORCH_FREE_CONFIGS = ("parallel", "data", "model", "train", "compile", "embed", "health", "mine", "teach")


def imports_of(path: Path, package: list[str]) -> Iterator[str]:
    """Dotted names a file imports, relative ones resolved. `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def unit_of(words: Sequence[str]) -> str:
    """The unit of `pipeline.<package>.<module>`: that of the settings for config.py."""
    is_config = words[2:3] == ["config"]
    return "config" if is_config and words[0] == "pipeline" else words[1]


def problems(root: Path) -> list[str]:
    """Every import below `root` that breaks a rule, as `file: reason`."""
    found: list[str] = []
    edges: dict[str, set[str]] = {}
    for path in sorted(path for name in ("pipeline", "jobs", "trnpipe") for path in root.glob(f"{name}/**/*.py")):
        where = path.relative_to(root)
        unit = unit_of(where.with_suffix("").parts)
        for name in imports_of(path, list(where.parts[:-1])):
            words = name.split(".")
            if words[0] == "pipeline" and where.parts[0] == "pipeline" and unit != "__init__":
                target = unit_of(words) if len(words) > 1 and not words[1].startswith("__version") else unit
                edges.setdefault(unit, set()).add(target)
                found += [f"{where}: {unit} must not import {target}"] if not may_import(unit, target) else []
            if where.parts[0] == "jobs":
                found += [f"{where}: {reason}" for reason in jobs_problems(unit, words)]
            found += [f"{where}: {reason}" for reason in outside_problems(where, unit, words[0])]
    within = {unit: {t for t in targets if t != unit} for unit, targets in edges.items()}
    try:
        TopologicalSorter(within).prepare()
    except CycleError as error:
        found.append(f"circle: {' -> '.join(reversed(error.args[1]))}")
    return found


def may_import(unit: str, target: str) -> bool:
    known = unit in LEVEL and target in LEVEL
    return unit == target or (known and LEVEL[target] <= LEVEL[unit])


def jobs_problems(unit: str, words: list[str]) -> Iterator[str]:
    """Within `jobs` imports run down its layers; its plans know of `pipeline` the core alone."""
    target = words[1] if len(words) > 1 else ""
    if words[0] == "jobs" and target != unit and JOBS_LEVEL.get(target, 0) >= JOBS_LEVEL.get(unit, 99):
        yield f"{unit} must not import {target}"
    if unit == "plan" and words[0] == "pipeline" and target != "core":
        yield f"plan must not import pipeline.{target}"


def outside_problems(where: Path, unit: str, top: str) -> Iterator[str]:
    text = where.as_posix()
    if top == "jobs" and where.parts[0] == "pipeline":
        yield "pipeline must not import jobs"
    if top == "trnpipe" and where.parts[0] != "trnpipe":
        yield f"{where.parts[0]} must not import trnpipe, which is for users"
    if top in ONLY_IN and not any(
        text == place or (place.endswith("/") and text.startswith(place)) for place in ONLY_IN[top]
    ):
        yield f"{top} is only for {', '.join(ONLY_IN[top])}"
    if unit in ("core", "plan") and top not in {where.parts[0], "pipeline", *CORE_MAY_IMPORT, *sys.stdlib_module_names}:
        yield f"{unit} must not import {top}"


def test_imports_run_one_way() -> None:
    assert problems(ROOT) == []


def test_every_unit_has_a_layer() -> None:
    units = {
        path.name.removesuffix(".py") for path in (ROOT / "pipeline").iterdir() if path.suffix == ".py" or path.is_dir()
    }
    assert units - {"__init__", "__pycache__"} <= LEVEL.keys()


@pytest.mark.parametrize("package", TORCH_FREE_CONFIGS)
def test_config_modules_do_not_import_torch(package: str) -> None:
    """`trnpipe --help` builds the whole settings tree."""
    names = imports_of(ROOT / "pipeline" / package / "config.py", ["pipeline", package])
    assert not {name.split(".")[0] for name in names} & {"torch", "torch_xla", "transformers"}


@pytest.mark.parametrize(
    ("file", "code", "reason"),
    [
        ("pipeline/core/a.py", "from pipeline.io.storage import Storage", "core must not import io"),
        ("pipeline/core/a.py", "import torch", "torch is only for"),
        ("pipeline/core/a.py", "import pyarrow", "core must not import pyarrow"),
        ("pipeline/data/a.py", "def f():\n    import torch.nn as nn", "torch is only for"),
        ("pipeline/data/a.py", "from ..stages import train", "data must not import stages"),
        ("pipeline/data/a.py", "import pipeline.settings", "data must not import settings"),
        ("pipeline/data/a.py", "from pipeline import settings", "data must not import settings"),
        ("pipeline/model/a.py", "from pipeline.train.loop import x", "model must not import train"),
        ("pipeline/train/a.py", "if True:\n    import torch_xla.core.xla_model as xm", "torch_xla is only for"),
        ("pipeline/backends/cpu.py", "from torch_xla import device", "torch_xla is only for"),
        ("pipeline/stages/a.py", "from botocore.config import Config", "botocore is only for"),
        ("pipeline/stages/a.py", "from pipeline import cli", "stages must not import cli"),
        ("pipeline/stages/a.py", "from pipeline.commands import cache", "stages must not import commands"),
        ("pipeline/commands/a.py", "from pipeline import cli", "commands must not import cli"),
        ("pipeline/commands/a.py", "import torch", "torch is only for"),
        ("pipeline/stages/a.py", "from jobs import plan", "pipeline must not import jobs"),
        ("pipeline/novel/a.py", "from pipeline.core import errors", "novel must not import core"),
        ("jobs/plan/a.py", "from jobs.commands import submit", "plan must not import commands"),
        ("jobs/plan/a.py", "from pipeline.io import storage", "plan must not import pipeline.io"),
        ("jobs/plan/a.py", "import pyarrow", "plan must not import pyarrow"),
        ("jobs/commands/a.py", "import trnpipe", "jobs must not import trnpipe"),
        ("trnpipe/a.py", "import torch", "torch is only for"),
        ("jobs/commands/a.py", "from jobs import cli", "commands must not import cli"),
        ("jobs/a.py", "import boto3", "boto3 is only for"),
        ("jobs/a.py", "import torch", "torch is only for"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, code: str, reason: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert any(reason in problem for problem in problems(tmp_path)), problems(tmp_path)


def test_a_circle_within_a_layer_is_found(tmp_path: Path) -> None:
    for unit, other in (("data", "model"), ("model", "data")):
        (tmp_path / "pipeline" / unit).mkdir(parents=True)
        (tmp_path / "pipeline" / unit / "a.py").write_text(f"from pipeline.{other} import a")
    assert [problem.partition(":")[0] for problem in problems(tmp_path)] == ["circle"]


def test_right_imports_are_not_found(tmp_path: Path) -> None:
    good = {
        "pipeline/core/a.py": "import json, numpy\nfrom pipeline.core import b\nfrom . import b",
        "pipeline/io/s3.py": "import boto3\nfrom pipeline.core.errors import DataError",
        "pipeline/backends/xla.py": "import torch, torch_xla",
        "pipeline/stages/train.py": "import pipeline\nfrom pipeline import __version__\nfrom pipeline.io import x",
        "jobs/setup.py": "from pipeline.stages import result",
    }
    for name, code in good.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code)
    assert problems(tmp_path) == []
