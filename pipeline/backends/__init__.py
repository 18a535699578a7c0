"""One interface for all devices, with a file for each, selected by name. Importing this does not import torch."""

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
TRACED = "traced"
"""Backend that traces as on Neuron and executes nothing. For tools only, it cannot be set."""


# Questions about a backend that can be answered without opening a device.


def may_use_neuron(name: str) -> bool:
    """Return whether a backend uses the Neuron devices of a machine that has them."""
    return name in ("auto", "xla", "neuron")


def on_neuron(name: str, env: Mapping[str, str]) -> bool:
    """Return whether a backend will open a Neuron device."""
    return _is_native(name) or has_graph_tool(name, env)


def has_graph_tool(name: str, env: Mapping[str, str]) -> bool:
    """Return whether a backend will open a Neuron device through PyTorch/XLA, as neuron_parallel_compile requires."""
    return name in ("auto", "xla") and not _is_native(name) and pjrt_device(env) == "NEURON"


def compiled_cache_variable(name: str) -> str:
    """Return the variable that names the folder of compiled programs on the native Neuron device, else ''."""
    return "TORCH_NEURONX_NEFF_CACHE_DIR" if _is_native(name) else ""


def lazy_device_name(env: Mapping[str, str]) -> str:
    """Return the Backend.device_name of the lazy device, without opening it."""
    return f"xla:{pjrt_device(env)}"


def is_lazy_host(device_name: str) -> bool:
    """Return whether a device is XLA:CPU, which compiles graphs in seconds and has no collectives in them."""
    return device_name == "xla:CPU"


def auto_uses_xla_cpu(name: str, env: Mapping[str, str]) -> bool:
    """Return whether the backend is `auto` without an accelerator, so that PyTorch/XLA would compile for the CPU."""
    import torch

    if name != "auto" or torch.cuda.is_available() or _is_native(name) or not importlib.util.find_spec("torch_xla"):
        return False
    return is_lazy_host(lazy_device_name(env))


def host_backend(*, compiles_graphs: bool) -> Name:
    """Return the backend of a host without an accelerator."""
    return "xla" if compiles_graphs else "cpu"


def process_group(name: str) -> str | None:
    """Return the torch.distributed backend of a device, None for gloo. Does not open the device.

    The Neuron backend replaces all others of a process group, so CPU tensors need a second process group
    (parallel/process_group.py). Raises ConfigError for cuda on a machine without a GPU.
    """
    name = _resolved(name)
    if name == "neuron":
        from pipeline.backends.neuron import load_package

        load_package()  # registers the process group
        return "neuron"
    if name != "cuda":
        return None
    from pipeline.backends.cuda import check_visible

    check_visible()  # before NCCL fails with a less helpful error
    return "cpu:gloo,cuda:nccl"


def module_device() -> str:
    """Return the backend on which a user's module runs unchanged: a GPU, a native Neuron device, else cpu."""
    name = _resolved("auto")
    return "cpu" if name == "xla" else name


def open_backend(name: str, *, local_rank: int = 0, local_world_size: int = 1, world_size: int = 1) -> Backend:
    """Open the device of this rank.

    `auto` selects cuda if a GPU is visible, else neuron (native) or xla if installed, else cpu. On a host without an
    accelerator, stages replace `auto` depending on the model (context.with_backend). With several ranks, the process
    group must be initialised before (parallel/process_group.py).
    """
    name = _resolved(name)
    if name == "xla":
        from pipeline.backends.xla import XlaBackend

        return XlaBackend(local_rank, local_world_size, world_size)
    if name == TRACED:
        from pipeline.backends.xla import XlaTracer

        return XlaTracer()
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
    """Open the CPU of this host, independent of the settings."""
    return open_backend("cpu")


def open_tracer() -> Backend:
    """Open the backend that traces as on one Neuron core, with source lines. Call it before importing torch_xla."""
    os.environ |= {"PJRT_DEVICE": "CPU", "XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1"}
    return open_backend(TRACED)


def step_program(backend: Backend, function: Function) -> Function:
    """Compile a part of a step without collectives, if the backend compiles steps. Otherwise return it unchanged."""
    return backend.compiled(function) if backend.compiles_steps else function


def device_guard(device: "torch.device") -> AbstractContextManager[object]:
    """Make a CUDA device the current one of this thread. Every thread starts with the first device."""
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
    """Return whether a backend will be the native Neuron device, if torch sees no GPU."""
    return name == "neuron" or (name == "auto" and (native_version() or (0, 0)) >= NATIVE_SINCE)
