"""A torch-neuronx that is not there, is that of PyTorch/XLA, or belongs to another torch: one clear line, exit 78."""

import sys
from pathlib import Path

import pytest
import torch

from pipeline.backends.base import NATIVE_SINCE
from tests.native.standin import ROOT, run, with_package

OURS = tuple(int(part) for part in torch.__version__.split(".")[:2])


def refused(folder: Path, version: str | None, *flags: str) -> str:
    env = with_package(folder, version) | {"PYTHONPATH": f"{folder / f'package-{version}'}:{ROOT}"}
    command = [sys.executable, "-m", "pipeline", "compile", "--workspace", str(folder / "workspace"), *flags]
    return run(command, env, code=78)


@pytest.mark.parametrize(("processes", "backend"), [("1", "neuron"), ("2", "neuron"), ("1", "auto")])
def test_the_package_of_another_torch_is_refused(tmp_path: Path, processes: str, backend: str) -> None:
    other = f"{NATIVE_SINCE[0]}.{max(OURS[1], NATIVE_SINCE[1]) + 1}.3.0"
    text = refused(tmp_path, other, "--launch.processes", processes, "--backend", backend)
    assert f"torch {torch.__version__} with torch-neuronx {other}" in text
    assert f"expected: torch-neuronx {OURS[0]}.{OURS[1]}" in text
    assert "Traceback" not in text


def test_the_package_of_pytorch_xla_is_refused(tmp_path: Path) -> None:
    text = refused(tmp_path, "2.9.0.2.13.26312")
    assert "torch-neuronx 2.9.0.2.13.26312 is that of PyTorch/XLA" in text
    assert "--backend xla" in text


def test_no_package_is_refused(tmp_path: Path) -> None:
    assert "torch-neuronx is not installed" in refused(tmp_path, None)
