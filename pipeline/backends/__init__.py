"""A common interface to all devices.

Each backend is implemented in its own module and is selected by name. Note that importing this package doesn't import
torch.
"""

import importlib.util
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, get_args

from pipeline.backends.base import NATIVE_SINCE, Function, native_version, pjrt_device
from pipeline.backends.base import Backend as Backend
from pipeline.backends.base import Batch as Batch
from pipeline.backends.base import HostGather as HostGather
from pipeline.backends.base import HostMean as HostMean
from pipeline.backends.base import RankGroup as RankGroup
from pipeline.backends.base import prefetched as prefetched
from pipeline.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

Name = Literal["auto", "xla", "neuron", "cpu", "cuda"]
NAMES: tuple[str, ...] = get_args(Name)
TRACED, TRACED_HOST = "traced", "traced-host"
"""Backends that trace the graphs of a Neuron device and of XLA:CPU without executing them. No setting selects them."""


# The following functions answer questions about a backend without opening a device.


def trial_backend(name: str, env: Mapping[str, str]) -> str:
    """Return the backend on which to trace the graphs of a backend ahead of time.

    XLA:CPU can't save its compiled programs for other processes, so its graphs are only traced.
    """
    return TRACED_HOST if _resolved(name) == "xla" and is_lazy_host(lazy_device_name(env)) else name


def may_use_neuron(name: str) -> bool:
    """Return whether a backend uses Neuron devices if the host has any."""
    return name in ("auto", "xla", "neuron")


def on_neuron(name: str, env: Mapping[str, str]) -> bool:
    """Return whether a backend will open a Neuron device."""
    return _is_native(name) or has_graph_tool(name, env)


def has_graph_tool(name: str, env: Mapping[str, str]) -> bool:
    """Return whether a backend will open a Neuron device through PyTorch/XLA. neuron_parallel_compile requires this."""
    return name in ("auto", "xla") and not _is_native(name) and pjrt_device(env) == "NEURON"


def compiled_cache_variable(name: str) -> str:
    """Return the environment variable for the cache of compiled programs, or '' if this isn't the native device."""
    return "TORCH_NEURONX_NEFF_CACHE_DIR" if _is_native(name) else ""


def lazy_device_name(env: Mapping[str, str]) -> str:
    """Return what `Backend.device_name` will return for the PyTorch/XLA device, without opening it."""
    return f"xla:{pjrt_device(env)}"


def is_lazy_host(device_name: str) -> bool:
    """Return whether a device is XLA:CPU.

    It compiles a graph within seconds, but doesn't support collectives inside a graph.
    """
    return device_name == "xla:CPU"


def auto_uses_xla_cpu(name: str, env: Mapping[str, str]) -> bool:
    """Return whether the backend `auto` would select PyTorch/XLA on the CPU, because the host has no accelerator."""
    import torch

    if name != "auto" or torch.cuda.is_available() or _is_native(name) or not importlib.util.find_spec("torch_xla"):
        return False
    return is_lazy_host(lazy_device_name(env))


def host_backend(*, compiles_graphs: bool) -> Name:
    """Return the backend to use on a host without an accelerator."""
    return "xla" if compiles_graphs else "cpu"


def process_group(name: str) -> str | None:
    """Return the torch.distributed backend to use for a device, or None for gloo. This doesn't open the device.

    Note that a process group with the Neuron backend doesn't support CPU tensors, which therefore need a second process
    group (parallel/process_group.py). Raises ConfigError for cuda if the host has no GPU.
    """
    name = _resolved(name)
    if name == "neuron":
        from pipeline.backends.neuron import load_package

        load_package()  # this registers the backend with torch.distributed
        return "neuron"
    if name != "cuda":
        return None
    from pipeline.backends.cuda import check_visible

    check_visible()  # the error of NCCL would be less helpful
    return "cpu:gloo,cuda:nccl"


def module_device() -> str:
    """Return the backend to use for an unmodified module of the user.

    This is a GPU or a native Neuron device if there is one, and the CPU otherwise.
    """
    name = _resolved("auto")
    return "cpu" if name == "xla" else name


def open_backend(name: str, *, local_rank: int = 0, local_world_size: int = 1, world_size: int = 1) -> Backend:
    """Open the device of this rank.

    `auto` selects the first backend that is available, in the order cuda, neuron (native), xla, cpu. Note that on hosts
    without an accelerator, stages choose a backend based on the size of the model instead, see context.with_backend.

    If there are multiple ranks, the process group must be initialized first (parallel/process_group.py).
    """
    name = _resolved(name)
    if name == "xla":
        from pipeline.backends.xla import XlaBackend

        return XlaBackend(local_rank, local_world_size, world_size)
    if name == TRACED:
        from pipeline.backends.xla import XlaTracer

        return XlaTracer()
    if name == TRACED_HOST:
        from pipeline.backends.xla import HostTracer

        return HostTracer(local_rank, local_world_size, world_size)
    if name == "cuda":
        from pipeline.backends.cuda import CudaBackend

        return CudaBackend(local_rank)
    if name == "neuron":
        from pipeline.backends.neuron import NeuronBackend

        return NeuronBackend()
    if name == "cpu":
        from pipeline.backends.cpu import CpuBackend

        return CpuBackend()
    raise ConfigError(f"unknown backend {name!r}", expected=f"one of {', '.join(NAMES)}")


def open_host() -> Backend:
    """Open the CPU of this host, regardless of the settings."""
    return open_backend("cpu")


def open_tracer() -> Backend:
    """Open a backend that only traces graphs, as on a single Neuron core. Graphs include source lines.

    This must be called before torch_xla is imported.
    """
    os.environ |= {"PJRT_DEVICE": "CPU", "XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1"}
    return open_backend(TRACED)


def step_program(backend: Backend, function: Function) -> Function:
    """Compile a part of a training step if the backend compiles steps. The function must not contain collectives."""
    return backend.compiled(function) if backend.compiles_steps else function


def device_guard(device: "torch.device") -> AbstractContextManager[object]:
    """Make a CUDA device the current device of this thread.

    This is required in new threads, because their current device is always the first one.
    """
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _resolved(name: str) -> str:
    if name != "auto":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if _is_native("auto"):
        return "neuron"
    return "xla" if importlib.util.find_spec("torch_xla") else "cpu"


def _is_native(name: str) -> bool:
    """Return whether a backend is the native Neuron device, assuming that there is no GPU."""
    return name == "neuron" or (name == "auto" and (native_version() or (0, 0)) >= NATIVE_SINCE)
