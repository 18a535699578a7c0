"""Eager PyTorch on the CPU, and base classes for eager backends."""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.backends.base import Backend, Batch, Function, HostGather, HostMean, RankGroup, prefetched
from pipeline.core.errors import ConfigError

# torch 2.14 introduced these names and deprecated the old ones.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_MAX_PROGRAMS = 256


def supports_bf16() -> bool:
    """Return whether this build of PyTorch includes oneDNN and the CPU has instructions for bf16 products."""
    operators: Any = torch.ops.mkldnn
    return hasattr(operators, "_linear_pointwise") and bool(operators._is_mkldnn_bf16_supported())


class Eager(Backend):
    """Base class for eager backends. Collectives use torch.distributed."""

    parallelism = frozenset({"parameters", "tensor", "offload", "process_group"})

    def all_gather(self, tensor: Tensor, ranks: RankGroup | None = None) -> Tensor:
        """Gather and concatenate tensors. Returns `tensor` unchanged if there is no process group."""
        if not dist.is_initialized():
            return tensor
        size, group = (dist.get_world_size(), None) if ranks is None else (ranks.size, ranks.process_group)
        output = tensor.new_empty((size * len(tensor), *tensor.shape[1:]))
        _all_gather(output, tensor, group=group)
        return output

    def all_reduce(self, tensor: Tensor, ranks: RankGroup) -> Tensor:
        output = tensor.clone()
        dist.all_reduce(output, group=ranks.process_group)
        return output

    def reduce_scatter(self, tensor: Tensor, ranks: RankGroup, scale: float = 1.0) -> Tensor:
        output = tensor.new_empty(len(tensor) // ranks.size)
        _reduce_scatter(output, tensor, group=ranks.process_group)
        return output.mul_(scale)

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=dtype)

    def compiled(self, function: Function) -> Function:
        if not has_compiler():
            raise ConfigError(
                "torch.compile needs a C compiler, but there is none on PATH",
                expected="cc, gcc or clang on PATH",
                next_command="install gcc, or use --no-train.compiled or --no-embed.compiled, which is slower",
            )
        raise_program_limit()
        return cast(Function, torch.compile(function, fullgraph=True, dynamic=False))

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)  # this seeds the host and all GPUs


def has_compiler() -> bool:
    """Return whether there is a C compiler, which torch.compile requires."""
    return any(map(shutil.which, ("cc", "gcc", "clang")))


def raise_program_limit() -> None:
    """Allow more programs of the same function than the default of 8. Layers have one or two for each row length."""
    from torch._dynamo import config as dynamo  # the import is slow

    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _MAX_PROGRAMS


class Accelerator(Eager):
    """Base class for eager backends of accelerators, which have their own memory and collectives."""

    can_compile = True

    def gather(self, tensors: Sequence[Tensor], host_gather: HostGather) -> list[Tensor]:
        del host_gather
        return [self.all_gather(tensor.detach().contiguous()) for tensor in tensors]

    @contextmanager
    def uploaded(self, batches: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
        """Prefetch batches in a background thread and copy them asynchronously on the current stream."""
        with prefetched(batches, depth=4) as ready:
            yield (
                {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()} for batch in ready
            )


_State = TypeVar("_State", Tensor, int)


def replayed(get: Callable[[], _State], put: Callable[[_State], None]) -> Callable[[], AbstractContextManager[None]]:
    """Implement Backend.replay, given functions that get and set the random state of a device."""
    state = get()

    @contextmanager
    def replay() -> Iterator[None]:
        current = get()
        put(state)
        try:
            yield
        finally:
            put(current)

    return replay


class CpuBackend(Eager):
    """The backend of the host CPU."""

    name = "cpu"
    shares_host_memory = True
    default_tokens = 1024  # per core, so that the activations fit into the core's share of the cache

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.emulates_bf16 = not supports_bf16()

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        return prefetched(batches, depth=4)

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        host_mean(list(tensors))

    def gather(self, tensors: Sequence[Tensor], host_gather: HostGather) -> list[Tensor]:
        return host_gather([tensor.detach() for tensor in tensors])

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        copies = [tensor.detach().clone() for tensor in tensors]
        return lambda: copies

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        return replayed(torch.get_rng_state, torch.set_rng_state)

    def memory_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)
