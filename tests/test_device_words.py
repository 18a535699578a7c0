"""Every question about a device is answered by `pipeline/backends`: no other file asks for one by name.

Parsed, not executed. A word counts where it stands alone in a string (`"xla"`, `"xla:CPU"`, `"cuda:nccl"`), not within
a sentence; `cpu` only where something is compared with it or looked up by it: tensors go to the host by that name.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORDS = frozenset({"xla", "cuda", "neuron", "nccl", "pjrt", "pjrt_device"})
ATTRIBUTES = frozenset({"cuda", "is_cuda", "is_xla", "mps", "xpu"})
DEVICE_MODULES = frozenset({"cpu", "cuda", "xla"})
"""Of pipeline.backends: whoever imports one asks for that device."""

# (file, word) -> what it names there, which is no device of torch.
ALLOWED = {
    ("jobs/node/post_mortem.py", "neuron"): "how environment variables begin",
    ("jobs/node/post_mortem.py", "xla"): "how environment variables begin",
    ("jobs/node/post_mortem.py", "pjrt"): "how environment variables begin",
    ("pipeline/compile/config.py", "neuron"): "a choice of the setting compile.tool",
    ("pipeline/compile/neuron.py", "neuron"): "a choice of the setting compile.tool",
}


def word_of(text: str) -> str:
    """The word that stands alone in a string, up to a colon or comma; empty when none does."""
    found = re.fullmatch(r"([A-Za-z_]+)([:,]\S*)?", text.strip())
    return found[1].casefold() if found else ""


def questions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines and words with which a file asks for a device."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if word_of(text) in WORDS:
                yield node.lineno, word_of(text)
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                yield node.lineno, name
            case ast.Compare() | ast.MatchValue() | ast.Subscript():
                parts = node.slice if isinstance(node, ast.Subscript) else node
                yield from ((node.lineno, "cpu") for one in ast.walk(parts) if _is_cpu(one))
            case ast.Dict():
                yield from ((node.lineno, "cpu") for key in node.keys if _is_cpu(key))
            case ast.ImportFrom(module=str(module)):
                names = [f"{module}.{alias.name}" for alias in node.names]
                yield from ((node.lineno, name) for name in {module, *names} if _is_device_module(name))
            case ast.Import():
                yield from ((node.lineno, one.name) for one in node.names if _is_device_module(one.name))


def _is_cpu(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and word_of(node.value) == "cpu"


def _is_device_module(name: str) -> bool:
    words = name.split(".")
    return words[:2] == ["pipeline", "backends"] and words[2:3] != [] and words[2] in DEVICE_MODULES


def files() -> Iterator[Path]:
    for package in ("pipeline", "jobs", "trnpipe"):
        yield from sorted((ROOT / package).rglob("*.py"))


def test_nobody_else_asks_for_a_device_by_name() -> None:
    problems, met = [], set()
    for path in files():
        where = path.relative_to(ROOT).as_posix()
        if where.startswith("pipeline/backends/"):
            continue
        for line, word in questions(ast.parse(path.read_text(encoding="utf-8"))):
            met.add((where, word))
            if (where, word) not in ALLOWED:
                problems.append(f"{where}:{line}: {word}: ask pipeline.backends, or the open Backend")
    assert problems == []
    assert met >= ALLOWED.keys(), "allowed, and not needed any more"


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ('backend.name == "cuda"', "cuda"),
        ('name in ("auto", "xla")', "xla"),
        ('device == "xla:CPU"', "xla"),
        ('f"xla:{kind}"', "xla"),
        ('env.get("PJRT_DEVICE")', "pjrt_device"),
        ('kind == "NEURON"', "neuron"),
        ('dist.init_process_group("cpu:gloo,cuda:nccl") if kind == "cpu" else None', "cpu"),
        ('backend.device.type != "cpu"', "cpu"),
        ('{"cpu": 1024}', "cpu"),
        ('tokens["cpu"]', "cpu"),
        ("torch.cuda.synchronize()", "cuda"),
        ("tensor.is_cuda", "is_cuda"),
        ("from pipeline.backends.cpu import CpuBackend", "pipeline.backends.cpu"),
        ("from pipeline.backends import xla", "pipeline.backends.xla"),
        ("import pipeline.backends.cuda", "pipeline.backends.cuda"),
    ],
)
def test_a_question_is_found(code: str, word: str) -> None:
    assert word in {found for _, found in questions(ast.parse(code))}


@pytest.mark.parametrize(
    "code",
    [
        '"""cuda: fuse operations; xla, else cpu."""',
        'raise ConfigError("no CUDA device", next_command="--backend cpu")',
        'torch.device("cpu")',
        'tensor.to("cpu")',
        'torch.load(path, map_location="cpu")',
        "from pipeline.backends import Backend, open_backend",
        "from pipeline.backends.base import prefetched",
        "os.cpu_count()",
    ],
)
def test_what_is_no_question_is_not_found(code: str) -> None:
    assert not [*questions(ast.parse(code))]
