"""Versions of what must be equal on all nodes, as far as they are found here, and whether driver and runtime fit."""

import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pipeline.health.check import Check, CheckContext
from pipeline.health.verdict import CheckResult, Verdict

VERSIONS = "versions"
DRIVER, RUNTIME = "driver", "runtime"
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
LIBRARIES: Mapping[str, str] = {RUNTIME: "libnrt.so", "collectives": "libnccom.so"}
# "Neuron Driver 2.29 requires Neuron Runtime Library 2.33 or later", else nrt_init() fails: AWS Neuron release notes,
# runtime component, SDK 2.31.0.
NEW_DRIVER, LEAST_RUNTIME = (2, 29), (2, 33)
DRIVER_FIT = "driver and runtime"
_LOOK = f"cat {DRIVER_FILE}; ls {NEURON_LIBRARIES}"


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


def judge_driver(versions: Mapping[str, str]) -> CheckResult | None:
    """Can the runtime of the image work with the driver of the machine; None where there is no driver.

    The driver comes with the machine image, so every machine of it would say the same.
    """
    driver, runtime = versions.get(DRIVER), versions.get(RUNTIME)
    if driver is None:
        return None
    # Where several runtimes lie side by side the loader's choice is not known: only all of them together are wrong.
    numbers = [number for text in (runtime or "").split(", ") if (number := _release(text))]
    new, seen = _release(driver), f"driver {driver}, runtime {runtime or 'not found'}"
    expected = f"runtime {_text(LEAST_RUNTIME)} or later with driver {_text(NEW_DRIVER)} or later"
    if new is None or (new >= NEW_DRIVER and not numbers):
        return CheckResult(DRIVER_FIT, Verdict.WARN, f"{seen}: cannot be compared", expected, _LOOK)
    if new >= NEW_DRIVER and max(numbers) < LEAST_RUNTIME:
        return CheckResult(
            DRIVER_FIT,
            Verdict.FIX,
            f"{seen}: nrt_init fails",
            expected,
            f"a machine image with a driver before {_text(NEW_DRIVER)} (Terraform: ami_id), or a container image with "
            f"runtime {_text(LEAST_RUNTIME)}",
        )
    return CheckResult(DRIVER_FIT, Verdict.PASS, seen)


def versions_check(more: Mapping[str, str], find: Callable[[], Mapping[str, str]] = find_versions) -> Check:
    """Reports versions, and `more` that must be equal (code version, settings hash); gang.py compares.

    Run before anything that opens a device: with a driver that does not fit, that fails in less clear words.
    """

    def run(ctx: CheckContext) -> Iterator[CheckResult]:
        ctx.doing = "looking for installed versions"
        found = find()
        yield CheckResult(VERSIONS, Verdict.PASS, figures={**found, **more})
        if (fit := judge_driver(found)) is not None:
            yield fit

    return Check(VERSIONS, run, cost_s=0.1)


def _release(version: str) -> tuple[int, int] | None:
    """Major and minor number; None where it does not start with them."""
    match = re.match(r"(\d{1,6})\.(\d{1,6})(?!\d)", version)
    return (int(match[1]), int(match[2])) if match else None


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
