"""A torch-neuronx that is not there, is that of PyTorch/XLA, or belongs to another torch: one clear line, exit 78."""

import sys
from pathlib import Path

import pytest
import torch

from pipeline import cli
from pipeline.backends.base import NATIVE_SINCE
from tests.native.standin import ROOT, run, with_package

OURS = tuple(int(part) for part in torch.__version__.split(".")[:2])
OTHER = f"{NATIVE_SINCE[0]}.{max(OURS[1], NATIVE_SINCE[1]) + 1}.3.0"


class Refusal:
    """`trnpipe compile` in this process, beside a torch-neuronx that is known by its metadata."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capsys = folder, monkeypatch, capsys

    def __call__(self, version: str | None, *, backend: str = "neuron") -> str:
        with_package(self.folder, version)
        self._monkeypatch.syspath_prepend(str(self.folder / f"package-{version}"))
        assert cli.main([*words(self.folder), "--backend", backend]) == 78
        return self._capsys.readouterr().err


def words(folder: Path) -> list[str]:
    return ["compile", "--workspace", str(folder / "workspace")]


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    return Refusal(tmp_path, monkeypatch, capsys)


def names_both_versions(text: str) -> None:
    assert f"torch {torch.__version__} with torch-neuronx {OTHER}" in text
    assert f"expected: torch-neuronx {OURS[0]}.{OURS[1]}" in text
    assert "Traceback" not in text


@pytest.mark.parametrize("backend", ["neuron", "auto"])
def test_the_package_of_another_torch_is_refused(refused: Refusal, backend: str) -> None:
    names_both_versions(refused(OTHER, backend=backend))


@pytest.mark.stage
@pytest.mark.thorough  # the same in one process, and how the exit codes of ranks become one: tests/parallel
def test_the_package_of_another_torch_is_refused_by_two_processes(tmp_path: Path) -> None:
    env = with_package(tmp_path, OTHER) | {"PYTHONPATH": f"{tmp_path / f'package-{OTHER}'}:{ROOT}"}
    command = [sys.executable, "-m", "pipeline", *words(tmp_path), "--launch.processes", "2", "--backend", "neuron"]
    names_both_versions(run(command, env, code=78))


def test_the_package_of_pytorch_xla_is_refused(refused: Refusal) -> None:
    text = refused("2.9.0.2.13.26312")
    assert "torch-neuronx 2.9.0.2.13.26312 is that of PyTorch/XLA" in text
    assert "--backend xla" in text


def test_no_package_is_refused(refused: Refusal) -> None:
    assert "torch-neuronx is not installed" in refused(None)
