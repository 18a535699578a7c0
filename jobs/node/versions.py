"""What ran: the code, and the packages that matter for it."""

import platform
import socket
from importlib.metadata import PackageNotFoundError, version

from pipeline.telemetry.code_version import code_version

PACKAGES = ("torch", "torch-xla", "torch-neuronx", "neuronx-cc", "libneuronxla", "numpy", "pyarrow", "boto3")


def versions() -> dict[str, str]:
    """By name; packages that are not installed are left out."""
    found = {"trnpipe": code_version(), "python": platform.python_version(), "kernel": platform.release()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def host_name() -> str:
    return socket.gethostname()
