"""The check that every image is put through while it is built, here put through on the environment of the tests."""

import importlib.metadata
import runpy
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pipeline
from pipeline.telemetry.events import code_version
from tests.backends.xla_process import needs_xla
from tests.docker.test_dockerfiles import DOCKERFILES, ROOT
from tests.docker.test_locks import pins

COMMANDS = Path(sys.executable).parent
VERIFY = str(ROOT / "docker" / "verify.py")
BASE: dict[str, dict[str, str]] = {
    "cpu": {"torch": ""},
    "cuda": {"torch": "2.11.0"},
    "neuron": {"torch": "", "torch-xla": "", "scipy": "", "torch-neuronx": "2.9.0.2.13", "neuronx-cc": "2.24.8799.0"},
    "neuron-native": {"torch": "2.14.0", "scipy": "", "torch-neuronx": "2.14.3.0", "neuronx-cc": "2.28.7631"},
}
"""What an image has beside its lock, by image, with what that requires; versions where this environment has others."""


def with_requirements(names: Iterable[str]) -> set[str]:
    """Return the packages and all that they require, as far as they are installed here."""
    found, left = set[str](), [*names]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            package = installed(name)
            wanted = map(Requirement, (package and package.requires) or ())
            left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def installed(name: str) -> importlib.metadata.Distribution | None:
    """Return a package of this environment, not what a build has left in the checkout."""
    return next(iter(importlib.metadata.distributions(name=name, path=[sysconfig.get_path("purelib")])), None)


def site_of(folder: Path, packages: Mapping[str, str]) -> Path:
    """Return a folder that holds these packages, by version, and of ours; '': the version that is installed here.

    A package that is not installed here has its metadata alone.
    """
    folder.mkdir()
    for name, version in packages.items():
        found = installed(name)
        for top in {path.parts[0] for path in (found and found.files) or ()} - {"..", "__pycache__"}:
            if found and not (folder / top).exists() and not (version and top.endswith(".dist-info")):
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
        if version:
            metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for name in ("pipeline", "jobs", "trnpipe"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@needs_xla
@pytest.mark.stage
@pytest.mark.parametrize("image", [path.stem for path in DOCKERFILES])
def test_verify_passes_with_the_packages_of_an_image(image: str, tmp_path: Path) -> None:
    """What the lock and the base image hold, and nothing else of this environment. Both stay as they are here:
    torch 2.9, and the Python version.
    """
    locked = dict.fromkeys(pins(ROOT / "docker" / f"{image}.lock"), "")
    base = dict.fromkeys(with_requirements(BASE[image]), "") | BASE[image]
    site = site_of(tmp_path / "site", locked | base | {"trnpipe": ""})
    env = {"PATH": f"{COMMANDS}:/usr/bin:/bin", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    words, _ = runpy.run_path(str(ROOT / "docker" / "try_lock.py"))["verify_words"](image)
    # No `site` and so none of this environment's packages.
    right = subprocess.run(
        [sys.executable, "-S", "-P", VERIFY, *words], env=env, cwd="/", capture_output=True, text=True, check=False
    )
    assert (right.returncode, right.stderr) == (0, "")
    assert "verify: 0 problems" in right.stdout


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
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("import absent_package", ""),
        ("from absent_package.part import name", ""),
        ("raise ImportError('cannot import name', name='absent_package.part')", ""),  # an older one of the base image
        ("import another_package", "No module named 'another_package'"),
        ("raise ImportError('a library', name=None)", "a library"),
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
    ],
)
def test_only_what_is_optional_is_forgiven(
    line: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verified_module.py").write_text(line)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verified_module", raising=False)
    found = [*runpy.run_path(VERIFY)["not_importable"](["verified_module"], {"absent_package"})]
    assert found == ([f"verified_module cannot be imported: {problem}"] if problem else [])


@pytest.mark.unit
def test_an_image_knows_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel leaves no .git beside the package."""
    monkeypatch.setenv("TRN_REVISION", "0123456789ab")
    assert "0123456789ab" not in code_version.__wrapped__()
    monkeypatch.setattr(pipeline, "__file__", str(tmp_path / "pipeline" / "__init__.py"))
    assert code_version.__wrapped__() == "0.1.0+0123456789ab"
