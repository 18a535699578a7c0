"""The native Neuron device of PyTorch: torch-neuronx 2.13 and later, on Trn2 and Trn3. The only file that imports it.

Facts, Neuron SDK 2.33 (awsdocs-neuron.readthedocs-hosted.com/en/latest/): torch/guides/torch-distributed (the process
group, one device a rank, called by its bare name), torch/compile/reference-torch-compile (static shapes alone, one
graph a shape, get_dynamo_metrics), torch/reference/best-practices-pytorch-neuron (operators that run on the host),
torch/guides/memory-profiling-guide (memory_allocated), torch/reference/env-vars (the cache), torch/troubleshooting
(which versions are native).
"""

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.utils import counters

from pipeline.backends.base import NATIVE_SINCE, Batch, Function, HostMean, native_version
from pipeline.backends.cpu import Accelerator, replayed
from pipeline.core.errors import ConfigError, first_line

_REDUCED_AT_ONCE = 2**24  # elements: 64 MiB of fp32
_MULTIPLE = 4096
"""Elements of a reduced vector are a multiple of this. Eager kernels were seen to be 30 to 90 times slower where the
length is no multiple of 128.
"""
_SHAPES = 256  # of one function; torch's limit is 8, beyond which it would run eagerly without a word
_INSTALL = "docs/neuron.md, The native device, has the versions; --backend cpu runs anywhere"


def load_package() -> Any:
    """torch_neuronx. Importing it registers the device, its process group and its compiler, and opens no device.

    Raises ConfigError where there is none, or not that of the installed torch.
    """
    version, ours = native_version(), tuple(int(part) for part in torch.__version__.split(".")[:2])
    found = "not installed" if version is None else metadata.version("torch-neuronx")
    if version is None or version < NATIVE_SINCE or version != ours:
        raise ConfigError(
            f"torch {torch.__version__} with torch-neuronx {found}",
            expected=f"the native device: torch-neuronx {NATIVE_SINCE[0]}.{NATIVE_SINCE[1]} or later, whose first two"
            " numbers are those of torch",
            next_command=f"--backend xla where torch-neuronx is that of PyTorch/XLA; or {_INSTALL}",
        )
    try:
        return importlib.import_module("torch_neuronx")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"torch_neuronx {found} cannot be imported: {first_line(error)}",
            expected="a Neuron runtime beside it",
            next_command=_INSTALL,
        ) from error


class NeuronBackend(Accelerator):
    """One logical NeuronCore. Each rank sees its own alone, so the device has no index."""

    name = "neuron"
    is_neuron = True
    compiles_steps = True
    # What AWS states (training/best-practices, torch/guides/torch-distributed), FSDP2 as eager operations; offloading
    # and other collectives it does not.
    spreads = frozenset({"parameters", "tensor"})
    default_tokens = 4096

    def __init__(self) -> None:
        self._package = load_package()
        if not self._package.device_count():
            raise ConfigError(
                "no Neuron device is visible",
                expected="a Trn2 or Trn3 machine with its driver",
                next_command="neuron-ls on the machine, then trnpipe health; --backend cpu runs anywhere",
            )
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _SHAPES
        dynamo.fail_on_recompile_limit_hit = True
        self.device = torch.device("neuron")
        torch.empty(1, device=self.device)  # opens it; a DeviceMesh would choose one by local rank before that
        self._packed, self._divided = self.compiled(_packed), self.compiled(_divided)

    def compiled(self, function: Function) -> Function:
        """Compile one program for each shape, in whole: what would break it, or a shape that varies, raises."""
        found = torch.compile(function, backend="neuron", fullgraph=True, dynamic=False)
        return cast(Function, found)

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        """Upload from pageable memory: the device does not know pinned memory."""
        return self.uploaded(batches)

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        """Reduce some at once, since a collective costs the same for a bias as for a matrix.

        Between the collectives stand programs, no eager operations: these are slow on vectors of most lengths.
        """
        del host_mean
        if not dist.is_initialized():
            return
        for together in _runs(tensors):
            whole = self._packed(together)
            dist.all_reduce(whole)
            self._divided(whole, together, dist.get_world_size())

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        return replayed(torch.neuron.get_rng_state, torch.neuron.set_rng_state)  # type: ignore[attr-defined]

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.neuron.manual_seed(seed)  # type: ignore[attr-defined]

    def compile_count(self) -> int:
        """Count the graphs of our code that torch.compile made; without the synchronisation of the package's count."""
        return int(counters["stats"]["unique_graphs"])

    def compile_seconds(self) -> float:
        """Return those of the Neuron compiler; none for a program that was in the cache. Synchronises."""
        return float(sum(graph.torch_neuronx_compile_us for graph in self._package.get_dynamo_metrics())) / 1e6

    def host_operators(self) -> dict[str, int]:
        return dict(Counter(self._package.get_fallback_ops()))

    def forget_host_operators(self) -> None:
        self._package.clear_op_tracking()

    def memory_bytes(self) -> int:
        """Ask once what was started has ended: until then it holds memory (AWS's guide to memory profiling)."""
        self.synchronise()
        return int(self._package.memory_allocated())

    def synchronise(self) -> None:
        self._package.synchronize()


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector of all elements and, behind them, zeros."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    padding = -sum(map(len, flat)) % _MULTIPLE
    return torch.cat([*flat, flat[0].new_zeros(padding)]) if padding else torch.cat(flat)


def _divided(whole: Tensor, tensors: Sequence[Tensor], ranks: int) -> None:
    """Put a vector as `_packed` makes it into the tensors, divided by the number of ranks."""
    start = 0
    for tensor in tensors:
        part = whole[start : start + tensor.numel()]
        tensor.copy_((part / ranks).view(tensor.shape))
        start += tensor.numel()


def _runs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, as many as are reduced at once; of one type, at least one."""
    run: list[Tensor] = []
    for tensor in tensors:
        size = sum(one.numel() for one in run) + tensor.numel()
        if run and (size > _REDUCED_AT_ONCE or tensor.dtype != run[0].dtype):
            yield run
            run = []
        run.append(tensor)
    if run:
        yield run
