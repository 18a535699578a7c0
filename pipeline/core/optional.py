"""Optional packages, with the command to install them and the error if one is missing.

Importing the module that uses such a package raises ImportError, which the caller of the feature translates with
`missing_package`. Commands install the package instead of an extra of trnpipe, because trnpipe is not on a package
index: a package with this name there would be a stranger's.
"""

import shlex
from collections.abc import Mapping

from pipeline.core.errors import ConfigError, first_line

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "apprise": ("apprise>=1.9",),
    "lightning": ("lightning>=2.6.6",),
    "sklearn": ("scikit-learn>=1.7",),
    "tensorboard": ("tensorboard>=2.18",),
    "torch_xla": ("torch-xla==2.9.0", "torch==2.9.1"),
}
"""Requirements by the name of the imported module, as in the extras of pyproject.toml."""


def install_command(module: str) -> str:
    """Return the command that installs the packages of `module`."""
    return f"pip install {' '.join(map(shlex.quote, REQUIREMENTS[module]))}"


def missing_package(module: str, feature: str, error: ImportError, *, otherwise: str = "") -> ConfigError:
    """Return the error for a feature whose package cannot be imported. `otherwise`: alternative to installing it."""
    return ConfigError(
        f"{feature} needs {module}, which cannot be imported: {first_line(error)}",
        expected=" and ".join(REQUIREMENTS[module]),
        next_command=install_command(module) + (f", or {otherwise}" if otherwise else ""),
    )
