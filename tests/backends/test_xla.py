"""XLA:CPU, alone and as one of two replicas, each way of tracing in processes of its own."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pipeline.backends.xla import KNOWN_VERSION
from tests.backends.xla_process import FUNCTIONALIZATION, WITH_EMITTERS, needs_xla, run_cases

HERE = Path(__file__).parent
pytestmark = [pytest.mark.stage, needs_xla]


def test_xla_cases() -> None:
    run_cases(HERE / "xla_cases.py", "with-functionalization")


def test_values_as_on_neuron() -> None:
    run_cases(HERE / "xla_cases.py", "as-on-neuron", "-k", "eager")


@pytest.mark.thorough
@pytest.mark.parametrize("mode", FUNCTIONALIZATION)
def test_all_xla_cases(mode: str) -> None:
    run_cases(HERE / "xla_cases.py", mode, "-m", "thorough or not thorough", flags=WITH_EMITTERS)


def test_two_replicas() -> None:
    run_cases(HERE / "replica_cases.py", "as-on-neuron", CPU_NUM_DEVICES="2")


@pytest.mark.thorough
@pytest.mark.parametrize("mode", FUNCTIONALIZATION)
def test_all_replica_cases(mode: str) -> None:
    run_cases(HERE / "replica_cases.py", mode, "-m", "thorough or not thorough", CPU_NUM_DEVICES="2")


IMPORTED = """
import json, sys
import torch
from pipeline.backends import xla
{before}
recurrent = torch.nn.GRU
backend = xla.XlaBackend()
values = torch.ones(2, 2, device=backend.device)
(sums,) = backend.to_host([values @ values])
heavy = ("torch._dynamo", "torch._inductor", "sympy", "functorch", "torch_xla.stablehlo", "torch_xla.experimental.scan")
print(json.dumps([sums.tolist(), recurrent is torch.nn.GRU, [name for name in heavy if name in sys.modules]]))
import torch._dynamo
assert torch._dynamo.config.automatic_dynamic_shapes is not None
"""


def imported(before: str) -> tuple[bool, list[str]]:
    """Return whether GRU is that of PyTorch, and the heavy modules that a process on XLA:CPU has imported."""
    code, env = IMPORTED.format(before=before), {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    sums, is_own, modules = json.loads(done.stdout)
    assert sums == [[2.0, 2.0], [2.0, 2.0]]
    return is_own, modules


def test_torch_xla_is_imported_without_what_nobody_uses() -> None:
    assert version("torch_xla") == KNOWN_VERSION, "see what this version imports, and change _import_torch_xla"
    assert imported("") == (True, [])
    is_own, modules = imported("xla.KNOWN_VERSION = 'another'")
    assert not is_own and "torch._inductor" in modules and "torch_xla.stablehlo" in modules
