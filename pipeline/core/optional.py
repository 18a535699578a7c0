"""Optional packages, the commands that install them, and the error to raise if one of them is missing.

A module that uses an optional package imports it at the top. Callers catch the ImportError and convert it with
`missing_package`. Note that the commands install the package itself instead of an extra such as `trnpipe[tensorboard]`,
because trnpipe is not published on PyPI, where a package with this name would be someone else's.
"""

import shlex
from collections.abc import Mapping

from pipeline.core.errors import ConfigError, first_line

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "apprise": ("apprise>=1.9",),
    "cryptography": ("cryptography>=44",),
    "lightning": ("lightning>=2.6.6",),
    "mlflow": ("mlflow-skinny>=3",),
    "onnxruntime": ("onnx>=1.19", "onnxscript>=0.5", "onnxruntime>=1.22"),
    "openlineage": ("openlineage-python>=1.30",),
    "pyiceberg": ("pyiceberg>=0.9",),
    "sklearn": ("scikit-learn>=1.7",),
    "tensorboard": ("tensorboard>=2.18",),
    "transformers": ("transformers>=4.56,<6",),
    "torch_xla": ("torch-xla==2.9.0", "torch==2.9.1"),
}
"""Requirements by the name of the imported module. These must match the extras in pyproject.toml."""


def install_command(module: str) -> str:
    """Return the command that installs the packages required for `module`."""
    return f"pip install {' '.join(map(shlex.quote, REQUIREMENTS[module]))}"


def missing_package(module: str, feature: str, error: ImportError, *, otherwise: str = "") -> ConfigError:
    """Return the error for a feature that needs a missing package.

    `otherwise` is an alternative to installing the package, if any.
    """
    return ConfigError(
        f"{feature} needs {module}, which cannot be imported: {first_line(error)}",
        expected=" and ".join(REQUIREMENTS[module]),
        next_command=install_command(module) + (f", or {otherwise}" if otherwise else ""),
    )
