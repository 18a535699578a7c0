"""Eager PyTorch on the CPU."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import psutil
import torch
from torch import Tensor

from pipeline.backends.base import Batch, HostGather, HostMean
from pipeline.backends.eager import Eager
from pipeline.backends.prefetch import prefetched


class CpuBackend(Eager):
    """Backend of the host itself."""

    name = "cpu"
    shares_host_memory = True
    can_compile = False
    default_tokens = 1024  # for each core: activations stay in its share of the cache

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        return prefetched(batches, depth=4)

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        host_mean(list(tensors))

    def gather(self, tensors: Sequence[Tensor], host_gather: HostGather) -> list[Tensor]:
        return host_gather([tensor.detach() for tensor in tensors])

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        copies = self.to_host(tensors)
        return lambda: copies

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=dtype)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def memory_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def synchronise(self) -> None:
        return None
