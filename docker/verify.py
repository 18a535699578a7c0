"""What an image is checked for while it is built, without a device: versions, whose packages they are, and imports.

    python docker/verify.py --expect torch==2.9.* --load torch_xla --outside numpy

Exit 1 stops the build, with every problem found.
"""

import argparse
import importlib
import os
import pkgutil
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

from packaging.requirements import Requirement

from pipeline.core.optional import REQUIREMENTS

PACKAGES = ("pipeline", "jobs", "trnpipe")
COMMANDS = ("trnpipe", "trnjobs", "trnjobs-entry")


def main(argv: Sequence[str] | None = None) -> int:
    """1 when something is wrong, 0 otherwise."""
    parser = argparse.ArgumentParser(description="Check an image while it is built.")
    parser.add_argument("--expect", action="append", default=[], help="a version that must be there: torch==2.9.*")
    parser.add_argument("--load", action="append", default=[], help="a module of others that must be importable")
    parser.add_argument("--outside", action="append", default=[], help="a package that must be the base image's own")
    parser.add_argument("--without", action="append", default=[], help="a package that this image does not have")
    words = parser.parse_args(argv)
    os.environ["PJRT_DEVICE"] = "CPU"  # before torch_xla is imported, which would look for a Neuron device
    problems = [
        *unmet([*words.expect, *core_requirements()]),
        *replaced(words.outside, Path(sys.prefix)),
        *[f"{name} {version(name)} is there, expected none" for name in words.without if version(name)],
        *not_importable([*our_modules(), *words.load], {*REQUIREMENTS} - {*words.load}),
        *[f"the command {name} is not on PATH" for name in COMMANDS if shutil.which(name) is None],
    ]
    for problem in problems:
        print(f"verify: {problem}", file=sys.stderr)
    print(f"verify: {len(problems)} problems; python {sys.version.split()[0]}, {versions(words.expect, words.outside)}")
    return 1 if problems else 0


def core_requirements() -> list[str]:
    """What our package says it needs, extras left out."""
    return [text for text in requires("trnpipe") or [] if "extra ==" not in text]


def unmet(requirements: Sequence[str]) -> Iterator[str]:
    """One line for each package that is missing or of another version."""
    for wanted in map(Requirement, requirements):
        found = version(wanted.name)
        if not found or not wanted.specifier.contains(found, prereleases=True):
            yield f"{wanted.name} {found or 'is missing'}, expected {wanted.name}{wanted.specifier}"


def replaced(names: Sequence[str], prefix: Path) -> Iterator[str]:
    """One line for each package that lies in our environment instead of the base image's."""
    for name in names:
        place = Path(str(distribution(name).locate_file(""))).resolve() if version(name) else None
        if place is None or place.is_relative_to(prefix.resolve()):
            yield f"{name} lies in {place or 'no folder'}, expected outside of {prefix}: the lock must leave it out"


def not_importable(names: Sequence[str], optional: set[str]) -> Iterator[str]:
    """Import every module; one line for each that fails for another reason than an optional package, missing or old."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in optional:
                yield f"{name} cannot be imported: {error}"
        except Exception as error:
            yield f"{name} cannot be imported: {type(error).__name__}: {error}"


def our_modules() -> Iterator[str]:
    """All but what starts a program when it is imported."""
    for package in PACKAGES:
        folders = importlib.import_module(package).__path__
        for found in pkgutil.walk_packages(folders, f"{package}."):
            if not found.name.endswith("__main__"):
                yield found.name


def version(name: str) -> str:
    """Of an installed distribution; empty: not installed."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return ""


def versions(expected: Sequence[str], outside: Sequence[str]) -> str:
    """For the log of the build."""
    names = dict.fromkeys([Requirement(text).name for text in expected] + list(outside))
    return ", ".join(f"{name} {version(name) or '-'}" for name in names)


if __name__ == "__main__":
    raise SystemExit(main())
