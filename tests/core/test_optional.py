"""Optional packages: their modules raise ModuleNotFoundError, the facade and the commands say what to install."""

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import trnpipe
from pipeline.core.errors import ConfigError
from pipeline.core.optional import REQUIREMENTS, install_command, missing_package

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
NOT_IMPORTED = {"neuronx-cc", "torch-neuronx", "usearch"}
"""Of the extras: beside the product or for examples, and AWS's own, which no command of pip gets from its index."""


def test_requirements_are_those_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stated = {text for name, texts in extras.items() if name != "dev" for text in texts}
    assert {text for texts in REQUIREMENTS.values() for text in texts} == {
        text for text in stated if Requirement(text).name not in NOT_IMPORTED
    }


def test_no_command_installs_a_stranger_of_our_name() -> None:
    """The project is on no package index: whoever registers its name there would be installed."""
    files = [path for name in ("pipeline", "jobs", "trnpipe", "docs") for path in (ROOT / name).rglob("*.*")]
    texts = {path: path.read_text() for path in [*files, ROOT / "README.md"] if path.suffix in (".py", ".md")}
    assert len(texts) > 100
    assert [path for path, text in texts.items() if re.search(r"pip install [^\n]*\btrnpipe\b", text)] == []


def test_the_error_names_feature_package_and_command() -> None:
    error = missing_package("sklearn", "the baseline", ModuleNotFoundError("No module named 'sklearn'"))
    assert error.exit_code == 78
    assert error.seen == "the baseline needs sklearn, which cannot be imported: No module named 'sklearn'"
    assert error.next_command == "pip install 'scikit-learn>=1.7'"
    assert install_command("torch_xla") == "pip install torch-xla==2.9.0 torch==2.9.1"


def test_lightning_is_asked_for_by_the_facade_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:  # other tests may have imported parts of it
        if name == "pipeline.parallel.lightning" or name.partition(".")[0] == "lightning":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    with pytest.raises(ModuleNotFoundError):
        import_module("pipeline.parallel.lightning")
    for name in ("Strategy", "Environment"):
        with pytest.raises(ConfigError, match=f"trnpipe.{name} needs lightning") as caught:
            getattr(trnpipe, name)
        assert caught.value.next_command == "pip install 'lightning>=2.6.6'"


def test_a_fault_of_ours_is_not_taken_for_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pipeline.parallel.parallelize", None)
    with pytest.raises(ModuleNotFoundError, match=r"pipeline\.parallel\.parallelize"):
        _ = trnpipe.transform


def test_a_backend_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.backends.xla import XlaBackend

    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(ConfigError, match="--backend xla needs torch_xla") as caught:
        XlaBackend()
    assert caught.value.next_command == "pip install torch-xla==2.9.0 torch==2.9.1, or --backend cpu"
