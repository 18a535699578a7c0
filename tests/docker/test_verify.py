"""The check that every image is put through while it is built, here put through on the environment of the tests."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline
from pipeline.telemetry.events import code_version
from tests.backends.xla_process import needs_xla
from tests.docker.dockerfile import ROOT

COMMANDS = Path(sys.executable).parent
VERIFY = str(ROOT / "docker" / "verify.py")


@needs_xla
@pytest.mark.stage
def test_what_is_right_passes() -> None:
    """Outside of the checkout: what is imported must be what is installed."""
    env = {"PATH": f"{COMMANDS}:/usr/bin:/bin", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
    words = ("--expect", "torch==2.9.*", "--expect", "torch-xla==2.9.0", "--load", "torch_xla")
    right = subprocess.run(
        [sys.executable, "-P", VERIFY, *words], env=env, cwd="/", capture_output=True, text=True, check=False
    )
    assert (right.returncode, right.stderr) == (0, "")
    assert "0 problems" in right.stdout


@needs_xla
def test_what_is_wrong_is_all_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of our own modules only the small package: the others are imported above, for ten seconds."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(sys, "argv", [
        VERIFY, "--expect", "torch==2.8.*", "--expect", "neuronx-cc==2.24.*", "--outside", "numpy",
        "--without", "torch-xla", "--load", "torch_neuronx",
    ])  # fmt: skip
    own = runpy.run_path(VERIFY)
    monkeypatch.setitem(own["main"].__globals__, "PACKAGES", ("trnpipe",))
    assert own["main"]() == 1
    told = capsys.readouterr().err
    for part in (
        "torch 2.9.1", "expected torch==2.8.*", "neuronx-cc is missing", "numpy lies in", "torch-xla 2.9.0 is there",
        "torch_neuronx cannot be imported", "the command trnjobs-entry is not on PATH",
    ):  # fmt: skip
        assert part in told


@pytest.mark.unit
def test_an_image_knows_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel leaves no .git beside the package."""
    monkeypatch.setenv("TRN_REVISION", "0123456789ab")
    assert re.fullmatch(r"0\.1\.0\+\w+(-dirty)?", in_checkout := code_version.__wrapped__())
    assert "0123456789ab" not in in_checkout
    monkeypatch.setattr(pipeline, "__file__", str(tmp_path / "pipeline" / "__init__.py"))
    assert code_version.__wrapped__() == "0.1.0+0123456789ab"
    monkeypatch.delenv("TRN_REVISION")
    assert code_version.__wrapped__() == "0.1.0"
