"""What a result was measured with: kind of machine and versions. No host name, no path."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

from pipeline.telemetry.events import code_version

PACKAGES = ("torch", "torch_xla", "transformers", "accelerate", "numpy")


class Machine(BaseModel):
    """A machine in words that fit any of its kind."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu: str
    cores: int
    """Cores this process may use."""
    memory_gib: int
    os: str

    @property
    def text(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {self.memory_gib} GiB, {self.os}"


def this_machine() -> Machine:
    """Read from /proc and the platform."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        cpu=cpu_model(_read(Path("/proc/cpuinfo"))),
        cores=usable,
        memory_gib=round(psutil.virtual_memory().total / 2**30),
        os=os_name(_read(Path("/etc/os-release"))),
    )


def gpu_name() -> str:
    """Of the GPU that PyTorch would use, as its driver has it. Raises SystemExit without one."""
    import torch  # most results are read and written without it

    if not torch.cuda.is_available():
        raise SystemExit("no GPU is visible here")
    return str(torch.cuda.get_device_name())


def cpu_model(cpuinfo: str) -> str:
    """First model name, with the widest vector unit that decides how fast matrix products are."""
    fields = [line.partition(":") for line in cpuinfo.splitlines()]
    values = {name.strip(): value.strip() for name, _, value in reversed(fields)}
    name = values.get("model name") or platform.machine()
    flags = set(values.get("flags", "").split())
    widest = next((text for flag, text in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in flags), "")
    return " ".join([name, *([f"({widest})"] if widest else [])])


def os_name(os_release: str) -> str:
    """Distribution if known, and the kernel's name."""
    fields = [line.partition("=") for line in os_release.splitlines()]
    values = {name: value.strip('"') for name, _, value in fields}
    return values.get("PRETTY_NAME") or platform.system()


def versions() -> dict[str, str]:
    """Versions of what decides the speed, and the commit of trnpipe."""
    found = {"trnpipe": code_version(), "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
