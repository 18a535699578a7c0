"""The native Neuron device of PyTorch: torch-neuronx 2.13 and later, on Trn2 and Trn3. The only file that imports it.

Sources, Neuron SDK 2.33 (awsdocs-neuron.readthedocs-hosted.com/en/latest/): torch/guides/torch-distributed (the process
group, one device per rank without an index), torch/compile/reference-torch-compile (static shapes only, one graph per
shape, get_dynamo_metrics), torch/reference/best-practices-pytorch-neuron (operators that run on the host),
torch/guides/memory-profiling-guide (memory_allocated), torch/reference/env-vars (the cache), torch/troubleshooting
(native versions).
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

_BUNDLE_ELEMENTS = 2**24  # 64 MiB of fp32, reduced at once
_MULTIPLE = 4096
"""Reduced vectors are padded to a multiple of this. Eager kernels are 30 to 90 times slower on lengths that are not a
multiple of 128 (measured).
"""
_MAX_SHAPES = 256  # of one function (torch's default is 8, after which it silently runs eagerly)
_INSTALL = "see The native device in docs/neuron.md for the versions; --backend cpu runs anywhere"


def load_package() -> Any:
    """Import torch_neuronx without opening a device. Raises ConfigError if it is missing or does not match torch."""
    version, torch_version = native_version(), tuple(int(part) for part in torch.__version__.split(".")[:2])
    installed = "not installed" if version is None else metadata.version("torch-neuronx")
    if version is None or version < NATIVE_SINCE or version != torch_version:
        raise ConfigError(
            f"torch {torch.__version__} does not match torch-neuronx ({installed})",
            expected=f"torch-neuronx {NATIVE_SINCE[0]}.{NATIVE_SINCE[1]} or later, in the same minor version as torch",
            next_command=f"--backend xla if torch-neuronx is the one for PyTorch/XLA; or {_INSTALL}",
        )
    try:
        return importlib.import_module("torch_neuronx")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"torch_neuronx {installed} cannot be imported: {first_line(error)}",
            expected="an installed Neuron runtime",
            next_command=_INSTALL,
        ) from error


class NeuronBackend(Accelerator):
    """One logical NeuronCore. Each rank sees only its core, so the device has no index."""

    name = "neuron"
    is_neuron = True
    compiles_steps = True
    # Supported according to AWS (training/best-practices, torch/guides/torch-distributed), FSDP2 with eager operations.
    # AWS mentions neither offloading nor other collectives.
    parallelism = frozenset({"parameters", "tensor"})
    default_tokens = 4096

    def __init__(self) -> None:
        self._package = load_package()
        if not self._package.device_count():
            raise ConfigError(
                "no Neuron device is visible",
                expected="a Trn2 or Trn3 machine with the Neuron driver",
                next_command="neuron-ls, then trnpipe health on that machine; --backend cpu runs anywhere",
            )
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _MAX_SHAPES
        dynamo.fail_on_recompile_limit_hit = True
        self.device = torch.device("neuron")
        torch.empty(1, device=self.device)  # opens the device before a DeviceMesh would select one by local rank
        self._pack, self._unpack_mean = self.compiled(_pack), self.compiled(_unpack_mean)

    def compiled(self, function: Function) -> Function:
        """Compile one full graph for each shape. Graph breaks and dynamic shapes raise."""
        return cast(Function, torch.compile(function, backend="neuron", fullgraph=True, dynamic=False))

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        """Upload from pageable memory, because the device does not support pinned memory."""
        return self.uploaded(batches)

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        """Reduce several tensors at once, because a collective costs the same for a bias as for a matrix.

        Packing and unpacking are compiled, because eager operations are slow on vectors of most lengths.
        """
        del host_mean
        if not dist.is_initialized():
            return
        for bundle in _bundles(tensors):
            vector = self._pack(bundle)
            dist.all_reduce(vector)
            self._unpack_mean(vector, bundle, dist.get_world_size())

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        return replayed(torch.neuron.get_rng_state, torch.neuron.set_rng_state)  # type: ignore[attr-defined]

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.neuron.manual_seed(seed)  # type: ignore[attr-defined]

    def compile_count(self) -> int:
        """Return the number of graphs from torch.compile. Unlike the count of torch_neuronx it does not synchronise."""
        return int(counters["stats"]["unique_graphs"])

    def compile_seconds(self) -> float:
        """Return the seconds of the Neuron compiler, 0 for cached programs. Synchronises."""
        return float(sum(graph.torch_neuronx_compile_us for graph in self._package.get_dynamo_metrics())) / 1e6

    def host_operators(self) -> dict[str, int]:
        return dict(Counter(self._package.get_fallback_ops()))

    def reset_host_operators(self) -> None:
        self._package.clear_op_tracking()

    def memory_bytes(self) -> int:
        """Return the allocated memory. Synchronises: running operations hold memory (memory-profiling-guide)."""
        self.synchronise()
        return int(self._package.memory_allocated())

    def synchronise(self) -> None:
        self._package.synchronize()


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return one vector of all elements, padded with zeros."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    padding = -sum(map(len, flat)) % _MULTIPLE
    return torch.cat([*flat, flat[0].new_zeros(padding)]) if padding else torch.cat(flat)


def _unpack_mean(vector: Tensor, tensors: Sequence[Tensor], ranks: int) -> None:
    """Copy a vector of `_pack` back into the tensors, divided by the number of ranks."""
    start = 0
    for tensor in tensors:
        elements = vector[start : start + tensor.numel()]
        tensor.copy_((elements / ranks).view(tensor.shape))
        start += tensor.numel()


def _bundles(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield successive tensors of one dtype that are reduced together."""
    bundle: list[Tensor] = []
    for tensor in tensors:
        size = sum(member.numel() for member in bundle) + tensor.numel()
        if bundle and (size > _BUNDLE_ELEMENTS or tensor.dtype != bundle[0].dtype):
            yield bundle
            bundle = []
        bundle.append(tensor)
    if bundle:
        yield bundle
