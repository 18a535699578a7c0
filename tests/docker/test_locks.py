"""The locks of the images say what requirements.lock says, and leave to a base image what is its own."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.docker.test_dockerfiles import ROOT

pytestmark = pytest.mark.unit

DOCKER = ROOT / "docker"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEURON_HAS = {"torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "protobuf", "setuptools"}
NEURON_HAS |= {"numpy", "scipy"}
NEURON_OLDER = {"pyarrow"}  # 26 refuses numpy 1.26, which AWS's image may hold


def pins(path: Path) -> dict[str, str]:
    """Version by name. Every entry must carry a hash."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        name, version = re.match(r"([^=\s]+)==(\S+)", entry).groups()  # type: ignore[union-attr]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), f"{path.name}: {name} has no hash"
        found[name] = version
    return found


@pytest.mark.parametrize("name", ["build", "cpu", "cuda", "neuron", "neuron-native"])
def test_versions_are_those_that_were_tested(name: str) -> None:
    tested = pins(ROOT / "requirements.lock")
    tested |= {"torch": "2.9.1", "triton": "3.5.1"}  # PyTorch's build is chosen by `make setup`
    locked = {package: version for package, version in pins(DOCKER / f"{name}.lock").items() if package[:6] != "nvidia"}
    cuda = {"torch", "triton", "setuptools", "cuda-bindings", "cuda-pathfinder", "cuda-toolkit"}
    other = {package for package, version in locked.items() if tested.get(package) != version}
    assert other == {"neuron": NEURON_OLDER, "cuda": cuda}.get(name, set())


@pytest.mark.parametrize("name", ["cpu", "cuda", "neuron", "neuron-native"])
def test_they_hold_what_the_package_needs(name: str) -> None:
    locked = pins(DOCKER / f"{name}.lock") | (pins(DOCKER / "torch-cpu.lock") if name == "cpu" else {})
    needs = [Requirement(text) for text in PROJECT["dependencies"]]
    assert Requirement("numpy>=1.26") in needs  # the Neuron images may hold an older one
    for needed in needs:
        if name.startswith("neuron") and needed.name in NEURON_HAS:
            assert needed.name not in locked
        else:
            assert needed.specifier.contains(locked[needed.name]), f"{needed} against {locked[needed.name]}"


def test_pytorch_is_the_same_everywhere_but_on_gpus() -> None:
    assert pins(DOCKER / "torch-cpu.lock") == {"torch": "2.9.1+cpu"}
    assert pins(DOCKER / "cuda.lock")["torch"] == "2.11.0"
    assert pins(DOCKER / "cpu.lock")["torch-xla"] == pins(ROOT / "requirements.lock")["torch-xla"] == "2.9.0"
    assert "torch-xla" not in pins(DOCKER / "cuda.lock")
    assert re.search(r"^TORCH +:= torch==2\.9\.1$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_lane_of_a_later_pytorch_differs_in_pytorch_alone() -> None:
    tested, locked = pins(ROOT / "requirements.lock"), pins(ROOT / "tests" / "native" / "requirements.lock")
    assert {name for name, version in locked.items() if tested.get(name) != version} == {"ninja"}  # builds the stand-in
    assert tested.keys() - locked.keys() == {"torch-xla"}
    assert "torch" not in locked
