"""The only seam to a device: one file each, chosen by name."""

import importlib.util

from pipeline.backends.base import Backend, Batch, HostMean
from pipeline.core.errors import ConfigError

__all__ = ["NAMES", "Backend", "Batch", "HostMean", "open_backend"]
NAMES = ("auto", "xla", "cpu", "cuda")
TRACED = "traced"
"""The name of the backend that traces as on Neuron and runs nothing; for tools, no setting."""


def open_backend(name: str, local_rank: int = 0) -> Backend:
    """The device of this rank. `auto`: cuda where there is one, else xla where it is installed, else cpu."""
    if name == "auto":
        name = _best()
    if name == "xla":
        from pipeline.backends.xla import XlaBackend

        return XlaBackend()
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


def _best() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "xla" if importlib.util.find_spec("torch_xla") else "cpu"
