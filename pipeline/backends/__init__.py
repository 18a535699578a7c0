"""The only seam to a device: one file each, chosen by name."""

import importlib.util

from pipeline.backends.base import Backend, Batch, HostGather, HostMean
from pipeline.core.errors import ConfigError

__all__ = ["NAMES", "Backend", "Batch", "HostGather", "HostMean", "open_backend", "process_group"]
NAMES = ("auto", "xla", "cpu", "cuda")
TRACED = "traced"
"""The name of the backend that traces as on Neuron and runs nothing; for tools, no setting."""


def process_group(name: str) -> str | None:
    """The torch.distributed backend that ranks on such devices need beside gloo; told without opening a device."""
    return "cuda:nccl" if _resolved(name) == "cuda" else None


def open_backend(name: str, *, local_rank: int = 0, local_world_size: int = 1, world_size: int = 1) -> Backend:
    """The device of this rank. `auto`: cuda where there is one, else xla where it is installed, else cpu.

    With several ranks their process group must be up before (parallel/gang.py).
    """
    name = _resolved(name)
    if name == "xla":
        from pipeline.backends.xla import XlaBackend

        return XlaBackend(local_rank, local_world_size, world_size)
    if name == TRACED:
        from pipeline.backends.xla_tracer import XlaTracer

        return XlaTracer()
    if name == "cuda":
        from pipeline.backends.cuda import CudaBackend

        return CudaBackend(local_rank)
    if name == "cpu":
        from pipeline.backends.cpu import CpuBackend

        return CpuBackend()
    raise ConfigError(f"backend {name!r}", expected=f"one of {', '.join(NAMES)}")


def _resolved(name: str) -> str:
    if name != "auto":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "xla" if importlib.util.find_spec("torch_xla") else "cpu"
