"""PyTorch/XLA on Neuron devices and on the CPU. This is the only module that imports torch_xla."""

import ctypes
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pipeline.backends.base import Backend, Batch, HostGather, HostMean, RankGroup, pjrt_device, prefetched
from pipeline.backends.cpu import CpuBackend, replayed
from pipeline.core.errors import ConfigError
from pipeline.core.optional import missing_package

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # from malloc.h of glibc
KNOWN_VERSION = "2.9.0"
"""The version of torch_xla whose imports and flags are known here. Other versions run with their defaults."""
_UNUSED = {
    "torch_xla.experimental.scan": ("scan",),
    "torch_xla.stablehlo": ("save_as_stablehlo", "save_torch_model_as_stablehlo"),
}
"""Modules that import torch._dynamo, torch._inductor and sympy, and the names that torch_xla imports from them."""
_EMITTERS = "xla_cpu_use_fusion_emitters"


def _is_known_version() -> bool:
    return find_spec("torch_xla") is not None and version("torch_xla") == KNOWN_VERSION


def _set_host_flags() -> None:
    """Disable the fusion emitters of XLA:CPU, unless XLA_FLAGS already sets this flag.

    They take a quarter of the compile time of the quickstart, and its steps are not slower without them. Note that the
    hash of a graph depends on XLA_FLAGS, so a backend that only traces graphs needs the same flags.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _is_known_version() and _EMITTERS not in flags:
        os.environ["XLA_FLAGS"] = f"--{_EMITTERS}=false {flags}".strip()


def _import_torch_xla() -> ModuleType:
    """Import torch_xla. On the CPU, this skips modules that we don't use, which would take 90 % of its import time.

    Other devices and other versions import everything. torch_neuronx may need it.
    """
    if os.environ["PJRT_DEVICE"] != "CPU" or "torch_xla" in sys.modules or not _is_known_version():
        return importlib.import_module("torch_xla")
    recurrent, dynamo = torch.nn.GRU, vars(torch).get("_dynamo")
    for name, members in _UNUSED.items():
        sys.modules[name] = stand_in = ModuleType(name)
        vars(stand_in).update(dict.fromkeys(members))
    vars(torch)["_dynamo"] = SimpleNamespace(config=SimpleNamespace())  # torch_xla sets two options
    try:
        return importlib.import_module("torch_xla")
    finally:
        for name in _UNUSED:
            del sys.modules[name]
        vars(torch.nn)["GRU"] = recurrent  # torch_xla replaces it by one that needs its `scan`
        if dynamo is None:
            del torch._dynamo  # torch imports the real one on the first access
        else:
            vars(torch)["_dynamo"] = dynamo


class XlaBackend(Backend):
    """The backend for a single PJRT device.

    On Neuron, gradients are reduced by a collective in the graph. On XLA:CPU, they are reduced on the host.
    """

    name = "xla"
    is_lazy = True
    parallelism: frozenset[str] = frozenset()  # only supports sharded optimizer state (parallel/strategies/zero1.py)
    default_tokens = 4096
    executes = True
    """Whether graphs are executed. A subclass that only traces graphs sets this to False."""
    separate_processes = frozenset({"CPU"})
    """PJRT devices that don't support collectives between processes."""

    def __init__(self, local_rank: int = 0, local_world_size: int = 1, world_size: int = 1) -> None:
        if os.environ.setdefault("PJRT_DEVICE", pjrt_device(os.environ)) == "CPU":
            if self.executes:
                _keep_freed_memory()
            _set_host_flags()
        try:
            self._xla: Any = _import_torch_xla()
            self._xm: Any = importlib.import_module("torch_xla.core.xla_model")
            self._metrics: Any = importlib.import_module("torch_xla.debug.metrics")
            self._runtime: Any = importlib.import_module("torch_xla.runtime")
            self._pjrt: Any = importlib.import_module("torch_xla._internal.pjrt")
        except ImportError as error:
            raise missing_package("torch_xla", "--backend xla", error, otherwise="--backend cpu") from error
        self.device_type = str(self._runtime.device_type())
        self.reduces_in_graph = self.device_type not in self.separate_processes
        self.gathers_in_graph = self.reduces_in_graph
        self.shares_host_memory = self.device_type == "CPU"
        self.sums_by_matmul = self.shares_host_memory
        self.is_neuron = self.device_type == "NEURON"
        if self.reduces_in_graph and world_size > 1:
            # This sets the replication devices and must be called before anything reads the world size. Otherwise, the
            # runtime caches a world size of 1, and all_reduce silently does nothing (see runtime.world_size and
            # xla_model.all_reduce in torch_xla 2.9).
            self._pjrt.initialize_multiprocess(local_rank, local_world_size)
        self.device: torch.device = self._xla.device()
        self._host = CpuBackend()  # for collectives outside a graph

    def runtime_world_size(self) -> int:
        if self.reduces_in_graph:
            return int(self._runtime.world_size())
        return int(self._runtime.global_runtime_device_count())

    @contextmanager
    def loader(self, batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
        """Iterate over batches with MpDeviceLoader, which uploads them while the current step is running.

        If the source raises an error, the threads of MpDeviceLoader end the iteration without reporting it (see
        _loader_worker in parallel_loader.py of torch_xla 2.9). As a workaround, we store the error and raise it once
        the loader is exhausted.
        """
        errors: list[BaseException] = []
        closed = threading.Event()

        def source() -> Iterator[Batch]:
            try:
                for batch in batches:
                    if closed.is_set():
                        return
                    yield batch
            except BaseException as error:
                errors.append(error)

        module: Any = importlib.import_module("torch_xla.distributed.parallel_loader")
        loader = module.MpDeviceLoader(
            source(),
            self.device,
            loader_prefetch_size=4,
            device_prefetch_size=2,
            batches_per_execution=sys.maxsize,  # only end graphs in step_boundary instead of after each batch
        )
        iterator = iter(loader)

        def consume() -> Iterator[Batch]:
            yield from iterator
            for error in errors:
                raise error

        try:
            yield consume()
        finally:
            closed.set()
            loader._parallel_loader.close()

    def step_boundary(self, computed: Sequence[Tensor]) -> None:
        self._xla.sync()

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        if self.reduces_in_graph:
            scale = 1.0 / self._runtime.world_size()
            self._xm.all_reduce(self._xm.REDUCE_SUM, list(tensors), scale=scale)
            return
        for tensor, mean in zip(tensors, host_mean(self.to_host(tensors)), strict=True):
            tensor.copy_(mean.to(self.device))

    # All collectives set pin_layout=False. By default, torch_xla pins the layout and implements all-gather as an
    # all-reduce of zero-padded tensors. Mixing pinned and unpinned layouts may fail to compile (see
    # xla_model.all_reduce).

    def all_gather(self, tensor: Tensor, ranks: RankGroup | None = None) -> Tensor:
        if self.reduces_in_graph:
            output: Tensor = self._xm.all_gather(tensor, groups=_groups(ranks), pin_layout=False)
            return output
        return self._host.all_gather(self.to_host([tensor])[0], ranks).to(self.device)

    def all_reduce(self, tensor: Tensor, ranks: RankGroup) -> Tensor:
        if self.reduces_in_graph:
            operation, groups = self._xm.REDUCE_SUM, _groups(ranks)
            output: Tensor = self._xm.all_reduce(operation, tensor, groups=groups, pin_layout=False)
            return output
        return self._host.all_reduce(self.to_host([tensor])[0], ranks).to(self.device)

    def reduce_scatter(self, tensor: Tensor, ranks: RankGroup, scale: float = 1.0) -> Tensor:
        if self.reduces_in_graph:
            operation, groups = self._xm.REDUCE_SUM, _groups(ranks)
            output: Tensor = self._xm.reduce_scatter(
                operation, tensor, scale, 0, ranks.size, groups=groups, pin_layout=False
            )
            return output
        return self._host.reduce_scatter(self.to_host([tensor])[0], ranks, scale).to(self.device)

    def gather(self, tensors: Sequence[Tensor], host_gather: HostGather) -> list[Tensor]:
        if self.gathers_in_graph:
            return [self.all_gather(tensor.detach()) for tensor in tensors]
        return [gathered.to(self.device) for gathered in host_gather(self.to_host(tensors))]

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self._xla.sync()
        return self.fetch(tensors)()

    def barrier(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the tensors that XLA can't merge with the originals in common subexpression elimination."""
        # The barrier replaces tensors in place, so clone them first. This doesn't actually copy any memory.
        copies = [tensor.clone() for tensor in tensors]
        self._xm.optimization_barrier_(copies)
        return copies

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        """Save the random state.

        This is a number on the host, which is passed as an input to all graphs that generate random numbers.
        """
        return replayed(self._xm.get_rng_state, self._xm.set_rng_state)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        if self.device_type == "CPU":
            raise ConfigError(
                "train.precision autocast is not supported on XLA:CPU",
                expected="a Neuron device for autocast",
                next_command="--train.precision bf16 or fp32",
            )
        return torch.autocast("xla", dtype=dtype)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._xm.set_rng_state(seed, device=str(self.device))

    def _metric(self, name: str) -> tuple[int, float]:
        """Return the count and the total seconds of a runtime metric."""
        data = self._metrics.metric_data(name)
        return (0, 0.0) if data is None else (int(data[0]), float(data[1]) / 1e9)

    def compile_count(self) -> int:
        return self._metric("CompileTime")[0]

    def compile_seconds(self) -> float:
        return self._metric("CompileTime")[1]

    def _counters(self, prefix: str) -> dict[str, int]:
        """Return the runtime counters whose names start with the prefix."""
        names = [name for name in self._metrics.counter_names() if name.startswith(prefix)]
        return {name: int(self._metrics.counter_value(name)) for name in names}

    def host_operators(self) -> dict[str, int]:
        return self._counters("aten::")

    def device_name(self) -> str:
        return f"xla:{self.device_type}"

    def hlo_text(self, tensors: Sequence[Tensor]) -> str:
        return str(self._xla._XLAC._get_xla_tensors_hlo(list(tensors)))

    def graph_hash(self, tensors: Sequence[Tensor]) -> str:
        return str(self._xla._XLAC._get_graph_hash(list(tensors)).hex())

    def memory_bytes(self) -> int | None:
        """Return the resident set size on the CPU, and the driver's memory counter on Neuron.

        We can't use get_memory_info of torch_xla, because it aborts the process if the PJRT plugin doesn't implement it
        (see PjRtComputationClient::GetMemoryInfo in pytorch/xla 2.9).
        """
        if self.device_type == "CPU":
            return self._host.memory_bytes()
        return core_memory_bytes(os.environ) if self.device_type == "NEURON" else None

    def synchronise(self) -> None:
        self._xla.sync(wait=True)
        self._xm.wait_device_ops()


def _groups(ranks: RankGroup | None) -> list[list[int]] | None:
    return None if ranks is None else [list(group) for group in ranks.groups]


def _keep_freed_memory() -> None:
    """Configure glibc to reuse the large buffers that XLA:CPU allocates for every execution.

    By default, glibc maps and unmaps these buffers each time. The resulting page faults (88,000 per optimizer update of
    22.7M parameters) take longer than the update itself. This must be called before any threads are started, and it has
    no effect with other C libraries.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)):
        mallopt(parameter, value)


# Read the memory in use on a NeuronCore from the driver's counters in sysfs.
#
# According to the "Neuron Sysfs User Guide" in the AWS Neuron documentation (driver 2.28), the counter `total` in
# `memory_usage` is the current usage. Later drivers moved some files. If a file is missing, the usage is unknown.

SYSFS = Path("/sys/devices/virtual/neuron_device")
# Only trn1 is supported, because its runtime and driver use the same core numbers. Later chips combine several physical
# cores into one logical core.
_ARCHITECTURE = "v2"


def core_memory_bytes(env: Mapping[str, str], root: Path = SYSFS) -> int | None:
    """Return the bytes in use on the core of this process (NEURON_RT_VISIBLE_CORES), or None if this is unknown."""
    try:
        cores_of_device = int((root / "neuron0" / "core_count").read_text())
        device, core = divmod(int(env["NEURON_RT_VISIBLE_CORES"]), cores_of_device)
        folder = root / f"neuron{device}" / f"neuron_core{core}"
        if not (folder / "info/architecture/arch_type").read_text().strip().lower().endswith(_ARCHITECTURE):
            return None
        parts = [int(path.read_text()) for path in (folder / "stats/memory_usage/device_mem").glob("*/total")]
    except (KeyError, OSError, ValueError, ZeroDivisionError):
        return None
    return sum(parts) if parts else None


# A device that traces graphs without executing them. This allows tools to inspect the graphs without compiling them.

_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int32: "s32", torch.bool: "pred"}


class HostTracer(XlaBackend):
    """A backend that traces the same graphs as XLA:CPU, but never compiles or executes them.

    At each step boundary, the graph is discarded and its results are replaced by placeholders. Tensors that are fetched
    to the host contain zeros.
    """

    executes = False

    @contextmanager
    def loader(self, batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
        moved = ({name: t.to(self.device) for name, t in batch.items()} for batch in batches)
        with prefetched(moved, depth=1) as ready:
            yield ready

    def step_boundary(self, computed: Sequence[Tensor]) -> None:
        for tensor in computed:
            shape = {"type": _TYPES[tensor.dtype], "sizes": list(tensor.shape)}
            self._xla._XLAC._replace_xla_tensor(tensor, self._xla._XLAC._xla_create_placeholder_tensor(shape))
        # The all-reduce token keeps the collectives of a graph in order. A real sync resets it, so we have to as well.
        self._xla._XLAC._set_all_reduce_token(str(self.device), None)
        self.seed(0)  # the random state is a result of the graph too, so reset it

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.fetch(tensors)()

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]

    def synchronise(self) -> None:
        return None


class XlaTracer(HostTracer):
    """A backend that traces the same operators as a Neuron device on any host."""

    def __init__(self, local_rank: int = 0, local_world_size: int = 1, world_size: int = 1) -> None:
        super().__init__(local_rank, local_world_size, world_size)
        self.sums_by_matmul = self.shares_host_memory = False

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        # Don't allocate memory, so that models of any size can be traced.
        return lambda: [torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for tensor in tensors]

    def device_name(self) -> str:
        return "xla:traced"
