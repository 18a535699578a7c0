"""A torch-neuronx that is not there, is that of PyTorch/XLA, or belongs to another torch: one clear line, exit 78."""

from pathlib import Path

import pytest
import torch

from pipeline import cli
from pipeline.backends.base import NATIVE_SINCE
from tests.native.standin import with_package

OURS = tuple(int(part) for part in torch.__version__.split(".")[:2])
OTHER = f"{NATIVE_SINCE[0]}.{max(OURS[1], NATIVE_SINCE[1]) + 1}.3.0"


@pytest.mark.parametrize(
    ("version", "backend"), [(OTHER, "neuron"), (OTHER, "auto"), ("2.9.0.2.13.26312", "neuron"), (None, "neuron")]
)
def test_a_package_that_does_not_fit_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    version: str | None,
    backend: str,
) -> None:
    with_package(tmp_path, version)
    monkeypatch.syspath_prepend(str(tmp_path / f"package-{version}"))
    assert cli.main(["compile", "--workspace", str(tmp_path / "workspace"), "--backend", backend]) == 78
    text = capsys.readouterr().err
    assert (
        f"torch {torch.__version__} does not match torch-neuronx ({version or 'not installed'})" in text
        and "Traceback" not in text
    )
