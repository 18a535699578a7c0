"""Versions of what must be equal on all nodes, as far as they are found here."""

import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path

from pipeline.core.health import CheckResult, Verdict
from pipeline.health.check import Check, CheckContext

VERSIONS = "versions"
DRIVER = "driver"
DISTRIBUTIONS: Mapping[str, str] = {
    "compiler": "neuronx-cc",
    "torch": "torch",
    "torch-xla": "torch-xla",
    "torch-neuronx": "torch-neuronx",
    "libneuronxla": "libneuronxla",
}
DRIVER_FILE = Path("/sys/module/neuron/version")
NEURON_LIBRARIES = Path("/opt/aws/neuron/lib")
# Links of the packages aws-neuronx-runtime-lib and aws-neuronx-collectives lead to files named by their versions.
LIBRARIES: Mapping[str, str] = {"runtime": "libnrt.so", "collectives": "libnccom.so"}


def installed(distribution: str) -> str | None:
    """The version of a Python distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def find_versions(
    *,
    version_of: Callable[[str], str | None] = installed,
    driver_file: Path = DRIVER_FILE,
    libraries: Path = NEURON_LIBRARIES,
) -> dict[str, str]:
    """Version by part; what is not there is left out."""
    found = {part: version for part, name in DISTRIBUTIONS.items() if (version := version_of(name))}
    for part, name in LIBRARIES.items():
        files = {path.resolve().name for path in libraries.glob(f"{name}.*")}
        if files:
            found[part] = ", ".join(sorted(file.removeprefix(f"{name}.") for file in files))
    if driver_file.is_file():
        found[DRIVER] = driver_file.read_text().strip()
    return found


def versions_check(more: Mapping[str, str], find: Callable[[], Mapping[str, str]] = find_versions) -> Check:
    """Reports versions, and `more` that must be equal (code version, settings hash); gang.py compares."""

    def run(ctx: CheckContext) -> CheckResult:
        ctx.doing = "looking for installed versions"
        return CheckResult(VERSIONS, Verdict.PASS, figures={**find(), **more})

    return Check(VERSIONS, run, cost_s=0.1)
