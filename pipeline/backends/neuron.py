"""The native Neuron device of PyTorch, which requires torch-neuronx 2.13 or later and Trn2 or Trn3.

This is the only module that imports torch_neuronx. It is based on the following pages of the Neuron SDK 2.33
documentation (awsdocs-neuron.readthedocs-hosted.com/en/latest/):

- torch/guides/torch-distributed: the process group, and that every rank has a single device without an index
- torch/compile/reference-torch-compile: static shapes only, one graph per shape, and get_dynamo_metrics
- torch/reference/best-practices-pytorch-neuron: operators that fall back to the host
- torch/guides/memory-profiling-guide: memory_allocated
- torch/reference/env-vars: the compile cache
- torch/troubleshooting: which versions are native
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
from pipeline.backends.cpu import Accelerator, raise_program_limit, replayed
from pipeline.core.errors import ConfigError, first_line

_BUNDLE_ELEMENTS = 2**24  # 64 MiB in fp32
_MULTIPLE = 4096
"""Vectors are padded to a multiple of this before they are reduced. We measured that eager kernels are 30 to 90 times
slower if the length is not a multiple of 128.
"""
_INSTALL = 'see "The native device" in docs/neuron.md for the supported versions; --backend cpu works on any host'


def load_package() -> Any:
    """Import torch_neuronx without opening a device.

    Raises ConfigError if it isn't installed or if its version doesn't match the version of torch.
    """
    version, torch_version = native_version(), tuple(int(part) for part in torch.__version__.split(".")[:2])
    installed = "not installed" if version is None else metadata.version("torch-neuronx")
    if version is None or version < NATIVE_SINCE or version != torch_version:
        raise ConfigError(
            f"torch {torch.__version__} does not match torch-neuronx ({installed})",
            expected=f"torch-neuronx {NATIVE_SINCE[0]}.{NATIVE_SINCE[1]} or later, in the same minor version as torch",
            next_command=f"use --backend xla if this is torch-neuronx for PyTorch/XLA; or {_INSTALL}",
        )
    try:
        return importlib.import_module("torch_neuronx")
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"torch_neuronx {installed} cannot be imported: {first_line(error)}",
            expected="a working installation of the Neuron runtime",
            next_command=_INSTALL,
        ) from error


class NeuronBackend(Accelerator):
    """The backend for a single logical NeuronCore.

    The device has no index, because each rank only sees its own core.
    """

    name = "neuron"
    is_neuron = True
    compiles_steps = True
    # These are supported according to training/best-practices and torch/guides/torch-distributed, which describe FSDP2
    # with eager operations. The documentation mentions neither offloading nor other collectives.
    parallelism = frozenset({"parameters", "tensor"})
    default_tokens = 4096

    def __init__(self) -> None:
        self._package = load_package()
        if not self._package.device_count():
            raise ConfigError(
                "no Neuron device is visible",
                expected="a Trn2 or Trn3 machine with the Neuron driver",
                next_command="run neuron-ls and trnpipe health on this machine; --backend cpu works on any host",
            )
        raise_program_limit()
        dynamo.fail_on_recompile_limit_hit = True  # otherwise, torch would silently fall back to eager mode
        self.device = torch.device("neuron")
        torch.empty(1, device=self.device)  # open the device now, because DeviceMesh would select it by local rank
        self._pack, self._unpack_mean = self.compiled(_pack), self.compiled(_unpack_mean)

    def compiled(self, function: Function) -> Function:
        """Compile a full graph for each shape. Graph breaks and dynamic shapes raise an error."""
        return cast(Function, torch.compile(function, backend="neuron", fullgraph=True, dynamic=False))

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        """Upload batches from pageable memory, because the device doesn't support pinned memory."""
        return self.uploaded(batches)

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        """Average tensors over all ranks in place.

        Several tensors are packed into one vector, because a collective takes about as long for a bias as for a matrix.
        Packing and unpacking are compiled, because eager operations are slow for most vector lengths (see `_MULTIPLE`).
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
        """Return the number of graphs compiled by torch.compile.

        We don't use the counter of torch_neuronx, because it synchronizes with the device.
        """
        return int(counters["stats"]["unique_graphs"])

    def compile_seconds(self) -> float:
        """Return the time spent in the Neuron compiler, which excludes cached programs.

        Note that this synchronizes with the device.
        """
        return float(sum(graph.torch_neuronx_compile_us for graph in self._package.get_dynamo_metrics())) / 1e6

    def host_operators(self) -> dict[str, int]:
        return dict(Counter(self._package.get_fallback_ops()))

    def reset_host_operators(self) -> None:
        self._package.clear_op_tracking()

    def memory_bytes(self) -> int:
        """Return the allocated memory.

        This synchronizes with the device, because pending operations hold on to memory (see memory-profiling-guide).
        """
        self.synchronise()
        return int(self._package.memory_allocated())

    def synchronise(self) -> None:
        self._package.synchronize()


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate all elements of the tensors into one vector and pad it with zeros."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    padding = -sum(map(len, flat)) % _MULTIPLE
    return torch.cat([*flat, flat[0].new_zeros(padding)]) if padding else torch.cat(flat)


def _unpack_mean(vector: Tensor, tensors: Sequence[Tensor], ranks: int) -> None:
    """Divide a vector from `_pack` by the number of ranks and copy it back into the tensors."""
    start = 0
    for tensor in tensors:
        elements = vector[start : start + tensor.numel()]
        tensor.copy_((elements / ranks).view(tensor.shape))
        start += tensor.numel()


def _bundles(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Split tensors into bundles that are reduced together. All tensors in a bundle have the same dtype."""
    bundle: list[Tensor] = []
    for tensor in tensors:
        size = sum(member.numel() for member in bundle) + tensor.numel()
        if bundle and (size > _BUNDLE_ELEMENTS or tensor.dtype != bundle[0].dtype):
            yield bundle
            bundle = []
        bundle.append(tensor)
    if bundle:
        yield bundle
