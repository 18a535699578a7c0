"""A stand-in for AWS's torch-neuronx: device `neuron`, process group `neuron`, compiler `neuron`, all in host memory.

It shows that our code keeps the rules of that package; it says nothing about Trainium, its compiler or its speed. The
names are those of the package (Neuron SDK 2.33, github.com/aws-neuron/torch-neuronx) and so are the limits: the process
group comes before the device, each rank has one device of index 0, memory is not pinned, shapes are static, float64
stays on the host. device.cpp is compiled once for each version of torch; `tests/native/standin.py` arranges for it.

STANDIN_MISSING: operators that this device does not have, such as aten::gelu,aten::addmm: they are noted as run on the
host. TORCH_NEURONX_NEFF_CACHE_DIR: where "compiled" graphs are kept, as with the package.
"""

import hashlib
import importlib.util
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import register_backend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend


def _load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("standin_device", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_C = _load(os.environ["STANDIN_DEVICE"])
_C.set_missing({name for name in os.environ.get("STANDIN_MISSING", "").split(",") if name})


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def synchronize(device: object = None) -> None:
    """Nothing runs behind the host here."""


def memory_allocated(device: object = None) -> int:
    return int(_C.allocated_bytes())


def get_fallback_ops() -> list[str]:
    """One entry for each time, as the package has it."""
    return [name for name, count in _C.fell_back().items() for _ in range(count)]


def clear_op_tracking() -> None:
    _C.clear()


# torch.neuron: what torch itself asks of a device's module (autograd, autocast, FSDP2, DeviceMesh).


def _set_device(device: object) -> None:
    index = getattr(device, "index", device) or 0
    if index != 0:
        raise ValueError(f"Invalid device id: {index}. Valid range is 0 to 0")


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


neuron = ModuleType("torch.neuron")
neuron.__dict__.update(
    Event=torch.cpu.Event,
    Stream=torch.cpu.Stream,
    current_device=current_device,
    current_stream=lambda device=None: torch.cpu.current_stream(),
    default_stream=lambda device=None: torch.cpu.current_stream(),
    device=lambda device: torch.cpu.stream(torch.cpu.current_stream()),
    device_count=device_count,
    get_amp_supported_dtype=lambda: [torch.float32, torch.float16, torch.bfloat16],
    get_rng_state=lambda device=None: torch.default_generator.get_state(),
    is_available=lambda: True,
    is_initialized=lambda: bool(_C.is_touched()),
    manual_seed=_seed,
    manual_seed_all=_seed,
    memory_allocated=memory_allocated,
    set_device=_set_device,
    set_rng_state=lambda state, device=None: torch.default_generator.set_state(state),
    stream=torch.cpu.stream,
    synchronize=synchronize,
    _is_in_bad_fork=lambda: False,
)
rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", neuron)  # type: ignore[no-untyped-call]
generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


# The process group: gloo over the same memory, and the limits of the package's own (its distributed/backend.py and
# tests): it takes no tensor of the host, none without elements, one type at a time, and barriers of all ranks alone.


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _C.on_host(value)
    return [_on_host(one) for one in value] if isinstance(value, list | tuple) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for one in value for tensor in _tensors(one)] if isinstance(value, list | tuple) else []


class Group(dist.ProcessGroup):
    """A Python group, which torch takes for the whole of `cpu:gloo,neuron:neuron`."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.flat = dist.ProcessGroup(store, rank, size)
        library = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.flat._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, library)
        self.flat._set_default_backend(dist.ProcessGroup.BackendType.GLOO)

    def _get_backend(self, device: object) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("neuron")]

    def getBackendName(self) -> str:
        return "neuron"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def barrier(self, opts: Any = None) -> Any:
        if dist.get_world_size() != self.size():
            raise NotImplementedError(f"Barrier is implemented only for default group, called barrier on {self}")
        return self.flat.barrier()


_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def _check(name: str, arguments: Sequence[Any]) -> None:
    tensors = _tensors(arguments)
    for tensor in tensors:
        if tensor.device.type != "neuron":
            raise RuntimeError(f"Expected neuron device, got {tensor.device.type}")
        if tensor.dtype not in _TYPES:
            raise RuntimeError(f"{name} of {tensor.dtype}: no test of the package has it")
        if name != "broadcast" and tensor.dim() and tensor.size(0) == 0:
            raise RuntimeError(f"{name}: tensors cannot have zero size in dimension 0, found {tuple(tensor.shape)}")
        if "gather" in name and not tensor.dim():
            raise IndexError(f"{name}: dimension specified as 0 but tensor has no dimensions")
    if len(types := {tensor.dtype for tensor in tensors}) > 1:
        raise RuntimeError(f"{name}: Invalid usage of tensors with different dtypes, found {types}")


def _without_empty(arguments: Sequence[Any]) -> list[Any]:
    """The coalesced forms leave out what has no element."""
    return [[one for one in value if one.numel()] if isinstance(value, list) else value for value in arguments]


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(self: Group, *args: Any, **options: Any) -> Any:
        given = _without_empty(args) if name.endswith("_coalesced") else args
        _check(name, given)
        return getattr(self.flat, name)(*map(_on_host, given), **options)

    return forward


def _refused(name: str) -> Callable[..., Any]:
    def refuse(self: Group, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"ProcessGroupNeuron.{name}")

    return refuse


for _name in (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall_base",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
):
    if hasattr(dist.ProcessGroup, _name):
        setattr(Group, _name, _forwarded(_name))
for _name in ("monitored_barrier", "recv", "recv_anysource", "reduce_scatter_coalesced", "send"):
    setattr(Group, _name, _refused(_name))


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Group:
    if not dist.is_initialized() and _C.is_touched():
        raise RuntimeError("the process group neuron was initialised after the device: it has to come before")
    return Group(store, rank, size, timeout)


dist.Backend.register_backend("neuron", _create, devices=["neuron"])


# The compiler: a graph is run operator by operator, after it was counted and its "NEFF" was put into the cache.


@dataclass
class CompilationMetrics:
    """The fields of the package's own that we know of."""

    graph_id: str
    graph_node_count: int
    torch_neuronx_compile_us: int


_metrics: list[CompilationMetrics] = []
_lock = threading.Lock()


def get_dynamo_metrics() -> list[CompilationMetrics]:
    return list(_metrics)


def reset_dynamo_metrics() -> None:
    _metrics.clear()


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    shapes = []
    for value in inputs:
        if isinstance(value, torch.SymInt) or (
            isinstance(value, Tensor) and not all(isinstance(size, int) for size in value.shape)
        ):
            raise RuntimeError("[NCC_EMOD025] Dynamic shape is not supported: instruction 'parameter'")
        shapes.append((tuple(value.shape), str(value.dtype)) if isinstance(value, Tensor) else repr(value))
    key = hashlib.sha256(f"{graph.code}{shapes}".encode()).hexdigest()
    neff = Path(os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR", "/tmp/neff_cache"), key[:2], key[2:4], f"{key}.neff")
    is_new = not neff.exists()
    if is_new:
        neff.parent.mkdir(parents=True, exist_ok=True)
        partial = neff.with_suffix(f".{os.getpid()}")
        partial.write_text(key)
        partial.replace(neff)
    with _lock:
        _metrics.append(CompilationMetrics(key, len(graph.graph.nodes), 1000 if is_new else 0))

    def forward(*arguments: Any) -> Any:
        _C.enter_graph()
        try:
            return graph.forward(*arguments)
        finally:
            _C.leave_graph()

    return make_boxed_func(forward)  # type: ignore[no-untyped-call]


@register_backend(name="neuron")
def neuron_backend(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    return aot_autograd(fw_compiler=_compile, bw_compiler=_compile)(graph, inputs)
