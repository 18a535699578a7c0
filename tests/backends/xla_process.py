"""Test files that need a process of their own.

Autograd counts its devices at the first backward pass of a process, so XLA must be there before any other test's.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.kit import zygote

FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
WITH_EMITTERS = f"{FAST_COMPILE} --xla_cpu_use_fusion_emitters=true"
"""As XLA comes. Without the emitters, as we run it, two graphs that differ may round a sum differently."""
needs_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed")
FUNCTIONALIZATION = {"with-functionalization": "0", "as-on-neuron": "1"}
"""XLA_DISABLE_FUNCTIONALIZATION: 0 as torch_xla has it, 1 as torch-neuronx sets it (Neuron documentation, "PyTorch
NeuronX Environment Variables"). Views and updates in place are traced in another way.
"""


def run_cases(file: Path, mode: str, *arguments: str, flags: str = FAST_COMPILE, **env: str) -> None:
    """Run the tests in `file` in one process, in one of the modes."""
    words = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(file), *arguments)
    done = zygote.run(
        "pytest",
        *words,
        env={
            "PJRT_DEVICE": "CPU",
            "XLA_FLAGS": flags,
            "OMP_NUM_THREADS": "1",
            "XLA_DISABLE_FUNCTIONALIZATION": FUNCTIONALIZATION[mode],
            **env,
        },
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
