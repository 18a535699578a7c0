"""The only seam to a device: one file each, chosen by name. Importing this imports no torch."""

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
"""The name of the backend that traces as on Neuron and runs nothing; for tools, no setting."""


# What is asked before a device is open, or without one. After that Backend answers.


def may_use_neuron(name: str) -> bool:
    """Return whether a backend runs on Neuron devices where the machine has them."""
    return name in ("auto", "xla", "neuron")


def on_neuron(name: str, env: Mapping[str, str]) -> bool:
    """Return whether that backend will open a Neuron device."""
    return _is_native(name) or has_graph_tool(name, env)


def has_graph_tool(name: str, env: Mapping[str, str]) -> bool:
    """Return whether it will be by PyTorch/XLA, whose graphs a tool of its own collects and compiles."""
    return name in ("auto", "xla") and not _is_native(name) and pjrt_device(env) == "NEURON"


def compiled_cache(name: str) -> str:
    """Return the variable with the folder of compiled programs, for devices that compile as they go; else ''."""
    return "TORCH_NEURONX_NEFF_CACHE_DIR" if _is_native(name) else ""


def lazy_device_name(env: Mapping[str, str]) -> str:
    """Return what Backend.device_name will be of the device that graphs are compiled for."""
    return f"xla:{pjrt_device(env)}"


def is_lazy_host(device_name: str) -> bool:
    """Return whether it is a host that compiles graphs: in seconds, and its processes know nothing of each other."""
    return device_name == "xla:CPU"


def auto_on_host(name: str, env: Mapping[str, str]) -> bool:
    """Return whether `auto` finds no accelerator and PyTorch/XLA would compile every graph for the CPU."""
    import torch

    if name != "auto" or torch.cuda.is_available() or _is_native(name) or not importlib.util.find_spec("torch_xla"):
        return False
    return is_lazy_host(lazy_device_name(env))


def host_backend(*, compiles_graphs: bool) -> Name:
    """Return the backend of a host without an accelerator, with graphs or without."""
    return "xla" if compiles_graphs else "cpu"


def process_group(name: str) -> str | None:
    """Return the torch.distributed backend of ranks on such devices, None for gloo; known without opening a device.

    That of Neuron replaces all others in a process group, so CPU tensors need another one (parallel/process_group.py).

    Raises ConfigError for a GPU on a machine without one.
    """
    name = _resolved(name)
    if name == "neuron":
        from pipeline.backends.neuron import load_package

        load_package()  # registers the process group
        return "neuron"
    if name != "cuda":
        return None
    from pipeline.backends.cuda import check_visible

    check_visible()  # before nccl says so in words of its own
    return "cpu:gloo,cuda:nccl"


def module_device() -> str:
    """Return the backend on which a user's module runs as it is here: a GPU, a native Neuron device, else cpu."""
    name = _resolved("auto")
    return "cpu" if name == "xla" else name


def open_backend(name: str, *, local_rank: int = 0, local_world_size: int = 1, world_size: int = 1) -> Backend:
    """Open the device of this rank. `auto`: cuda where there is one, else the native Neuron device, else xla, where
    they are installed, else cpu. A stage on a host without an accelerator chooses by the model (context.with_backend).

    With several ranks their process group must be up before (parallel/process_group.py).
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
    raise ConfigError(f"backend {name!r}", expected=f"one of {', '.join(NAMES)}")


def open_host() -> Backend:
    """Open the CPU of this host, whatever the settings say."""
    return open_backend("cpu")


def open_tracer() -> Backend:
    """Open the backend that traces as on one Neuron core, with names of operators and lines of code in its graphs.

    Before torch_xla is imported.
    """
    os.environ |= {"PJRT_DEVICE": "CPU", "XLA_HLO_DEBUG": "1", "XLA_IR_DEBUG": "1"}
    return open_backend(TRACED)


def step_program(backend: Backend, function: Function) -> Function:
    """For a part of a step without a collective in it: a program of its own where the device compiles those."""
    return backend.compiled(function) if backend.compiles_steps else function


def device_guard(device: "torch.device") -> AbstractContextManager[object]:
    """Make a CUDA device the current one of this thread: each thread has its own, and starts at the first device."""
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
    """Return whether a backend will be the native Neuron device; on a machine with a GPU that is for torch to say."""
    return name == "neuron" or (name == "auto" and (native_version() or (0, 0)) >= NATIVE_SINCE)
