"""Private names of other packages: each in one file, and there in the version that is installed.

A package may drop them in any release. So whoever raises a version runs this first: it names each one that went, the
file that has it and what for. Files are parsed, not executed; a name counts that begins with one underscore and is
asked of anything but `self`, or that stands behind a private module in an import.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.backends.xla_process import needs_xla
from tests.kit import zygote

ROOT = Path(__file__).parents[1]
CONVENTIONS = frozenset({"_asdict", "_exit", "_fields", "_getframe", "_make"})
"""Public by their documentation: of namedtuple, of os and sys."""
OURS = frozenset({("pipeline/parallel/strategies/zero1.py", "_split")})


class Use(NamedTuple):
    """A private name, as it stands in the one file that has it."""

    file: str
    name: str
    purpose: str
    paths: tuple[str, ...] = ()
    """Where it is; the name itself for one that is imported. Several: what is set or read there. With `|`: one of
    them is enough."""


def of(file: str, purpose: str, *paths: str) -> Iterator[Use]:
    """Attributes, by the class or module that has them."""
    for path in paths:
        yield Use(file, path.rpartition(".")[2], purpose, (path,))


def either(file: str, purpose: str, public: str, before: str) -> Iterator[Use]:
    """One that is public in newer versions."""
    yield Use(file, before.rpartition(".")[2], purpose, (f"{public}|{before}",))


def imported(file: str, purpose: str, module: str, *names: str) -> Iterator[Use]:
    for name in names:
        yield Use(file, f"{module}.{name}", purpose)


XLA, NEURON = "pipeline/backends/xla.py", "pipeline/backends/neuron.py"
TRANSFORM = "pipeline/parallel/parallelize.py"
MODULES, LIGHTNING = "pipeline/parallel/strategies/fsdp.py", "pipeline/parallel/lightning.py"
MESH, TENSORS = "pipeline/parallel/mesh.py", "pipeline/parallel/tensors.py"
OPTIMIZER, UNPADDED = "pipeline/train/optimizer.py", "pipeline/embed/unpadded.py"
_XLAC = "torch_xla._XLAC"

USES = (
    *either(
        MESH,
        "the time-out of sub-groups",
        "torch.distributed.set_timeout",
        "torch.distributed.distributed_c10d._set_pg_timeout",
    ),
    Use(
        NEURON,
        "torch._dynamo.config",
        "the limit of recompiles, as an error",
        ("torch._dynamo.config.fail_on_recompile_limit_hit",),
    ),
    Use(
        "pipeline/backends/cpu.py",
        "torch._dynamo.config",
        "the number of programs of a function",
        tuple(f"torch._dynamo.config.{name}" for name in ("recompile_limit", "accumulated_recompile_limit")),
    ),
    *imported(NEURON, "how many graphs were compiled", "torch._dynamo.utils", "counters"),
    *of(TENSORS, "columns of fused products", "torch.distributed.tensor.parallel.ColwiseParallel._apply"),
    *of(TRANSFORM, "parameters from meta to a device, buffers as they are", "torch.nn.Module._apply"),
    *imported(
        TENSORS, "a rank's part of a tensor", "torch.distributed.tensor._utils", "compute_local_shape_and_global_offset"
    ),
    *of(TENSORS, "a number that is read from a DTensor", "torch.distributed.tensor.DTensor._op_dispatcher"),
    *of(TENSORS, "the same", "torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers"),
    *of(TENSORS, "the same", "torch.ops.aten._local_scalar_dense"),
    *of(MODULES, "slices in their place before the first step", "torch.distributed.fsdp.FSDPModule._get_fsdp_state"),
    *of(MODULES, "the same", "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._lazy_init"),
    *of(LIGHTNING, "the mesh, for a user's module", "lightning.pytorch.LightningModule._device_mesh"),
    *of(OPTIMIZER, "AdamW in one kernel", "torch._fused_adamw_"),
    *of(
        UNPADDED,
        "matrix products with weights laid out for oneDNN",
        "torch.ops.mkldnn._linear_pointwise",
        "torch.ops.mkldnn._reorder_linear_weight",
    ),
    *of("pipeline/backends/cpu.py", "is bf16 fast here", "torch.ops.mkldnn._is_mkldnn_bf16_supported"),
    *of(XLA, "what torch_xla shall not import", "torch._dynamo"),
    Use(XLA, "torch_xla._internal.pjrt", "replicas", ("torch_xla._internal.pjrt.initialize_multiprocess",)),
    *of(XLA, "what follows is of it", _XLAC),
    *of(XLA, "the text of a graph, and its name", f"{_XLAC}._get_xla_tensors_hlo", f"{_XLAC}._get_graph_hash"),
    *of(XLA, "tracing without running", f"{_XLAC}._replace_xla_tensor", f"{_XLAC}._xla_create_placeholder_tensor"),
    *of(XLA, "the order of all-reduces", f"{_XLAC}._set_all_reduce_token"),
    *of(XLA, "a loader that is left", "torch_xla.distributed.parallel_loader.MpDeviceLoader._parallel_loader"),
)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """As `Use.name` has them."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name) if is_private(name) and name not in CONVENTIONS:
                yield name
            case ast.Import():
                yield from (one.name for one in node.names if any(map(is_private, one.name.split("."))))
            case ast.ImportFrom(module=str(module)):
                names = [f"{module}.{one.name}" for one in node.names]
                yield from (name for name in names if any(map(is_private, name.split("."))))
            case ast.Constant(value=str(text)) if re.fullmatch(r"\w+(\.\w+)*\._\w+(\.\w+)*", text):
                yield text


def test_each_stands_in_one_file_and_has_its_purpose_here() -> None:
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for package in ("pipeline", "jobs", "trnpipe")
        for path in (ROOT / package).rglob("*.py")
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    } - OURS
    stated = {(use.file, use.name) for use in USES}
    assert sorted(found - stated) == [], "private names of another package: a public one instead, or a line in USES"
    assert sorted(stated - found) == [], "stated, and not used any more"
    whose = Counter(path for use in USES for path in use.paths or (use.name,))
    assert [path for path, files in whose.items() if files > 1] == [], "in two files"


def resolve(path: str) -> None:
    """Import as much of it as is a module, then look the rest up. Raises ImportError or AttributeError."""
    words = path.split(".")
    found: Any = importlib.import_module(words[0])
    for number, word in enumerate(words[1:], start=2):
        if inspect.ismodule(found) and not hasattr(found, word):
            importlib.import_module(".".join(words[:number]))
        if inspect.isclass(found) and not hasattr(found, word) and _sets(found, word):
            return
        found = getattr(found, word)


def _sets(whose: type, name: str) -> bool:
    """Whether its methods set the attribute; those of a class in C++ are seen without."""
    try:
        return re.search(rf"self\.{name}\b\s*[:=]", inspect.getsource(whose)) is not None
    except (OSError, TypeError):
        return False


def gone(uses: Iterable[Use]) -> list[str]:
    """One line for each that is not there: which, whose, where and what for."""
    lines = []
    for use in uses:
        for path in use.paths or (use.name,):
            errors = []
            for way in path.split("|"):
                try:
                    resolve(way)
                    break
                except (ImportError, AttributeError) as error:
                    errors.append(str(error))
            else:
                lines.append(f"{path} is gone, which {use.file} has for: {use.purpose} ({'; '.join(errors)})")
    return lines


def of_package(name: str) -> list[Use]:
    return [use for use in USES if (*use.paths, use.name)[0].split(".")[0] == name]


@pytest.mark.parametrize("package", ["torch", "lightning"])
def test_each_is_there(package: str) -> None:
    if package != "torch":
        pytest.importorskip(package)
    uses = of_package(package)
    assert uses and gone(uses) == []


@needs_xla
def test_each_of_torch_xla_is_there() -> None:
    assert of_package("torch_xla")
    done = zygote.run("tests.test_private_names")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_one_that_is_gone_is_told_with_its_file_and_purpose() -> None:
    (line,) = gone([Use("pipeline/some.py", "_sum", "adding up", ("torch.Tensor._sum_of_all",))])
    assert line.startswith("torch.Tensor._sum_of_all is gone, which pipeline/some.py has for: adding up")
    assert gone([Use("pipeline/some.py", "torch._nowhere.thing", "")]) != []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from torch._dynamo.utils import counters", "torch._dynamo.utils.counters"),
        ("from torch.distributed import _make", "torch.distributed._make"),
        ("import torch._dynamo", "torch._dynamo"),
        ("group._register_backend(device, kind, library)", "_register_backend"),
        ("super()._apply(module)", "_apply"),
        ("importlib.import_module('torch_xla._internal.pjrt')", "torch_xla._internal.pjrt"),
    ],
)
def test_a_private_name_is_found(code: str, name: str) -> None:
    assert name in set(private_names(ast.parse(code)))


def test_what_is_ours_or_public_is_not() -> None:
    code = "self._mine = os._exit(1); Row._fields; text = 'an _underscore in a text.'; from pipeline import __version__"
    assert not [*private_names(ast.parse(code))]


if __name__ == "__main__":  # in a process of its own: see tests/backends/xla_process.py
    print(*gone(of_package("torch_xla")), sep="\n")
