"""Packages that only one feature needs: what to install, and the error for one that is missing.

Importing the one module that uses such a package raises ImportError. The caller that was asked for the feature turns it
into the error of `missing_package`. Commands name the package, not an extra of trnpipe: this project is on no package
index, so whatever is found there under its name is a stranger's.
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
"""By the name of the module that is imported, as the extras of pyproject.toml have them."""


def install_command(module: str) -> str:
    """Return the command that installs what `module` is imported from."""
    return f"pip install {' '.join(map(shlex.quote, REQUIREMENTS[module]))}"


def missing_package(module: str, feature: str, error: ImportError, *, otherwise: str = "") -> ConfigError:
    """Return the error for `feature`, whose package cannot be imported. `otherwise`: what helps without it."""
    return ConfigError(
        f"{feature} needs {module}, which cannot be imported: {first_line(error)}",
        expected=" and ".join(REQUIREMENTS[module]),
        next_command=install_command(module) + (f", or {otherwise}" if otherwise else ""),
    )
